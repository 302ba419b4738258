#include <algorithm>

#include "torch_overlap/overlap/cuda/launch.h"
#include "torch_overlap/overlap/cuda/operation.cuh"

namespace torch_overlap::cuda {
namespace {

struct GatherConfig {
  static constexpr int kThreads = 512;
  static constexpr int kUnroll = 4;
  static constexpr int kMaxBlocks = 128;
};
static_assert(kMaxRanks <= GatherConfig::kThreads);

// Every block waits until all peers have begun; block 0 signals to them that this rank has. Returns
// false, in all threads alike, if a wait has failed.
__device__ bool enter_operation(const LowLatencyGatherParams& p, const OperationStart& start) {
  const OperationParams& operation = p.operation;
  const ChannelWords& words = operation.words;
  bool is_good = true;
  if (is_peer(words)) {
    const int peer = static_cast<int>(threadIdx.x);
    is_good = !start.has_failed;
    if (is_good && blockIdx.x == 0) signal_entry(p.begin.at[peer], operation.payload, start.epoch);
    is_good = is_good &&
              wait_for_entry(operation, p.entry_flags + peer * kEntriesPerLine, start.epoch, peer);
    if (!is_good) signal_abort(operation, peer);
  } else {
    is_good = try_exclusive(operation, start);
  }
  return __syncthreads_and(static_cast<int>(is_good)) != 0;
}

template <typename Vector>
__device__ void store_to_peers(const LowLatencyGatherParams& p) {
  constexpr int unroll = GatherConfig::kUnroll;
  const auto* const from = static_cast<const Vector*>(p.from);
  const size_t count = p.bytes / sizeof(Vector);
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  const int size = p.operation.words.size;
  for (size_t first = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; first < count;
       first += unroll * step) {
    Vector values[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (first + u * step < count) values[u] = from[first + u * step];
    }
    // Begins with the next rank, so that all ranks are written to at the same time.
    for (int i = 1; i <= size; ++i) {
      auto* const to = static_cast<Vector*>(p.to[(p.operation.words.rank + i) % size]);
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        if (first + u * step < count) to[first + u * step] = values[u];
      }
    }
  }
}

// True if this block is the last to arrive, after the stores of all blocks. Called by all threads.
__device__ bool is_last_block(const OperationParams& p) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    is_last = atomicAdd(p.words.ticket, 1U) + 1 == gridDim.x;
    __threadfence_system();
  }
  __syncthreads();
  return is_last;
}

// Called by the last block. Signals to the peers that this rank's rows have arrived, and waits for
// theirs.
__device__ bool exchange_flags(const LowLatencyGatherParams& p, uint32_t epoch) {
  const OperationParams& operation = p.operation;
  bool is_good = true;
  if (is_peer(operation.words)) {
    const int peer = static_cast<int>(threadIdx.x);
    is_good = !has_failed(operation.control);  // A wait of another block may have failed.
    if (is_good) store_release(p.flag.at[peer], epoch);
    is_good = is_good && wait_for_epoch(operation, p.notified + peer * kWordsPerLine, epoch,
                                        WaitKind::chunk, peer);
    if (!is_good) signal_abort(operation, peer);
  }
  return __syncthreads_and(static_cast<int>(is_good)) != 0;
}

template <typename Vector>
__global__ void __launch_bounds__(GatherConfig::kThreads)
    low_latency_gather_kernel(__grid_constant__ const LowLatencyGatherParams p) {
  const OperationStart start = start_operation(p.operation);
  if (enter_operation(p, start)) store_to_peers<Vector>(p);
  if (!is_last_block(p.operation)) return;
  const bool is_good = exchange_flags(p, start.epoch);
  if (threadIdx.x == 0) leave_operation(p.operation, start.epoch, is_good);
}

// Returns the kernel with the largest vectors to which the addresses and the number of bytes are
// aligned.
const void* kernel_for(const LowLatencyGatherParams& p) {
  auto bits = reinterpret_cast<uintptr_t>(p.from) | p.bytes;
  for (int rank = 0; rank < p.operation.words.size; ++rank) {
    bits |= reinterpret_cast<uintptr_t>(p.to[rank]);
  }
  if (bits % sizeof(uint4) == 0) {
    return reinterpret_cast<const void*>(low_latency_gather_kernel<uint4>);
  }
  if (bits % sizeof(uint32_t) == 0) {
    return reinterpret_cast<const void*>(low_latency_gather_kernel<uint32_t>);
  }
  return reinterpret_cast<const void*>(low_latency_gather_kernel<uint8_t>);
}

}  // namespace

cudaError_t launch_low_latency_gather(const LowLatencyGatherParams& params, cudaStream_t stream) {
  constexpr size_t kBytesPerBlock = GatherConfig::kThreads * sizeof(uint4);
  const size_t blocks = std::clamp<size_t>((params.bytes + kBytesPerBlock - 1) / kBytesPerBlock, 1,
                                           GatherConfig::kMaxBlocks);
  LowLatencyGatherParams p = params;
  void* arguments[] = {&p};
  return launch_with_cluster(kernel_for(p), dim3(static_cast<unsigned int>(blocks)),
                             dim3(GatherConfig::kThreads), 1, arguments, stream);
}

cudaError_t load_low_latency_gather_kernels() {
  return load_kernels({reinterpret_cast<const void*>(low_latency_gather_kernel<uint4>),
                       reinterpret_cast<const void*>(low_latency_gather_kernel<uint32_t>),
                       reinterpret_cast<const void*>(low_latency_gather_kernel<uint8_t>)});
}

}  // namespace torch_overlap::cuda
