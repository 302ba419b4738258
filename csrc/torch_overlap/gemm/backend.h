#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/operand.h"

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

// Products on one kind of device. A folder a kind (cpu/, cublaslt/), which registers itself: what
// is built decides what there is.
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
};

// One for each kind of device; registering twice replaces it.
TORCH_OVERLAP_API void register_gemm_backend(c10::DeviceType type,
                                             std::shared_ptr<GemmBackend> backend);
// Throws kUnsupported, naming `op`, where there is none.
TORCH_OVERLAP_API GemmBackend& gemm_backend(std::string_view op, c10::DeviceType type);

// For use at namespace scope.
struct TORCH_OVERLAP_API GemmBackendRegistration {
  GemmBackendRegistration(c10::DeviceType type, std::shared_ptr<GemmBackend> backend) {
    register_gemm_backend(type, std::move(backend));
  }
};

}  // namespace torch_overlap
