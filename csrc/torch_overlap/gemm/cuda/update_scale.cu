#include <cstdint>

#include "torch_overlap/gemm/cuda/quantize.h"

namespace torch_overlap::cuda {
namespace {

constexpr int kThreads = 128;

// Returns the larger value. Keeps a NaN.
__device__ __forceinline__ float larger(float a, float b) { return a >= b || isnan(a) ? a : b; }

// A thread updates one scale, and its column of the history.
__global__ void __launch_bounds__(kThreads)
    update_scale_kernel(const __grid_constant__ ScaleUpdateParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.count) return;
  float* const history = p.history + i;
  const float newest = history[0];
  float amax = newest;
  for (int64_t step = 1; step < p.length; ++step) {
    const float of_step = history[step * p.count];
    if (p.uses_history_max) amax = larger(amax, of_step);
    if (step > 1) history[(step - 1) * p.count] = of_step;
  }
  if (p.length > 1) history[(p.length - 1) * p.count] = newest;
  history[0] = 0;
  if (!(amax > 0) || isinf(amax)) return;
  p.scale[i] = fminf(__fmul_rn(__frcp_rn(amax), p.largest), 0x1p126F);
}

}  // namespace

cudaError_t launch_update_scale(const ScaleUpdateParams& p, cudaStream_t stream) {
  if (p.count == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned int>((p.count + kThreads - 1) / kThreads);
  update_scale_kernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace torch_overlap::cuda
