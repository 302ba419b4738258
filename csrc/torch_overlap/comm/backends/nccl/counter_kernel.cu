#include "torch_overlap/comm/backends/nccl/counter_kernel.h"

namespace torch_overlap {
namespace {

__global__ void increment_counter_kernel(uint32_t* counter, volatile uint32_t* shown) {
  const uint32_t sum = *counter + 1;
  *counter = sum;
  *shown = sum;
}

}  // namespace

cudaError_t increment_counter(uint32_t* counter, uint32_t* shown, cudaStream_t stream) {
  increment_counter_kernel<<<1, 1, 0, stream>>>(counter, shown);
  return cudaGetLastError();
}

}  // namespace torch_overlap
