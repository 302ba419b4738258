#pragma once

// Rows in registers, and sums over the blocks of a cluster. For .cu files.
#include "torch_overlap/collectives/cuda/protocol_device.h"
#include "torch_overlap/common/cuda/float8_device.h"

namespace torch_overlap::cuda {

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
  // Sets the elements from `begin` on to zero.
  __device__ __forceinline__ void clear_from(int begin) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) at_[i] = i < begin ? at_[i] : 0;
  }
  // Rounds to the precision in which the row is stored.
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
  // Requires round() or norm() before.
  __device__ __forceinline__ Words<kWords> rounded() const {
    T elements[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) elements[i] = narrow<T>(at_[i]);
    Words<kWords> words;
    std::memcpy(words.at, elements, sizeof(words.at));
    return words;
  }
  __device__ __forceinline__ void norm(float scale, const Words<kWords>& weight) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) at_[i] = at_[i] * scale * element(weight, i);
    round();
  }
  __device__ __forceinline__ float value(int i) const { return at_[i]; }

 private:
  __device__ __forceinline__ static float element(const Words<kWords>& words, int i) {
    T value;
    std::memcpy(&value, reinterpret_cast<const char*>(words.at) + i * sizeof(T), sizeof(T));
    return widen(value);
  }

  float at_[kElements] = {};
};

inline constexpr int kWarps = G::kThreads / kWarp;

// Returns the sum over a warp, on all of its threads.
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

// --- Clusters ------------------------------------------------------------------------------------

// Values that the blocks of a cluster write to each other. Rounds alternate between two slots,
// since a block may already be in the next round.
struct RowSums {
  float of_warp[kWarps];
  float of_block[2][G::kMaxRowBlocks];
  uint32_t is_good[2][G::kMaxRowBlocks];
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

// Returns true if all blocks of a row are good, and sets `value` to its sum over them, with the
// same bits on all threads and all ranks. All threads of all of these blocks call this in every
// round until one block is not good. Each block has called arrive_in_cluster() once before: the
// others must run before anything is written to them.
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

// --- Quantization --------------------------------------------------------------------------------

// A block of threads holds at most this many scales of a row: norm_kernel, with whole rows of
// 16-bit elements, has the most.
inline constexpr int kMaxVectorsPerThread = 8;
inline constexpr int kMaxNormScales =
    kMaxVectorsPerThread * G::kThreads * G::kVectorBytes / 2 / kNormScaleBlock;

// Largest magnitudes of normalized rows, as in float8_device.h. In shared memory.
struct RowMaxima {
  uint32_t of_warp[kWarps];
  uint32_t of_block[2][G::kMaxRowBlocks];  // as in RowSums
  uint32_t of_scale[kMaxNormScales];
};

// Returns the largest value of a row, on all threads of its blocks.
__device__ __forceinline__ uint32_t largest_of_row(RowMaxima& maxima, uint32_t blocks,
                                                   uint32_t round, uint32_t value) {
  value = __reduce_max_sync(~0U, value);
  if (threadIdx.x % kWarp == 0) maxima.of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = 0;
  for (uint32_t warp = 0; warp < blockDim.x / kWarp; ++warp) {
    value = max(value, maxima.of_warp[warp]);
  }
  if (blocks == 1) return value;
  uint32_t* const of_block = maxima.of_block[round % 2];
  if (threadIdx.x < blocks) store_in_cluster(&of_block[blockIdx.x % blocks], threadIdx.x, value);
  arrive_in_cluster();
  wait_for_cluster();
  for (uint32_t block = 0; block < blocks; ++block) value = max(value, of_block[block]);
  return value;
}

// Stores the first `valid` bytes.
template <int kBytes>
__device__ __forceinline__ void store_bytes(uint8_t* to, const uint8_t* bytes, uint64_t valid) {
  const auto bits = reinterpret_cast<uintptr_t>(to);
  if constexpr (kBytes == 8) {
    if (valid >= 8 && bits % 8 == 0) {
      uint2 all;
      std::memcpy(&all, bytes, sizeof(all));
      *reinterpret_cast<uint2*>(to) = all;
      return;
    }
  }
  if (valid % 2 == 0 && bits % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes; i += 2) {
      if (i >= valid) continue;
      reinterpret_cast<uint16_t*>(to)[i / 2] = static_cast<uint16_t>(bytes[i] | bytes[i + 1] << 8);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (i < valid) to[i] = bytes[i];
  }
}

// Elements of a row: of a thread's part, or of a whole block.
struct RowRange {
  uint64_t begin;
  uint64_t end;  // not greater than begin: none
};

// Quantizes a normalized row. parts[j] of this thread are the elements range_of(j); the elements of
// a block begin at `first_of_block`, and their number is a multiple of kNormScaleBlock unless the
// row ends. All threads of the row's blocks call this after sum_of_row() of the same round.
template <typename T, int kWords, int kParts, typename RangeOf>
__device__ __forceinline__ void quantize_row(RowMaxima& maxima, const NormParams& n, uint64_t row,
                                             uint64_t first_of_block, uint32_t round,
                                             const RowPart<T, kWords> (&parts)[kParts],
                                             const RangeOf& range_of) {
  constexpr int kElements = RowPart<T, kWords>::kElements;
  const uint64_t elements = n.row_bytes / sizeof(T);
  const uint64_t first_scale = first_of_block / kNormScaleBlock;

  // A part has elements of at most two blocks of scales: those before element next_scale(begin),
  // and the others.
  const auto next_scale = [](uint64_t begin) {
    return (begin / kNormScaleBlock + 1) * kNormScaleBlock;
  };
  struct Largest {
    uint32_t before = 0;
    uint32_t after = 0;
  };
  const auto largest_of = [&](int j) {
    Largest largest;
    const RowRange range = range_of(j);
    const uint64_t next = next_scale(range.begin);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (range.begin + i >= range.end) continue;
      const uint32_t magnitude = __float_as_uint(fabsf(parts[j].value(i)));
      uint32_t& of = range.begin + i < next ? largest.before : largest.after;
      of = max(of, magnitude);
    }
    return largest;
  };
  const auto store = [&](int j, float before, float after) {
    const RowRange range = range_of(j);
    const uint64_t next = next_scale(range.begin);
    uint8_t bytes[kElements + kElements % 2];
    const auto scaled = [&](int i) {
      if (i >= kElements) return 0.0F;
      return __fmul_rn(parts[j].value(i), range.begin + i < next ? before : after);
    };
#pragma unroll
    for (int i = 0; i < kElements; i += 2) {
      const uint32_t both = to_fp8x2<false>(scaled(i), scaled(i + 1));
      bytes[i] = static_cast<uint8_t>(both);
      bytes[i + 1] = static_cast<uint8_t>(both >> 8);
    }
    uint8_t* const to = n.quantized + row * elements + range.begin;
    store_bytes<kElements>(to, bytes, range.end - range.begin);
  };
  const auto has_part = [&](int j) { return range_of(j).begin < range_of(j).end; };

  if (n.scaling == NormScaling::block) {
    for (uint32_t i = threadIdx.x; i < kMaxNormScales; i += blockDim.x) maxima.of_scale[i] = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      if (!has_part(j)) continue;
      const Largest largest = largest_of(j);
      uint32_t* const of = maxima.of_scale + (range_of(j).begin / kNormScaleBlock - first_scale);
      atomicMax(of, largest.before);
      if (largest.after != 0) atomicMax(of + 1, largest.after);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      if (!has_part(j)) continue;
      const RowRange range = range_of(j);
      const uint64_t scale = range.begin / kNormScaleBlock;
      const uint32_t* const of = maxima.of_scale + (scale - first_scale);
      const bool has_next = range.end > next_scale(range.begin);
      const float before = scale_from_amax<false>(of[0], false);
      const float after = has_next ? scale_from_amax<false>(of[1], false) : 0.0F;
      store(j, before, after);
      if (range.begin % kNormScaleBlock == 0) {
        n.scale_inv[scale * n.rows + row] = __frcp_rn(before);
      }
      if (has_next) n.scale_inv[(scale + 1) * n.rows + row] = __frcp_rn(after);
    }
    return;
  }
  float scale;
  if (n.scaling == NormScaling::row) {
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      if (!has_part(j)) continue;
      const Largest of_part = largest_of(j);
      largest = max(largest, max(of_part.before, of_part.after));
    }
    scale = scale_from_amax<false>(largest_of_row(maxima, n.row_blocks, round, largest), false);
  } else {
    scale = *n.scale;
  }
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    if (!has_part(j)) continue;
    store(j, scale, scale);
    const bool writes_scale = n.scaling == NormScaling::row || row == 0;
    if (range_of(j).begin == 0 && writes_scale) n.scale_inv[row] = __frcp_rn(scale);
  }
}

// --- Launching -----------------------------------------------------------------------------------

inline bool is_norm_unit_aligned(const NormParams& norm, size_t unit) {
  uintptr_t bits = norm.row_bytes;
  for (const char* data :
       {norm.residual, static_cast<const char*>(norm.residual_out), norm.weight, norm.bias}) {
    bits |= reinterpret_cast<uintptr_t>(data);
  }
  return bits % unit == 0;
}

// Calls `act(T{})`.
template <typename Act>
cudaError_t for_norm_type(ReductionType type, const Act& act) {
  return for_type(type, [&](auto zero) {
    if constexpr (kHasFastPath<decltype(zero)>) {
      return act(zero);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace torch_overlap::cuda
