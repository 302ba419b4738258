#include "torch_overlap/overlap/cuda/launch.h"
#include "torch_overlap/overlap/cuda/operation.cuh"
#include "torch_overlap/overlap/cuda/values.cuh"
#include "torch_overlap/overlap/schedule.h"

namespace torch_overlap::cuda {
namespace {

constexpr int kThreads = 256;

// Barriers of blocks of the same index: the data to read is ready; all of it has been read, or
// summed.
enum class BlockBarrier : int { entry, reads };

// Returns the flag on rank `on` that rank `from` sets for this block and barrier.
__device__ uint32_t* block_flag(const LowLatencySumParams& p, BlockBarrier barrier, int on,
                                int from) {
  const int first =
      (static_cast<int>(barrier) * kMaxLowLatencyBlocks + static_cast<int>(blockIdx.x)) *
      p.operation.words.size;
  return p.flags[on] + (first + from) * kWordsPerLine;
}

// Barrier of the blocks of this index on all ranks. Called by all threads. Returns false, in all
// threads alike, if a wait has failed.
__device__ bool block_barrier(const LowLatencySumParams& p, BlockBarrier barrier,
                              const OperationStart& start) {
  const OperationParams& operation = p.operation;
  const ChannelWords& words = operation.words;
  bool is_good = true;
  if (is_peer(words)) {
    const int peer = static_cast<int>(threadIdx.x);
    uint32_t* const there = block_flag(p, barrier, peer, words.rank);
    uint32_t* const here = block_flag(p, barrier, words.rank, peer);
    is_good = !start.has_failed;
    if (barrier == BlockBarrier::entry && blockIdx.x == 0) {
      if (is_good)
        signal_entry(reinterpret_cast<EntryFlag*>(there), operation.payload, start.epoch);
      is_good = is_good && wait_for_entry(operation, reinterpret_cast<const EntryFlag*>(here),
                                          start.epoch, peer);
    } else {
      if (is_good) store_release(there, start.epoch);
      const WaitKind kind = barrier == BlockBarrier::entry ? WaitKind::begin : WaitKind::chunk;
      is_good = is_good && wait_for_epoch(operation, here, start.epoch, kind, peer);
    }
    if (!is_good) signal_abort(operation, peer);
  } else if (barrier == BlockBarrier::entry) {
    is_good = try_exclusive(operation, start);
  }
  return __syncthreads_and(static_cast<int>(is_good)) != 0;
}

template <typename T>
struct Vectors {
  static constexpr int kElements = 16 / sizeof(T);
  using Values = Pack<T, kElements>;

  // Stores vector `i` of `to`, which is vector `index` of the message, with the bias of its
  // columns.
  template <typename V>
  static __device__ void store(const LowLatencySumParams& p, void* to, uint32_t i, uint32_t index,
                               const V (&values)[kElements]) {
    Values stored;
    const T* bias = static_cast<const T*>(p.bias);
    if (bias != nullptr) bias += index % p.columns * kElements;
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      float value;
      if constexpr (std::is_same_v<V, T>) {
        value = widen(values[k]);
      } else {
        value = values[k];
      }
      if (bias != nullptr) value += widen(bias[k]);
      stored.values[k] = narrow<T>(value);
    }
    T* const at = static_cast<T*>(to) + static_cast<size_t>(i) * kElements;
    if (p.is_aligned) {
      *reinterpret_cast<Values*>(at) = stored;
      return;
    }
#pragma unroll
    for (int k = 0; k < kElements; ++k) at[k] = stored.values[k];
  }
};

// `ranks` is the number of ranks, or 0 for any number.
template <typename T, int ranks>
__device__ void add_up(const LowLatencySumParams& p) {
  constexpr int kMaxRanksUnrolled = ranks == 0 ? kMaxLowLatencyRanks : ranks;
  // Vectors of each rank that a thread loads concurrently.
  constexpr int unroll = kMaxRanksUnrolled < 4 ? 4 : kMaxRanksUnrolled == 4 ? 2 : 1;
  constexpr int kElements = Vectors<T>::kElements;
  const int size = ranks == 0 ? p.operation.words.size : ranks;
  const uint32_t step = gridDim.x * kThreads;
  for (uint32_t first = blockIdx.x * kThreads + threadIdx.x; first < p.count;
       first += unroll * step) {
    uint4 loaded[unroll][kMaxRanksUnrolled];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const uint32_t i = first + u * step;
#pragma unroll
      for (int rank = 0; rank < kMaxRanksUnrolled; ++rank) {
        // Bypasses L1: other ranks write this memory.
        if (i < p.count && rank < size) loaded[u][rank] = __ldcg(p.products[rank] + p.begin + i);
      }
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const uint32_t i = first + u * step;
      if (i >= p.count) break;
      float total[kElements];
#pragma unroll
      for (int rank = 0; rank < kMaxRanksUnrolled; ++rank) {
        if (rank >= size) break;
        const auto& values = reinterpret_cast<const typename Vectors<T>::Values&>(loaded[u][rank]);
#pragma unroll
        for (int k = 0; k < kElements; ++k) {
          const float value = widen(values.values[k]);
          total[k] = rank == 0 ? value : total[k] + value;
        }
      }
#pragma unroll
      for (int k = 0; k < kElements; ++k) total[k] *= p.factor;
      if (p.sums == nullptr) {
        Vectors<T>::store(p, p.own, i, p.begin + i, total);
        continue;
      }
      // Every rank uses this rounded sum, and adds its own bias to it.
      typename Vectors<T>::Values rounded;
#pragma unroll
      for (int k = 0; k < kElements; ++k) rounded.values[k] = narrow<T>(total[k]);
      p.sums[i] = reinterpret_cast<const uint4&>(rounded);
      Vectors<T>::store(p, p.own, i, p.begin + i, rounded.values);
    }
  }
}

// Reads the sums of the other ranks. A block reads those that their blocks of the same index have
// summed.
template <typename T, int ranks>
__device__ void take_sums(const LowLatencySumParams& p) {
  constexpr int kMaxRanksUnrolled = ranks == 0 ? kMaxLowLatencyRanks : ranks;
  const int size = ranks == 0 ? p.operation.words.size : ranks;
  const uint32_t step = gridDim.x * kThreads;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < p.slice; i += step) {
    uint4 loaded[kMaxRanksUnrolled];
    bool is_ready[kMaxRanksUnrolled];
#pragma unroll
    for (int rank = 0; rank < kMaxRanksUnrolled; ++rank) {
      is_ready[rank] =
          rank < size && rank != p.operation.words.rank && rank * p.slice + i < p.total;
      if (is_ready[rank]) loaded[rank] = __ldcg(p.all_sums[rank] + i);
    }
#pragma unroll
    for (int rank = 0; rank < kMaxRanksUnrolled; ++rank) {
      if (!is_ready[rank]) continue;
      const uint32_t index = rank * p.slice + i;
      const auto& values = reinterpret_cast<const typename Vectors<T>::Values&>(loaded[rank]);
      Vectors<T>::store(p, p.out, index, index, values.values);
    }
  }
}

template <typename T, int ranks>
__global__ void __launch_bounds__(kThreads)
    low_latency_sum_kernel(__grid_constant__ const LowLatencySumParams p) {
  const OperationParams& operation = p.operation;
  const ChannelWords& words = operation.words;
  const OperationStart start = start_operation(operation);
  // Work enqueued before the kernel happens before its flags.
  bool is_good = block_barrier(p, BlockBarrier::entry, start);
  // Each block has read the epoch by now. The last one to arrive here sets it.
  const uint32_t ticket = threadIdx.x == 0 ? atomicAdd(words.ticket, 1U) : 0;
  if (is_good) {
    add_up<T, ranks>(p);
    __syncthreads();  // Orders the block's reads and stores before its flags.
    is_good = block_barrier(p, BlockBarrier::reads, start);
    if (is_good && p.sums != nullptr) take_sums<T, ranks>(p);
  }
  if (threadIdx.x == 0 && ticket + 1 == gridDim.x) {
    leave_operation(operation, start.epoch, is_good);
  }
}

template <typename T>
const void* kernel_of(int size) {
  switch (size) {
    case 2:
      return reinterpret_cast<const void*>(low_latency_sum_kernel<T, 2>);
    case 4:
      return reinterpret_cast<const void*>(low_latency_sum_kernel<T, 4>);
    case 8:
      return reinterpret_cast<const void*>(low_latency_sum_kernel<T, 8>);
    default:
      return reinterpret_cast<const void*>(low_latency_sum_kernel<T, 0>);
  }
}

const void* kernel_of(SumType type, int size) {
  switch (type) {
    case SumType::f32:
      return kernel_of<float>(size);
    case SumType::f16:
      return kernel_of<__half>(size);
    case SumType::bf16:
      return kernel_of<__nv_bfloat16>(size);
    default:
      return nullptr;
  }
}

}  // namespace

cudaError_t launch_low_latency_sum(const LowLatencySumParams& params, int blocks,
                                   cudaStream_t stream) {
  const void* const kernel = kernel_of(params.type, params.operation.words.size);
  if (kernel == nullptr || blocks > kMaxLowLatencyBlocks) return cudaErrorInvalidValue;
  LowLatencySumParams p = params;
  void* arguments[] = {&p};
  return launch_with_cluster(kernel, dim3(static_cast<unsigned int>(blocks)), dim3(kThreads), 1,
                             arguments, stream);
}

cudaError_t load_low_latency_sum_kernels() {
  for (const SumType type : {SumType::f32, SumType::f16, SumType::bf16}) {
    for (const int size : {0, 2, 4, 8}) {
      const cudaError_t status = load_kernels({kernel_of(type, size)});
      if (status != cudaSuccess) return status;
    }
  }
  return cudaSuccess;
}

}  // namespace torch_overlap::cuda
