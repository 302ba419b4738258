#include "kernel.cuh"

std::vector<cutlass_gemm::Entry> cutlass_gemm::bf16_kernels() {
  return kernels_of<cutlass::bfloat16_t>();
}
