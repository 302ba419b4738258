#include "torch_overlap/comm/backends/nccl/mark_kernel.h"

namespace torch_overlap {
namespace {

__global__ void bump_kernel(uint32_t* counter, volatile uint32_t* shown) {
  const uint32_t sum = *counter + 1;
  *counter = sum;
  *shown = sum;
}

}  // namespace

cudaError_t bump(uint32_t* counter, uint32_t* shown, cudaStream_t stream) {
  bump_kernel<<<1, 1, 0, stream>>>(counter, shown);
  return cudaGetLastError();
}

}  // namespace torch_overlap
