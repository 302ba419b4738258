#include "kernel.cuh"

std::vector<cutlass_gemm::Entry> cutlass_gemm::fp8_kernels() {
  return kernels_of<cutlass::float_e4m3_t>();
}
