#pragma once

// Rows in registers, and totals over the blocks of a cluster. For .cu files.
#include "torch_overlap/collectives/cuda/protocol_device.h"
#include "torch_overlap/common/cuda/float8_device.h"
#include "torch_overlap/common/cuda/hopper_device.h"

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
  // Requires round() or scale() before.
  __device__ __forceinline__ Words<kWords> rounded() const {
    T elements[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) elements[i] = narrow<T>(at_[i]);
    Words<kWords> words;
    std::memcpy(words.at, elements, sizeof(words.at));
    return words;
  }
  // Returns the largest magnitude, as in float8_device.h.
  __device__ __forceinline__ uint32_t largest() const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) largest = max(largest, __float_as_uint(fabsf(at_[i])));
    return largest;
  }
  // An RMSNorm multiplies by the weight first: products of 16-bit values are exact, and scale()
  // does not change which of them is the largest.
  __device__ __forceinline__ void multiply(const Words<kWords>& weight) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) at_[i] *= element(weight, i);
  }
  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) at_[i] *= factor;
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

// Totals of a row, or of a part of it.
struct alignas(8) RowTotals {
  float squares = 0;
  uint32_t largest = 0;  // magnitude of the elements times their weights
};

// Combines in an order that depends only on the number of threads. The result is on all of them.
__device__ __forceinline__ RowTotals totals_of_warp(RowTotals totals) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    totals.squares += __shfl_xor_sync(~0U, totals.squares, offset);
  }
  totals.largest = __reduce_max_sync(~0U, totals.largest);
  return totals;
}

// `of_warp` is in shared memory: one per warp, or more.
__device__ __forceinline__ RowTotals totals_of_warps(const RowTotals* of_warp, uint32_t warps) {
  RowTotals totals;
  for (uint32_t i = threadIdx.x % kWarp; i < warps; i += kWarp) {
    totals.squares += of_warp[i].squares;
    totals.largest = max(totals.largest, of_warp[i].largest);
  }
  return totals_of_warp(totals);
}

// All threads of the block call this. Two calls with one `of_warp` need a call with another one
// between them.
__device__ __forceinline__ RowTotals totals_of_block(RowTotals* of_warp, RowTotals totals) {
  totals = totals_of_warp(totals);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = totals;
  __syncthreads();
  return totals_of_warps(of_warp, blockDim.x / kWarp);
}

__device__ __forceinline__ float scale_of(float squares, uint64_t elements, float eps) {
  return 1 / sqrtf(squares / static_cast<float>(elements) + eps);
}

// --- Clusters ------------------------------------------------------------------------------------

// Every warp of a row's blocks writes its totals to all of these blocks, and an mbarrier of each
// counts the bytes. Rounds alternate between two slots: a warp that writes a slot again has
// received, in the round between, the totals of every warp, which had read the slot before.
struct RowSums {
  RowTotals of_warp[2][G::kMaxRowBlocks * kWarps];
  uint64_t has_arrived[2];
};

// Set in RowTotals::largest of a warp that is not good.
inline constexpr uint32_t kIsBad = 1U << 31;

// Stores `totals` at `own` in the shared memory of a block of the cluster, and counts its bytes at
// the mbarrier `barrier` of that block.
__device__ __forceinline__ void send_in_cluster(RowTotals* own, uint64_t* barrier, uint32_t block,
                                                const RowTotals& totals) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .u32 to, counter;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [to], {%3, %4}, [counter];\n"
      "}" ::"r"(sm90::shared_address(own)),
      "r"(sm90::shared_address(barrier)), "r"(block), "r"(__float_as_uint(totals.squares)),
      "r"(totals.largest)
      : "memory");
#endif
}

// All threads call this once, before sum_of_row().
__device__ __forceinline__ void begin_rows(RowSums& sums, uint32_t blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks == 1) return;
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : sums.has_arrived) {
      sm90::barrier_init(sm90::shared_address(&barrier), 1);
    }
    sm90::fence_barrier_init();
  }
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

// sum_of_row() if the row has several blocks.
__device__ __forceinline__ RowTotals totals_of_cluster(RowSums& sums, uint32_t blocks,
                                                       uint32_t round, RowTotals totals) {
#if __CUDA_ARCH__ >= 900
  const uint32_t warps = blockDim.x / kWarp;
  const uint32_t warp = blockIdx.x % blocks * warps + threadIdx.x / kWarp;
  const uint32_t lane = threadIdx.x % kWarp;
  RowTotals* const of_warp = sums.of_warp[round % 2];
  uint64_t* const has_arrived = &sums.has_arrived[round % 2];
  totals = totals_of_warp(totals);
  // The others must have started before anything is written to them.
  if (round == 0) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  if (threadIdx.x == 0) {
    sm90::barrier_arrive_expect_tx(sm90::shared_address(has_arrived),
                                   blocks * warps * sizeof(RowTotals));
  }
  if (lane < blocks) send_in_cluster(&of_warp[warp], has_arrived, lane, totals);
  sm90::barrier_wait_cluster(sm90::shared_address(has_arrived), round / 2 % 2);
  totals = totals_of_warps(of_warp, blocks * warps);
  __syncwarp();
#endif
  return totals;
}

// Returns true if all blocks of a row are good, and changes the totals of a thread to those of the
// row, with the same bits on all threads and all ranks. All threads of all of these blocks call
// this in every round until one block is not good.
__device__ __forceinline__ bool sum_of_row(RowSums& sums, uint32_t blocks, uint32_t round,
                                           bool is_good, RowTotals& totals) {
  if (!is_good) totals.largest |= kIsBad;
  totals = blocks == 1 ? totals_of_block(sums.of_warp[round % 2], totals)
                       : totals_of_cluster(sums, blocks, round, totals);
  return (totals.largest & kIsBad) == 0;
}

// --- Quantization --------------------------------------------------------------------------------

// A block of threads holds at most this many scales of a row: norm_kernel, with whole rows of
// 16-bit elements, has the most.
inline constexpr int kMaxVectorsPerThread = 8;
inline constexpr int kMaxNormScales =
    kMaxVectorsPerThread * G::kThreads * G::kVectorBytes / 2 / kNormScaleBlock;

// NormScaling::block: largest magnitudes of the elements times their weights, per scale. In shared
// memory. Rounds alternate between three slots: a slot is cleared in the round before it is used,
// when all threads are past the round in which it was read.
struct RowMaxima {
  uint32_t of_scale[3][kMaxNormScales];
};

__device__ __forceinline__ void clear(uint32_t (&of_scale)[kMaxNormScales]) {
  for (uint32_t i = threadIdx.x; i < kMaxNormScales; i += blockDim.x) of_scale[i] = 0;
}

// All threads call this once, before the first round.
__device__ __forceinline__ void begin_maxima(RowMaxima& maxima, const NormParams& n) {
  if (n.scaling != NormScaling::block) return;
  clear(maxima.of_scale[0]);
  __syncthreads();
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

// A part has elements of at most two blocks of scales: those before this element, and the others.
__device__ __forceinline__ uint64_t next_scale(uint64_t begin) {
  return (begin / kNormScaleBlock + 1) * kNormScaleBlock;
}

// Collects the largest magnitudes of a block's scales, after multiply(). parts[j] of this thread
// are the elements range_of(j); the elements of a block begin at `first_of_block`, and their number
// is a multiple of kNormScaleBlock unless the row ends. All threads call this before the row's
// totals are exchanged.
template <typename T, int kWords, int kParts, typename RangeOf>
__device__ __forceinline__ void collect_maxima(RowMaxima& maxima, const NormParams& n,
                                               uint64_t first_of_block, uint32_t round,
                                               const RowPart<T, kWords> (&parts)[kParts],
                                               const RangeOf& range_of) {
  if (n.scaling != NormScaling::block) return;
  const uint64_t first_scale = first_of_block / kNormScaleBlock;
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const RowRange range = range_of(j);
    if (range.begin >= range.end) continue;
    const uint64_t next = next_scale(range.begin);
    uint32_t before = 0;
    uint32_t after = 0;
#pragma unroll
    for (int i = 0; i < RowPart<T, kWords>::kElements; ++i) {
      const uint32_t magnitude = __float_as_uint(fabsf(parts[j].value(i)));
      uint32_t& of = range.begin + i < next ? before : after;
      if (range.begin + i < range.end) of = max(of, magnitude);
    }
    uint32_t* const of = maxima.of_scale[round % 3] + (range.begin / kNormScaleBlock - first_scale);
    atomicMax(of, before);
    if (after != 0) atomicMax(of + 1, after);
  }
  clear(maxima.of_scale[(round + 1) % 3]);
}

// Returns the magnitude of an element that scale(factor) makes of one with this magnitude.
template <typename T>
__device__ __forceinline__ uint32_t scaled_magnitude(uint32_t magnitude, float factor) {
  return __float_as_uint(fabsf(widen(narrow<T>(__uint_as_float(magnitude) * factor))));
}

// Quantizes a normalized row, to which scale(factor) was applied. The other arguments are those of
// collect_maxima(); `largest` is RowTotals::largest of the row.
template <typename T, int kWords, int kParts, typename RangeOf>
__device__ __forceinline__ void quantize_row(const RowMaxima& maxima, const NormParams& n,
                                             uint64_t row, uint64_t first_of_block, uint32_t round,
                                             uint32_t largest, float factor,
                                             const RowPart<T, kWords> (&parts)[kParts],
                                             const RangeOf& range_of) {
  constexpr int kElements = RowPart<T, kWords>::kElements;
  const uint64_t elements = n.row_bytes / sizeof(T);
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
  const auto scale_from = [&](uint32_t magnitude) {
    return scale_from_amax<false>(scaled_magnitude<T>(magnitude, factor), false);
  };
  const auto has_part = [&](int j) { return range_of(j).begin < range_of(j).end; };

  if (n.scaling == NormScaling::block) {
    const uint64_t first_scale = first_of_block / kNormScaleBlock;
    __syncthreads();  // all have collected
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      if (!has_part(j)) continue;
      const RowRange range = range_of(j);
      const uint64_t scale = range.begin / kNormScaleBlock;
      const uint32_t* const of = maxima.of_scale[round % 3] + (scale - first_scale);
      const bool has_next = range.end > next_scale(range.begin);
      const float before = scale_from(of[0]);
      const float after = has_next ? scale_from(of[1]) : 0.0F;
      store(j, before, after);
      if (range.begin % kNormScaleBlock == 0) {
        n.scale_inv[scale * n.rows + row] = __frcp_rn(before);
      }
      if (has_next) n.scale_inv[(scale + 1) * n.rows + row] = __frcp_rn(after);
    }
    return;
  }
  const float scale = n.scaling == NormScaling::row ? scale_from(largest) : *n.scale;
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
