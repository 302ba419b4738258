// all_reduce with a residual and an RMSNorm in the same kernel: a row belongs to a cluster of
// blocks, which tell each other their sums of squares while the row waits in registers. And the
// same norm behind an all_reduce of another kind.
#include "torch_overlap/comm/backends/nccl/direct_line_device.h"
#include "torch_overlap/comm/backends/nccl/direct_push_device.h"

namespace torch_overlap::cuda {
namespace {

// A thread's elements of a row, in fp32.
template <typename T, int kWords>
class RowPart {
 public:
  static constexpr int kElements = kWords * 4 / static_cast<int>(sizeof(T));

  template <typename Case>
  __device__ __forceinline__ void start(const Accumulator<Case, T, kWords>& sum) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) at_[i] = sum.value(i);
  }
  __device__ __forceinline__ void add(const Words<kWords>& words) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) at_[i] += element(words, i);
  }
  // To what is stored of it.
  __device__ __forceinline__ void round() {
#pragma unroll
    for (int i = 0; i < kElements; ++i) at_[i] = widen(narrow<T>(at_[i]));
  }
  __device__ __forceinline__ float squares() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum += at_[i] * at_[i];
    return sum;
  }
  __device__ __forceinline__ Words<kWords> rounded() const {
    return packed([this](int i) { return at_[i]; });
  }
  __device__ __forceinline__ Words<kWords> normed(float scale, const Words<kWords>& weight) const {
    return packed([&](int i) { return at_[i] * scale * element(weight, i); });
  }

 private:
  __device__ __forceinline__ static float element(const Words<kWords>& words, int i) {
    T value;
    std::memcpy(&value, reinterpret_cast<const char*>(words.at) + i * sizeof(T), sizeof(T));
    return widen(value);
  }
  template <typename Get>
  __device__ __forceinline__ static Words<kWords> packed(const Get& get) {
    T elements[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) elements[i] = narrow<T>(get(i));
    Words<kWords> words;
    std::memcpy(words.at, elements, sizeof(words.at));
    return words;
  }

  float at_[kElements] = {};
};

constexpr int kWarps = G::kThreads / kWarp;

// Of a warp, on all of its threads.
__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(~0U, value, offset);
  }
  return value;
}

__device__ __forceinline__ float scale_of(float squares, uint64_t elements, float eps) {
  return 1 / sqrtf(squares / static_cast<float>(elements) + eps);
}

// --- In the kernel of an all_reduce --------------------------------------------------------------

// What the blocks of a cluster write to each other. Rounds take turns: a block may be in the next.
struct RowSums {
  float of_warp[kWarps];
  float of_block[2][G::kMostRowBlocks];
  uint32_t is_good[2][G::kMostRowBlocks];
};

__device__ __forceinline__ void arrive_in_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

template <typename Word>
__device__ __forceinline__ void store_in_cluster(Word* own, uint32_t block, Word value) {
#if __CUDA_ARCH__ >= 900
  static_assert(sizeof(Word) == 4);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  asm volatile(
      "{\n"
      ".reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.u32 [remote], %2;\n"
      "}" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))),
      "r"(block), "r"(bits)
      : "memory");
#endif
}

// The sum over a row's blocks, the same bits on all threads and all ranks, and whether all blocks
// are good. All threads of all of them come here alike, in every round until one is not; and before
// that, once, each arrives: the others must run before anything is written to them.
__device__ __forceinline__ bool sum_of_row(RowSums& sums, uint32_t blocks, uint32_t round,
                                           bool is_good, float& value) {
  const uint32_t own = blockIdx.x % blocks;
  const uint32_t turn = round % 2;
  value = sum_of_warp(value);
  if (threadIdx.x % kWarp == 0) sums.of_warp[threadIdx.x / kWarp] = value;
  is_good = __syncthreads_and(static_cast<int>(is_good)) != 0;
  if (round == 0) wait_for_cluster();
  if (threadIdx.x < blocks) {
    float of_block = 0;
    for (uint32_t warp = 0; warp < blockDim.x / kWarp; ++warp) of_block += sums.of_warp[warp];
    store_in_cluster(&sums.of_block[turn][own], threadIdx.x, of_block);
    store_in_cluster(&sums.is_good[turn][own], threadIdx.x, static_cast<uint32_t>(is_good));
  }
  arrive_in_cluster();
  wait_for_cluster();
  value = 0;
  for (uint32_t block = 0; block < blocks; ++block) {
    value += sums.of_block[turn][block];
    is_good = is_good && sums.is_good[turn][block] != 0;
  }
  return is_good;
}

template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads, kBlocksOfSm)
    line_norm_kernel(const __grid_constant__ DirectParams p, const __grid_constant__ NormParams n) {
  constexpr int kWords = kLineWords<T>;
  constexpr int kData = kWords * 4;
  __shared__ RowSums sums;
  arrive_in_cluster();
  const LineState state = begin_lines<Case>(p);
  const auto line = static_cast<uint32_t>(threadIdx.x);
  const uint64_t column = (uint64_t{blockIdx.x % n.row_blocks} * p.chunk + line) * kData;
  const bool has_line = line < p.chunk && column < n.row_bytes;
  const uint64_t valid = has_line ? n.row_bytes - column : 0;
  bool is_good = may_send(p, state.entry);

  const auto epoch_of_round = [&](int peer, uint32_t round) {
    return state.epoch[peer] + 1 + round;
  };
  uint32_t round = 0;
  for (uint32_t chunk = blockIdx.x; chunk < p.most_chunks; chunk += gridDim.x, ++round) {
    const uint64_t at = uint64_t{chunk / n.row_blocks} * n.row_bytes + column;
    RowPart<T, kWords> part;
    Words<kWords> weight{};
    if (is_good && has_line) {
      const auto own = load_words<Case, kWords>(p.send[p.rank] + at, valid);
#pragma unroll
      for (int peer = 0; peer < Case::kMostRanks; ++peer) {
        if (peer >= size_of<Case>(p) || peer == p.rank) continue;
        const uint32_t epoch = epoch_of_round(peer, round);
        store_line(lines_of<Case>(p, peer, p.rank, epoch) + line * G::kLineBytes,
                   line_of(own, epoch));
      }
      const auto residual = load_words<Case, kWords>(n.residual + at, valid);
      Words<kWords> bias{};
      if (n.bias != nullptr) bias = load_words<Case, kWords>(n.bias + column, valid);
      weight = load_words<Case, kWords>(n.weight + column, valid);
      const auto line_from = [&](int source) {
        return lines_of<Case>(p, p.rank, source, epoch_of_round(source, round)) +
               line * G::kLineBytes;
      };
      LineView seen[Case::kMostRanks];
#pragma unroll
      for (int source = 0; source < Case::kMostRanks; ++source) {
        if (source >= size_of<Case>(p) || source == p.rank) continue;
        seen[source] = load_line(line_from(source));
      }
      Accumulator<Case, T, kWords> sum;
#pragma unroll
      for (int source = 0; source < Case::kMostRanks; ++source) {
        if (source >= size_of<Case>(p)) continue;
        Words<kWords> words = own;
        if (source != p.rank) {
          const bool is_late =
              await_line(p, seen[source], line_from(source), source, epoch_of_round(source, round));
          is_good = is_good && !is_late;
          words = words_of<kWords>(seen[source]);
        }
        if (source == 0) {
          sum.start(words);
        } else {
          sum.add(p.op, words);
        }
      }
      part.start(sum);
      part.add(residual);
      part.add(bias);
      part.round();
      store_words<Case>(n.residual_out + at, part.rounded(), valid);
    }
    float squares = part.squares();
    is_good = sum_of_row(sums, n.row_blocks, round, is_good, squares);
    if (!is_good) break;
    const float scale = scale_of(squares, n.row_bytes / sizeof(T), n.eps);
    if (has_line) store_words<Case>(p.recv[0] + at, part.normed(scale, weight), valid);
  }
  end_lines<Case>(p, state);
}

template <typename T, typename Case>
__global__ void __launch_bounds__(G::kThreads, kBlocksOfSm)
    push_norm_kernel(const __grid_constant__ DirectParams p, const __grid_constant__ NormParams n) {
  constexpr int kEach = G::kVectors / G::kThreads;
  __shared__ RowSums sums;
  arrive_in_cluster();
  exchange<Case>(p, [&](const BlockState& state, uint32_t chunk, uint32_t round, bool is_good) {
    const uint64_t first = uint64_t{chunk} * p.chunk;
    const uint64_t first_of_row = uint64_t{chunk % n.row_blocks} * p.chunk;
    const auto index = [&](int j) {
      const uint32_t i = threadIdx.x + j * blockDim.x;
      return is_good && i < p.chunk ? i : ~0U;
    };
    Words<4> seen[kEach][Case::kMostRanks];
    Words<4> residual[kEach];
    Words<4> bias[kEach] = {};
    Words<4> weight[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t i = index(j);
      if (i == ~0U) continue;
      const uint64_t at = (first + i) * kVector;
      const uint64_t column = (first_of_row + i) * kVector;
      load_vectors<Case>(p, load_words<Case, 4>(p.send[p.rank] + at, kVector), seen[j],
                         [&](int source) {
                           const uint32_t epoch = state.epoch[source] + 1 + round;
                           return vectors_of<Case>(p, p.rank, source, epoch) + i * kVector;
                         });
      residual[j] = load_words<Case, 4>(n.residual + at, kVector);
      if (n.bias != nullptr) bias[j] = load_words<Case, 4>(n.bias + column, kVector);
      weight[j] = load_words<Case, 4>(n.weight + column, kVector);
    }
    RowPart<T, 4> part[kEach];
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t i = index(j);
      if (i == ~0U) continue;
      part[j].start(accumulate<T, Case>(p, seen[j]));
      part[j].add(residual[j]);
      part[j].add(bias[j]);
      part[j].round();
      squares += part[j].squares();
      store_words<Case>(n.residual_out + (first + i) * kVector, part[j].rounded(), kVector);
    }
    is_good = sum_of_row(sums, n.row_blocks, round, is_good, squares);
    if (!is_good) return false;
    const float scale = scale_of(squares, n.row_bytes / sizeof(T), n.eps);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t i = index(j);
      if (i == ~0U) continue;
      store_words<Case>(p.recv[0] + (first + i) * kVector, part[j].normed(scale, weight[j]),
                        kVector);
    }
    return true;
  });
}

// --- Behind an all_reduce ------------------------------------------------------------------------

// A row a block, kEach vectors a thread.
template <typename T, int kEach>
__global__ void __launch_bounds__(G::kThreads)
    norm_kernel(char* rows, const __grid_constant__ NormParams n) {
  using Whole = UsualCase<2>;
  __shared__ float sums[kWarps];
  char* const row = rows + blockIdx.x * n.row_bytes;
  const char* const residual = n.residual + blockIdx.x * n.row_bytes;
  RowPart<T, 4> part[kEach];
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const uint64_t at = (threadIdx.x + uint64_t{G::kThreads} * j) * kVector;
    if (at >= n.row_bytes) continue;
    part[j].add(load_words<Whole, 4>(row + at, kVector));
    part[j].add(load_words<Whole, 4>(residual + at, kVector));
    if (n.bias != nullptr) part[j].add(load_words<Whole, 4>(n.bias + at, kVector));
    part[j].round();
    squares += part[j].squares();
  }
  squares = sum_of_warp(squares);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = squares;
  __syncthreads();
  squares = 0;
#pragma unroll
  for (const float of_warp : sums) squares += of_warp;
  const float scale = scale_of(squares, n.row_bytes / sizeof(T), n.eps);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const uint64_t at = (threadIdx.x + uint64_t{G::kThreads} * j) * kVector;
    if (at >= n.row_bytes) continue;
    const auto weight = load_words<Whole, 4>(n.weight + at, kVector);
    store_words<Whole>(n.residual_out + blockIdx.x * n.row_bytes + at, part[j].rounded(), kVector);
    store_words<Whole>(row + at, part[j].normed(scale, weight), kVector);
  }
}

constexpr int kMostEach = 8;

// --- Launching -----------------------------------------------------------------------------------

bool is_whole_norm(const NormParams& norm, size_t unit) {
  uintptr_t bits = norm.row_bytes;
  for (const char* data :
       {norm.residual, static_cast<const char*>(norm.residual_out), norm.weight, norm.bias}) {
    bits |= reinterpret_cast<uintptr_t>(data);
  }
  return bits % unit == 0;
}

// Calls `act(T{})`.
template <typename Act>
cudaError_t for_norm_type(DirectType type, const Act& act) {
  return for_type(type, [&](auto zero) {
    if constexpr (kIsUsualType<decltype(zero)>) {
      return act(zero);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

// Calls `act(T{}, Case{})`.
template <typename Act>
cudaError_t for_norm(DirectType type, const DirectParams& params, const NormParams& norm,
                     size_t unit, const Act& act) {
  const bool is_usual = is_whole(params, unit) && is_whole_norm(norm, unit);
  return for_norm_type(type, [&](auto zero) {
    return for_case(params, is_usual, [&](auto which) { return act(zero, which); });
  });
}

// Calls `act` with how many vectors a thread has, as a type.
template <typename Act>
cudaError_t for_each(uint64_t row_bytes, const Act& act) {
  constexpr uint64_t kOfOne = G::kThreads * kVector;
  if (row_bytes <= kOfOne) return act(std::integral_constant<int, 1>{});
  if (row_bytes <= 2 * kOfOne) return act(std::integral_constant<int, 2>{});
  if (row_bytes <= 4 * kOfOne) return act(std::integral_constant<int, 4>{});
  return act(std::integral_constant<int, kMostEach>{});
}

constexpr size_t kWordBytes = 4;

}  // namespace

cudaError_t launch_line_norm(DirectType type, const DirectParams& params, const NormParams& norm,
                             const DirectLaunch& launch) {
  return for_norm(type, params, norm, kWordBytes, [&](auto zero, auto which) {
    return launch_direct(line_norm_kernel<decltype(zero), decltype(which)>, launch, params, norm);
  });
}

cudaError_t launch_push_norm(DirectType type, const DirectParams& params, const NormParams& norm,
                             const DirectLaunch& launch) {
  return for_norm(type, params, norm, kVector, [&](auto zero, auto which) {
    return launch_direct(push_norm_kernel<decltype(zero), decltype(which)>, launch, params, norm);
  });
}

bool is_norm_possible(DirectType type, uint64_t row_bytes, const char* rows,
                      const NormParams& norm) {
  const bool has_type = for_norm_type(type, [](auto) { return cudaSuccess; }) == cudaSuccess;
  return has_type && row_bytes <= uint64_t{kMostEach} * G::kThreads * kVector &&
         reinterpret_cast<uintptr_t>(rows) % kVector == 0 && is_whole_norm(norm, kVector);
}

cudaError_t launch_norm(DirectType type, char* rows, uint32_t count, const NormParams& norm,
                        cudaStream_t stream) {
  return for_norm_type(type, [&](auto zero) {
    return for_each(norm.row_bytes, [&](auto each) {
      const DirectLaunch launch{
          .blocks = count, .threads = G::kThreads, .dependent = false, .stream = stream};
      return launch_direct(norm_kernel<decltype(zero), decltype(each)::value>, launch, rows, norm);
    });
  });
}

cudaError_t load_norm_kernels() {
  for (const DirectType type : {DirectType::f16, DirectType::bf16, DirectType::f32}) {
    const cudaError_t status = for_norm_type(type, [](auto zero) {
      using T = decltype(zero);
      cudaError_t loaded = load_cases([](auto which) {
        const cudaError_t line = load_kernel(line_norm_kernel<T, decltype(which)>);
        return line == cudaSuccess ? load_kernel(push_norm_kernel<T, decltype(which)>) : line;
      });
      for (const uint64_t each : {1, 2, 4, kMostEach}) {
        if (loaded != cudaSuccess) break;
        loaded = for_each(each * G::kThreads * kVector, [](auto count) {
          return load_kernel(norm_kernel<T, decltype(count)::value>);
        });
      }
      return loaded;
    });
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace torch_overlap::cuda
