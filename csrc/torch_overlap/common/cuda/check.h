#pragma once

#include <cuda_runtime_api.h>

#include <string_view>
#include <type_traits>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::cuda {

// Throws if a CUDA call failed. `what` names the call.
inline void check(cudaError_t status, std::string_view what) {
  if (__builtin_expect(status == cudaSuccess, 1)) return;
  (void)cudaGetLastError();  // reported here, not again by the next call
  fail(ErrorKind::kRuntime, what, ": expected success from CUDA, got ", cudaGetErrorName(status),
       " (", cudaGetErrorString(status), ")");
}

// `name` is a function that returns the name. It is called only on failure.
template <typename Name>
  requires std::is_invocable_v<Name>
void check(cudaError_t status, const Name& name) {
  if (__builtin_expect(status == cudaSuccess, 1)) return;
  check(status, std::string_view(name()));
}

}  // namespace torch_overlap::cuda
