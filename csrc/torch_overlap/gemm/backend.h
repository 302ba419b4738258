#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/operand.h"
#include "torch_overlap/gemm/quantize.h"

namespace torch_overlap {

// A problem after its checks: of each 8-bit operand the orientation whose rows run along k. m and n
// are not 0.
struct GemmProblem {
  std::string_view op;
  const GemmArgs& args;
  GemmShape shape;
  OperandView lhs;  // 8-bit: [m, k], not transposed
  OperandView rhs;  // 8-bit: [n, k], transposed
};

// What is added to the product behind its epilogue; undefined: nothing.
inline const at::Tensor& residual_of(const GemmArgs& args) {
  return args.accumulate ? args.out : args.epilogue.residual;
}

// After their checks. x has any strides; scale is undefined where it follows from x.
struct QuantizeCall {
  std::string_view op;
  const at::Tensor& x;
  const QuantizeOptions& options;
  const at::Tensor& scale;
};

struct DequantizeCall {
  const at::Tensor& data;
  const at::Tensor& scale_inv;
  ScalingMode scaling;
  bool swizzled;
  at::ScalarType dtype;  // of the result
};

// As update_scale() of quantize.h: the scale is largest / the history's amax.
struct ScaleUpdate {
  const at::Tensor& amax_history;
  const at::Tensor& scale;
  float largest;
  bool of_all_steps;  // amax is the largest of the history; its entry 0 otherwise
};

// Products on one kind of device, and the 8-bit values that they multiply. A folder a kind (cpu/,
// cublaslt/), which registers itself: what is built decides what there is.
//
// Threads: any.
class TORCH_OVERLAP_API GemmBackend {
 public:
  virtual ~GemmBackend() = default;

  // Throws kUnsupported for what this device does not multiply. A part of check_gemm(): callers
  // that communicate have sent nothing by then.
  virtual void check(const GemmProblem& problem) const {}
  // The device of the problem is current. On the current stream; no waiting on the host.
  virtual void run(const GemmProblem& problem) = 0;
  // Kernels of our own that take the problem, and running one of them.
  virtual std::vector<std::string> own_kernels(const GemmProblem& problem) { return {}; }
  virtual void run_own(const GemmProblem& problem, size_t index) {}
  // All of them, in no order among themselves; done, as seen from the current stream, when the call
  // returns.
  virtual void run_group(const std::vector<GemmProblem>& problems) {
    for (const auto& problem : problems) run(problem);
  }

  // By kernels of its own, on the current stream; nothing: torch's operators do it. The second
  // result is the largest |x|, of modes with one scale.
  virtual std::optional<std::pair<Quantized, at::Tensor>> quantize(const QuantizeCall& call) {
    return std::nullopt;
  }
  virtual std::optional<at::Tensor> dequantize(const DequantizeCall& call) { return std::nullopt; }
  virtual bool update_scale(const ScaleUpdate& update) { return false; }
};

// One for each kind of device; registering twice replaces it.
TORCH_OVERLAP_API void register_gemm_backend(c10::DeviceType type,
                                             std::shared_ptr<GemmBackend> backend);
// Null where there is none.
GemmBackend* find_gemm_backend(c10::DeviceType type);
// Throws kUnsupported, naming `op`, where there is none.
TORCH_OVERLAP_API GemmBackend& gemm_backend(std::string_view op, c10::DeviceType type);

// For use at namespace scope.
struct TORCH_OVERLAP_API GemmBackendRegistration {
  GemmBackendRegistration(c10::DeviceType type, std::shared_ptr<GemmBackend> backend) {
    register_gemm_backend(type, std::move(backend));
  }
};

}  // namespace torch_overlap
