#include "torch_overlap/overlap/cuda/kernels.h"
#include "torch_overlap/overlap/cuda/launch.h"
#include "torch_overlap/overlap/cuda/operation.cuh"
#include "torch_overlap/symm/cuda/wait_device.h"

namespace torch_overlap::cuda {
namespace {

constexpr int kWarpSize = 32;

__global__ void __launch_bounds__(kWarpSize)
    begin_kernel(__grid_constant__ const ChannelWords words,
                 __grid_constant__ const PeerEntryFlags peer_entry_flags,
                 __grid_constant__ const PeerWords peer_abort_flags, const EntryFlag* entry_flags,
                 uint32_t payload, __grid_constant__ const WaitControl control) {
  const Start start = start_of(words, control);
  const uint32_t epoch = start.epoch;
  bool is_good = !start.has_failed;
  for (int peer = static_cast<int>(threadIdx.x); peer < words.size && is_good; peer += kWarpSize) {
    if (peer != words.rank) signal_entry(peer_entry_flags.at[peer], payload, epoch);
  }
  for (int peer = static_cast<int>(threadIdx.x); peer < words.size && is_good; peer += kWarpSize) {
    if (peer == words.rank) continue;
    is_good = wait_for_entry(words, control, entry_flags + peer * kEntriesPerLine, epoch, payload,
                             peer, kHostPollIntervalNs);
  }
  if (__all_sync(~0U, static_cast<int>(is_good)) != 0) {
    if (threadIdx.x == 0) *words.epoch = epoch;
    return;
  }
  for (int peer = static_cast<int>(threadIdx.x); peer < words.size; peer += kWarpSize) {
    if (peer != words.rank) store_release(peer_abort_flags.at[peer], 1);
  }
}

__global__ void __launch_bounds__(kWarpSize)
    signal_flags_kernel(ChannelWords words, __grid_constant__ const PeerWords peer_flags,
                        WaitControl control) {
  if (has_failed(control)) return;
  const uint32_t epoch = *words.epoch;
  // Orders the writes of earlier kernels and copies before the flag.
  __threadfence_system();
  for (int peer = static_cast<int>(threadIdx.x); peer < words.size; peer += kWarpSize) {
    if (peer != words.rank) store_release(peer_flags.at[peer], epoch);
  }
}

__global__ void __launch_bounds__(kWarpSize)
    await_kernel(ChannelWords words, __grid_constant__ const FlagList flags, WaitControl control) {
  const uint32_t epoch = *words.epoch;
  for (int i = static_cast<int>(threadIdx.x); i < flags.count; i += kWarpSize) {
    await_word(words, flags.at[i], epoch, WaitKind::chunk, flags.source[i], control);
  }
}

struct CopySignalConfig {
  static constexpr int kThreads = 512;
  static constexpr int kUnroll = 4;
};

template <typename Vector>
__global__ void __launch_bounds__(CopySignalConfig::kThreads)
    copy_signal_kernel(ChannelWords words, Vector* to, const Vector* from, size_t count,
                       size_t tail, uint32_t* flag, WaitControl control) {
  if (has_failed(control)) return;
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + (CopySignalConfig::kUnroll - 1) * stride < count;
       i += CopySignalConfig::kUnroll * stride) {
    Vector values[CopySignalConfig::kUnroll];
#pragma unroll
    for (int k = 0; k < CopySignalConfig::kUnroll; ++k) values[k] = from[i + k * stride];
#pragma unroll
    for (int k = 0; k < CopySignalConfig::kUnroll; ++k) to[i + k * stride] = values[k];
  }
  for (; i < count; i += stride) to[i] = from[i];
  if (blockIdx.x == 0 && threadIdx.x < tail) {
    reinterpret_cast<uint8_t*>(to + count)[threadIdx.x] =
        reinterpret_cast<const uint8_t*>(from + count)[threadIdx.x];
  }
  // The last block signals: each block's stores are ordered before its ticket.
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(words.ticket, 1U) + 1 < gridDim.x) return;
  *words.ticket = 0;
  __threadfence_system();
  store_release(flag, *words.epoch);
}

template <typename Vector>
cudaError_t launch_copy_signal_of(const ChannelWords& words, void* to, const void* from,
                                  size_t bytes, uint32_t* flag, const WaitControl& control,
                                  int blocks, int cluster, cudaStream_t stream) {
  ChannelWords w = words;
  WaitControl c = control;
  auto* typed_to = static_cast<Vector*>(to);
  const auto* typed_from = static_cast<const Vector*>(from);
  size_t count = bytes / sizeof(Vector);
  size_t tail = bytes % sizeof(Vector);
  void* arguments[] = {&w, &typed_to, &typed_from, &count, &tail, &flag, &c};
  return launch_with_cluster(reinterpret_cast<const void*>(copy_signal_kernel<Vector>),
                             dim3(static_cast<unsigned int>(blocks)),
                             dim3(CopySignalConfig::kThreads), cluster, arguments, stream);
}

}  // namespace

cudaError_t launch_begin(const ChannelWords& words, const PeerEntryFlags& peer_entry_flags,
                         const PeerWords& peer_abort_flags, const EntryFlag* entry_flags,
                         uint32_t payload, const WaitControl& control, cudaStream_t stream) {
  begin_kernel<<<1, kWarpSize, 0, stream>>>(words, peer_entry_flags, peer_abort_flags, entry_flags,
                                            payload, control);
  return cudaGetLastError();
}

cudaError_t launch_signal_flags(const ChannelWords& words, const PeerWords& peer_flags,
                                const WaitControl& control, cudaStream_t stream) {
  signal_flags_kernel<<<1, kWarpSize, 0, stream>>>(words, peer_flags, control);
  return cudaGetLastError();
}

cudaError_t launch_await(const ChannelWords& words, const FlagList& flags,
                         const WaitControl& control, cudaStream_t stream) {
  await_kernel<<<1, kWarpSize, 0, stream>>>(words, flags, control);
  return cudaGetLastError();
}

cudaError_t launch_copy_signal(const ChannelWords& words, void* to, const void* from, size_t bytes,
                               uint32_t* flag, const WaitControl& control, int blocks, int cluster,
                               cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  if (bits % sizeof(uint4) == 0) {
    return launch_copy_signal_of<uint4>(words, to, from, bytes, flag, control, blocks, cluster,
                                        stream);
  }
  if (bits % sizeof(uint32_t) == 0) {
    return launch_copy_signal_of<uint32_t>(words, to, from, bytes, flag, control, blocks, cluster,
                                           stream);
  }
  return launch_copy_signal_of<uint8_t>(words, to, from, bytes, flag, control, blocks, cluster,
                                        stream);
}

cudaError_t load_overlap_kernels() {
  cudaError_t status = load_kernels({reinterpret_cast<const void*>(begin_kernel),
                                     reinterpret_cast<const void*>(signal_flags_kernel),
                                     reinterpret_cast<const void*>(await_kernel),
                                     reinterpret_cast<const void*>(copy_signal_kernel<uint4>),
                                     reinterpret_cast<const void*>(copy_signal_kernel<uint32_t>),
                                     reinterpret_cast<const void*>(copy_signal_kernel<uint8_t>)});
  for (const auto load :
       {load_sum_kernels, load_low_latency_sum_kernels, load_low_latency_gather_kernels}) {
    if (status == cudaSuccess) status = load();
  }
  return status;
}

}  // namespace torch_overlap::cuda
