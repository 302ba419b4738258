#include "torch_overlap/overlap/cuda/launch.h"
#include "torch_overlap/overlap/cuda/operation.cuh"
#include "torch_overlap/overlap/cuda/values.cuh"
#include "torch_overlap/overlap/schedule.h"

namespace torch_overlap::cuda {
namespace {

constexpr int kThreads = 256;

// Where blocks of the same number meet: what is read is there; all has been read, or summed.
enum class Meeting : int { entry, reads };

// The flag of this block and meeting on rank `on`, from rank `from`.
__device__ uint32_t* flag_of(const DirectSumParams& p, Meeting meeting, int on, int from) {
  const int first = (static_cast<int>(meeting) * kDirectBlocks + static_cast<int>(blockIdx.x)) *
                    p.operation.words.size;
  return p.flags[on] + (first + from) * kWordsInLine;
}

// Whether block b of all ranks have come here, which say so to each other: all threads. False, for
// all threads alike: a wait has failed.
__device__ bool meet(const DirectSumParams& p, Meeting meeting, const OperationStart& start) {
  const OperationParams& operation = p.operation;
  const ChannelWords& words = operation.words;
  bool is_good = true;
  if (is_peer(words)) {
    const int peer = static_cast<int>(threadIdx.x);
    uint32_t* const there = flag_of(p, meeting, peer, words.rank);
    uint32_t* const here = flag_of(p, meeting, words.rank, peer);
    is_good = !start.has_failed;
    if (meeting == Meeting::entry && blockIdx.x == 0) {
      if (is_good) tell_entry(reinterpret_cast<BegunEntry*>(there), operation.rows, start.epoch);
      is_good = is_good &&
                begins(operation, reinterpret_cast<const BegunEntry*>(here), start.epoch, peer);
    } else {
      if (is_good) store_release(there, start.epoch);
      const WaitKind kind = meeting == Meeting::entry ? WaitKind::begin : WaitKind::chunk;
      is_good = is_good && comes(operation, here, start.epoch, kind, peer);
    }
    if (!is_good) tell_gone(operation, peer);
  } else if (meeting == Meeting::entry) {
    is_good = is_alone(operation, start);
  }
  return __syncthreads_and(static_cast<int>(is_good)) != 0;
}

template <typename T>
struct Vectors {
  static constexpr int kElements = 16 / sizeof(T);
  using Values = Pack<T, kElements>;

  // Vector `i` of `to`, which is one of the message at `index`: with the bias of its columns.
  template <typename V>
  static __device__ void store(const DirectSumParams& p, void* to, uint32_t i, uint32_t index,
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

// ranks: how many there are; 0: any number.
template <typename T, int ranks>
__device__ void add_up(const DirectSumParams& p) {
  constexpr int kMost = ranks == 0 ? kMostDirectRanks : ranks;
  // Loads of a thread under way at once.
  constexpr int unroll = kMost < 4 ? 4 : kMost == 4 ? 2 : 1;
  constexpr int kElements = Vectors<T>::kElements;
  const int size = ranks == 0 ? p.operation.words.size : ranks;
  const uint32_t step = gridDim.x * kThreads;
  for (uint32_t first = blockIdx.x * kThreads + threadIdx.x; first < p.count;
       first += unroll * step) {
    uint4 loaded[unroll][kMost];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const uint32_t i = first + u * step;
#pragma unroll
      for (int rank = 0; rank < kMost; ++rank) {
        // Written by others: not by way of L1.
        if (i < p.count && rank < size) loaded[u][rank] = __ldcg(p.products[rank] + p.begin + i);
      }
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const uint32_t i = first + u * step;
      if (i >= p.count) break;
      float total[kElements];
#pragma unroll
      for (int rank = 0; rank < kMost; ++rank) {
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
      // All ranks round it here, and add their own bias to that.
      typename Vectors<T>::Values rounded;
#pragma unroll
      for (int k = 0; k < kElements; ++k) rounded.values[k] = narrow<T>(total[k]);
      p.sums[i] = reinterpret_cast<const uint4&>(rounded);
      Vectors<T>::store(p, p.own, i, p.begin + i, rounded.values);
    }
  }
}

// The sums of the others. A block takes what their blocks of the same number have summed.
template <typename T, int ranks>
__device__ void take_sums(const DirectSumParams& p) {
  constexpr int kMost = ranks == 0 ? kMostDirectRanks : ranks;
  const int size = ranks == 0 ? p.operation.words.size : ranks;
  const uint32_t step = gridDim.x * kThreads;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < p.slice; i += step) {
    uint4 loaded[kMost];
    bool is_there[kMost];
#pragma unroll
    for (int rank = 0; rank < kMost; ++rank) {
      is_there[rank] =
          rank < size && rank != p.operation.words.rank && rank * p.slice + i < p.total;
      if (is_there[rank]) loaded[rank] = __ldcg(p.all_sums[rank] + i);
    }
#pragma unroll
    for (int rank = 0; rank < kMost; ++rank) {
      if (!is_there[rank]) continue;
      const uint32_t index = rank * p.slice + i;
      const auto& values = reinterpret_cast<const typename Vectors<T>::Values&>(loaded[rank]);
      Vectors<T>::store(p, p.out, index, index, values.values);
    }
  }
}

template <typename T, int ranks>
__global__ void __launch_bounds__(kThreads)
    direct_sum_kernel(__grid_constant__ const DirectSumParams p) {
  const OperationParams& operation = p.operation;
  const ChannelWords& words = operation.words;
  const OperationStart start = start_operation(operation);
  // What is before the kernel is before its flags.
  bool is_good = meet(p, Meeting::entry, start);
  // Each block has read the epoch: the last one to come here sets it.
  const uint32_t ticket = threadIdx.x == 0 ? atomicAdd(words.ticket, 1U) : 0;
  if (is_good) {
    add_up<T, ranks>(p);
    __syncthreads();  // what the block has read and stored comes before its flags
    is_good = meet(p, Meeting::reads, start);
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
      return reinterpret_cast<const void*>(direct_sum_kernel<T, 2>);
    case 4:
      return reinterpret_cast<const void*>(direct_sum_kernel<T, 4>);
    case 8:
      return reinterpret_cast<const void*>(direct_sum_kernel<T, 8>);
    default:
      return reinterpret_cast<const void*>(direct_sum_kernel<T, 0>);
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

cudaError_t launch_direct_sum(const DirectSumParams& params, int blocks, cudaStream_t stream) {
  const void* const kernel = kernel_of(params.type, params.operation.words.size);
  if (kernel == nullptr || blocks > kDirectBlocks) return cudaErrorInvalidValue;
  DirectSumParams p = params;
  void* arguments[] = {&p};
  return launch_with_cluster(kernel, dim3(static_cast<unsigned int>(blocks)), dim3(kThreads), 1,
                             arguments, stream);
}

cudaError_t load_direct_sum_kernels() {
  for (const SumType type : {SumType::f32, SumType::f16, SumType::bf16}) {
    for (const int size : {0, 2, 4, 8}) {
      const cudaError_t status = load_kernels({kernel_of(type, size)});
      if (status != cudaSuccess) return status;
    }
  }
  return cudaSuccess;
}

}  // namespace torch_overlap::cuda
