#include "torch_overlap/gemm/cublaslt/handle.h"

#include <c10/cuda/CUDAFunctions.h>

#include <cstddef>
#include <mutex>

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/gemm/cublaslt/descriptors.h"

namespace torch_overlap::cublaslt {
namespace {

struct Handle {
  std::once_flag made;
  cublasLtHandle_t handle = nullptr;
};

}  // namespace

cublasLtHandle_t current_handle() {
  // Never destroyed, because cuBLASLt may be unloaded first.
  static auto* const handles = new Handle[static_cast<size_t>(c10::cuda::device_count())];
  Handle& of_device = handles[c10::cuda::current_device()];
  std::call_once(of_device.made, [&of_device] {
    const cuda::RelaxedCapture relaxed;
    check(cublasLtCreate(&of_device.handle), "cublasLtCreate");
  });
  return of_device.handle;
}

}  // namespace torch_overlap::cublaslt
