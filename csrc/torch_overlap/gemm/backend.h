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

// A GEMM after its checks. 8-bit operands are in their K-major orientation. m and n are not 0.
struct GemmProblem {
  std::string_view op;
  const GemmArgs& args;
  GemmShape shape;
  OperandView lhs;  // 8-bit: [m, k], not transposed
  OperandView rhs;  // 8-bit: [n, k], transposed
};

// Returns the matrix that is added after the epilogue; undefined if there is none.
inline const at::Tensor& residual_of(const GemmArgs& args) {
  return args.accumulate ? args.out : args.epilogue.residual;
}

// Checked arguments of quantize(). x may have any strides; scale is undefined if it is computed
// from x.
struct QuantizeArgs {
  std::string_view op;
  const at::Tensor& x;
  const QuantizeOptions& options;
  const at::Tensor& scale;
};

struct DequantizeArgs {
  const at::Tensor& data;
  const at::Tensor& scale_inv;
  ScalingMode scaling;
  bool swizzled;
  at::ScalarType dtype;  // dtype of the result
};

// Checked arguments of update_scale() in quantize.h: scale = largest / amax of the history.
struct ScaleUpdate {
  const at::Tensor& amax_history;
  const at::Tensor& scale;
  float largest;
  bool uses_history_max;  // amax is the largest of the history; otherwise its entry 0
};

// GEMMs on one kind of device, and quantization to the 8-bit floats that they multiply. Each kind
// of device has a folder (cpu/, cublaslt/) and registers itself, so the build decides which are
// available.
//
// Thread-safe.
class TORCH_OVERLAP_API GemmBackend {
 public:
  virtual ~GemmBackend() = default;

  // Throws kUnsupported if this device does not support the problem. Part of check_gemm(): callers
  // that communicate have not sent anything yet.
  virtual void check(const GemmProblem& problem) const {}
  // Runs on the current stream without blocking the host. The device of the problem is current.
  virtual void run(const GemmProblem& problem) = 0;
  // For a problem with GemmArgs::early_start: loads the kernel that can start early, which may wait
  // for running kernels. Returns false if there is none.
  virtual bool load_early(const GemmProblem& problem) { return false; }
  // custom_kernels() returns the names of this project's kernels that support the problem;
  // run_custom() runs one.
  virtual std::vector<std::string> custom_kernels(const GemmProblem& problem) { return {}; }
  virtual void run_custom(const GemmProblem& problem, size_t index) {}
  // Runs all problems, unordered among themselves. Later work on the current stream is ordered
  // after all of them.
  virtual void run_group(const std::vector<GemmProblem>& problems) {
    for (const auto& problem : problems) run(problem);
  }

  // Quantizes by kernels of this project, on the current stream; nullopt if torch's operators are
  // to be used. The second result is the largest |x|, for modes with one scale.
  virtual std::optional<std::pair<Quantized, at::Tensor>> quantize(const QuantizeArgs& args) {
    return std::nullopt;
  }
  virtual std::optional<at::Tensor> dequantize(const DequantizeArgs& args) { return std::nullopt; }
  virtual bool update_scale(const ScaleUpdate& update) { return false; }
};

// Registers the backend of one kind of device; a second registration replaces it.
TORCH_OVERLAP_API void register_gemm_backend(c10::DeviceType type,
                                             std::shared_ptr<GemmBackend> backend);
// Returns null if there is none.
GemmBackend* find_gemm_backend(c10::DeviceType type);
// Throws kUnsupported, naming `op`, if there is none.
TORCH_OVERLAP_API GemmBackend& gemm_backend(std::string_view op, c10::DeviceType type);

// For use at namespace scope.
struct TORCH_OVERLAP_API GemmBackendRegistration {
  GemmBackendRegistration(c10::DeviceType type, std::shared_ptr<GemmBackend> backend) {
    register_gemm_backend(type, std::move(backend));
  }
};

}  // namespace torch_overlap
