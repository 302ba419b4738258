#include <algorithm>

#include "torch_overlap/symm/cuda/wait_device.h"
#include "torch_overlap/symm/cuda/window_kernels.h"

namespace torch_overlap::cuda {
namespace {

struct Config {
  static constexpr int kThreads = 512;
  // Enough for the sizes that a kernel copies. More would take SMs from concurrent kernels.
  static constexpr int kMaxBlocks = 32;
  static constexpr int kUnroll = 4;
};

template <typename Vector>
__global__ void __launch_bounds__(Config::kThreads)
    put_kernel(Vector* __restrict__ to, const Vector* __restrict__ from, size_t count,
               size_t tail) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + (Config::kUnroll - 1) * stride < count; i += Config::kUnroll * stride) {
    Vector values[Config::kUnroll];
#pragma unroll
    for (int k = 0; k < Config::kUnroll; ++k) values[k] = from[i + k * stride];
#pragma unroll
    for (int k = 0; k < Config::kUnroll; ++k) to[i + k * stride] = values[k];
  }
  for (; i < count; i += stride) to[i] = from[i];
  // Bytes after the last whole vector: fewer than one vector.
  if (blockIdx.x == 0 && threadIdx.x < tail) {
    reinterpret_cast<uint8_t*>(to + count)[threadIdx.x] =
        reinterpret_cast<const uint8_t*>(from + count)[threadIdx.x];
  }
}

template <typename Vector>
cudaError_t launch_put_of(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  const size_t count = bytes / sizeof(Vector);
  constexpr size_t kPerBlock = static_cast<size_t>(Config::kThreads) * Config::kUnroll;
  const auto blocks = static_cast<unsigned int>(
      std::clamp<size_t>((count + kPerBlock - 1) / kPerBlock, 1, Config::kMaxBlocks));
  put_kernel<Vector><<<blocks, Config::kThreads, 0, stream>>>(
      static_cast<Vector*>(to), static_cast<const Vector*>(from), count, bytes % sizeof(Vector));
  return cudaGetLastError();
}

__global__ void signal_kernel(uint64_t* count, WaitControl control) {
  // Reads the host's word, too: the data may come from an operation that an abort has ended.
  if (has_failed_or_stopped(control)) return;
  // The kernels and copies before this one on the stream have ended, and their writes are in the
  // memory of the peer or on the way there. The fence orders them before the count.
  __threadfence_system();
  add_release(count, 1);
}

__global__ void wait_kernel(WaitParams p) {
  // Every wait consumes another signal, also if two of them run concurrently, or one is replayed.
  const uint64_t expected = atomicAdd(reinterpret_cast<unsigned long long*>(p.consumed), 1ULL) + 1;
  WaitRecord what{};
  what.kind = WaitKind::signal;
  what.memory_id = p.memory_id;
  what.peer = p.peer;
  what.expected = expected;
  wait_until(p.control, p.arrived, [expected](uint64_t seen) { return seen >= expected; }, what);
}

}  // namespace

cudaError_t launch_put(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  if (bits % sizeof(uint4) == 0) return launch_put_of<uint4>(to, from, bytes, stream);
  if (bits % sizeof(uint2) == 0) return launch_put_of<uint2>(to, from, bytes, stream);
  if (bits % sizeof(uint32_t) == 0) return launch_put_of<uint32_t>(to, from, bytes, stream);
  if (bits % sizeof(uint16_t) == 0) return launch_put_of<uint16_t>(to, from, bytes, stream);
  return launch_put_of<uint8_t>(to, from, bytes, stream);
}

cudaError_t launch_signal(uint64_t* count, const WaitControl& control, cudaStream_t stream) {
  signal_kernel<<<1, 1, 0, stream>>>(count, control);
  return cudaGetLastError();
}

cudaError_t load_window_kernels() {
  const void* const kernels[] = {reinterpret_cast<const void*>(put_kernel<uint4>),
                                 reinterpret_cast<const void*>(put_kernel<uint2>),
                                 reinterpret_cast<const void*>(put_kernel<uint32_t>),
                                 reinterpret_cast<const void*>(put_kernel<uint16_t>),
                                 reinterpret_cast<const void*>(put_kernel<uint8_t>),
                                 reinterpret_cast<const void*>(signal_kernel),
                                 reinterpret_cast<const void*>(wait_kernel)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t launch_wait(const WaitParams& params, cudaStream_t stream) {
  wait_kernel<<<1, 1, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace torch_overlap::cuda
