#pragma once

// Rows in registers, and totals over the blocks of a cluster. For .cu files.
#include "torch_overlap/collectives/cuda/ll_device.h"
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
    for (int i = 0; i < kElements; ++i) largest = max(largest, magnitude(i));
    return largest;
  }
  // Returns the largest magnitude of the elements [0, count) in .x, and of the others in .y.
  // `count` is even.
  __device__ __forceinline__ uint2 largest_of_two(int count) const {
    uint2 largest{};
#pragma unroll
    for (int i = 0; i < kElements; i += 2) {
      const uint32_t of_pair = max(magnitude(i), magnitude(i + 1));
      largest.x = max(largest.x, i < count ? of_pair : 0);
      largest.y = max(largest.y, i < count ? 0 : of_pair);
    }
    return largest;
  }
  // An RMSNorm multiplies by the weight first: products of 16-bit values are exact within the range
  // of fp32, and scale() does not change which of them is the largest. (Elements whose squares
  // overflow may give NaN where their norm is 0.)
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
  __device__ __forceinline__ uint32_t magnitude(int i) const {
    return __float_as_uint(fabsf(at_[i]));
  }
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
// between them. Each thread calls meanwhile() before the block synchronizes.
template <typename Meanwhile>
__device__ __forceinline__ RowTotals totals_of_block(RowTotals* of_warp, RowTotals totals,
                                                     const Meanwhile& meanwhile) {
  totals = totals_of_warp(totals);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = totals;
  meanwhile();
  __syncthreads();
  return totals_of_warps(of_warp, blockDim.x / kWarp);
}

// Returns the factor of a row's elements.
__device__ __forceinline__ float factor_of(const NormParams& n, float squares) {
  return rsqrtf(squares * n.inverse_elements + n.eps);
}

// --- Clusters ------------------------------------------------------------------------------------

// Every warp of a row's blocks writes its totals to all of these blocks, and an mbarrier of each
// counts the bytes. Rounds alternate between two slots: a warp that writes a slot again has
// received, in the round between, the totals of every warp, which had read the slot before.
struct RowSums {
  RowTotals of_warp[2][G::kMaxRowBlocks * kWarps];
  uint64_t has_arrived[2];
  uint32_t is_busy;  // thread 0's Entry::is_busy, from try_enter_rows() to leave_rows()
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
  // The fence has released the mbarriers, and the others read nothing else.
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

// sum_of_row() if the row has several blocks.
template <typename Meanwhile>
__device__ __forceinline__ RowTotals totals_of_cluster(RowSums& sums, uint32_t blocks,
                                                       uint32_t round, RowTotals totals,
                                                       const Meanwhile& meanwhile) {
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
  meanwhile();
  sm90::barrier_wait_cluster(sm90::shared_address(has_arrived), round / 2 % 2);
  totals = totals_of_warps(of_warp, blocks * warps);
  __syncwarp();
#endif
  return totals;
}

// Calls try_enter(), and keeps thread 0's Entry::is_busy in shared memory for leave_rows(). In a
// register it would be spilled at once, and the spill would wait for the load.
__device__ __forceinline__ bool try_enter_rows(const CollectiveParams& p, RowSums& sums,
                                               const Entry& entry) {
  const bool is_good = try_enter(p, entry);
  if (threadIdx.x == 0) sums.is_busy = entry.is_busy;
  return is_good;
}

template <typename Case>
__device__ __forceinline__ void leave_rows(const CollectiveParams& p, const RowSums& sums,
                                           LLState& state) {
  state.entry.is_busy = threadIdx.x == 0 ? sums.is_busy : 0;
  end_ll<Case>(p, state);
}

// Returns true if all blocks of a row are good, and changes the totals of a thread to those of the
// row, with the same bits on all threads and all ranks. All threads of all of these blocks call
// this in every round until one block is not good. Each calls meanwhile() while the totals travel.
template <typename Meanwhile>
__device__ __forceinline__ bool sum_of_row(RowSums& sums, uint32_t blocks, uint32_t round,
                                           bool is_good, RowTotals& totals,
                                           const Meanwhile& meanwhile) {
  if (!is_good) totals.largest |= kIsBad;
  totals = blocks == 1 ? totals_of_block(sums.of_warp[round % 2], totals, meanwhile)
                       : totals_of_cluster(sums, blocks, round, totals, meanwhile);
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
  float tensor_scale;  // if NormScaling::tensor
};

// Stores the first `valid` bytes.
template <int kPairs>
__device__ __forceinline__ void store_pairs(uint8_t* to, const uint16_t (&pairs)[kPairs],
                                            int valid) {
  const auto bits = reinterpret_cast<uintptr_t>(to);
  if constexpr (kPairs == 4) {
    uint2 all;
    std::memcpy(&all, pairs, sizeof(all));
    if (valid >= 8 && bits % 8 == 0) {
      *reinterpret_cast<uint2*>(to) = all;
      return;
    }
    if (valid % 4 == 0 && bits % 4 == 0) {
      if (valid > 0) reinterpret_cast<uint32_t*>(to)[0] = all.x;
      if (valid > 4) reinterpret_cast<uint32_t*>(to)[1] = all.y;
      return;
    }
  }
  if (valid % 2 == 0 && bits % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (2 * i < valid) reinterpret_cast<uint16_t*>(to)[i] = pairs[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 2 * kPairs; ++i) {
    if (i < valid) to[i] = static_cast<uint8_t>(pairs[i / 2] >> (i % 2 * 8));
  }
}

// A thread's elements of a row.
struct RowRange {
  uint32_t begin = 0;
  int count = 0;  // none if <= 0

  // Returns the number of elements from `begin` to the next scale. A range has at most two scales.
  __device__ __forceinline__ int num_until_next_scale() const {
    return kNormScaleBlock - static_cast<int>(begin % kNormScaleBlock);
  }
  __device__ __forceinline__ uint32_t scale_index() const { return begin / kNormScaleBlock; }
};

// Returns the range of a part that begins at this byte of a row, and has at most `bytes`.
template <typename T>
__device__ __forceinline__ RowRange range_at(const NormParams& n, uint64_t begin, uint32_t bytes) {
  constexpr auto kSize = static_cast<uint32_t>(sizeof(T));
  const uint32_t first = static_cast<uint32_t>(begin) / kSize;
  const auto left = static_cast<int>(static_cast<uint32_t>(n.row_bytes) / kSize - first);
  return {first, min(static_cast<int>(bytes / kSize), left)};
}

// Quantizes rows of 16-bit elements. All threads of a block call all functions, with their own
// parts and ranges. A range begins at an even element. The ranges of a warp, of each part, are next
// to each other (some may be empty), and have at most kMaxScalesPerWarp scales.
template <typename T, bool kQuantizes>
class Quantizer {
 public:
  // A block's elements of a row begin at `first`. With NormScaling::block a scale begins there, and
  // the last one ends with the block's elements unless the row does. The block must synchronize
  // before collect() and store(). Reads the scale of a tensor, which the kernel before may have
  // written: with a dependent launch, construct it after begin_kernel().
  __device__ __forceinline__ Quantizer(RowMaxima& maxima, const NormParams& n, uint32_t first)
      : maxima_(maxima), n_(n), first_scale_(first / kNormScaleBlock) {
    if (n.scaling == NormScaling::tensor && threadIdx.x == 0) maxima.tensor_scale = *n.scale;
    if (n.scaling == NormScaling::block) clear(0);
  }

  // Collects the largest magnitudes of the scales of a block, after RowPart::multiply(). Called
  // while the row's totals are exchanged.
  template <int kWords, int kParts, typename RangeOf>
  __device__ __forceinline__ void collect(uint32_t round, const RowPart<T, kWords> (&parts)[kParts],
                                          const RangeOf& range_of) {
    if (n_.scaling != NormScaling::block) return;
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const RowRange range = range_of(j);
      if (range.count <= 0) continue;
      const uint2 largest = parts[j].largest_of_two(range.num_until_next_scale());
      uint32_t* const of = maxima_.of_scale[round % 3] + (range.scale_index() - first_scale_);
      atomicMax(of, largest.x);
      if (largest.y != 0) atomicMax(of + 1, largest.y);
    }
    clear(round + 1);
  }

  // Stores a normalized row, to which RowPart::scale(factor) was applied. `largest` is
  // RowTotals::largest of the row.
  template <int kWords, int kParts, typename RangeOf, typename RangeOfWarp>
  __device__ __forceinline__ void store(uint64_t row, uint32_t round, uint32_t largest,
                                        float factor, const RowPart<T, kWords> (&parts)[kParts],
                                        const RangeOf& range_of,
                                        const RangeOfWarp& range_of_warp) const {
    if (n_.scaling == NormScaling::block) {
      return store_with_scales(row, round, factor, parts, range_of, range_of_warp);
    }
    const float scale =
        n_.scaling == NormScaling::row ? scale_from(largest, factor) : maxima_.tensor_scale;
#pragma unroll
    for (int j = 0; j < kParts; ++j) store_part(row, parts[j], range_of(j), scale, scale);
    const bool writes_scale = n_.scaling == NormScaling::row || row == 0;
    const RowRange first = range_of(0);
    if (first.count > 0 && first.begin == 0 && writes_scale) {
      n_.scale_inv[row] = __frcp_rn(scale);
    }
  }

 private:
  static constexpr uint32_t kMaxScalesPerWarp = 3;

  // Clears the slot of a round.
  __device__ __forceinline__ void clear(uint32_t round) {
    uint32_t (&of_scale)[kMaxNormScales] = maxima_.of_scale[round % 3];
    for (uint32_t i = threadIdx.x; i < kMaxNormScales; i += blockDim.x) of_scale[i] = 0;
  }

  // Returns the scale of elements whose largest magnitude scale(factor) makes of `largest`.
  __device__ __forceinline__ static float scale_from(uint32_t largest, float factor) {
    const float scaled = widen(narrow<T>(__uint_as_float(largest) * factor));
    return scale_from_amax<false>(__float_as_uint(fabsf(scaled)), false);
  }

  // The first lanes of a warp compute its scales. A scale is stored by the warp that has its first
  // element.
  template <int kWords, int kParts, typename RangeOf, typename RangeOfWarp>
  __device__ __forceinline__ void store_with_scales(uint64_t row, uint32_t round, float factor,
                                                    const RowPart<T, kWords> (&parts)[kParts],
                                                    const RangeOf& range_of,
                                                    const RangeOfWarp& range_of_warp) const {
    const uint32_t lane = threadIdx.x % kWarp;
    __syncthreads();  // all have collected
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const RowRange range = range_of(j);
      const RowRange of_warp = range_of_warp(j);
      if (of_warp.count <= 0) continue;
      const uint32_t first = of_warp.scale_index();
      const uint32_t own = (first + lane) * kNormScaleBlock;  // first element of this lane's scale
      float scale = 1;
      if (lane < kMaxScalesPerWarp && own < of_warp.begin + of_warp.count) {
        scale = scale_from(maxima_.of_scale[round % 3][first + lane - first_scale_], factor);
        if (own >= of_warp.begin) n_.scale_inv[(first + lane) * n_.rows + row] = __frcp_rn(scale);
      }
      const auto at = static_cast<int>(range.scale_index() - first);
      const float before = __shfl_sync(~0U, scale, at);
      const float after = __shfl_sync(~0U, scale, at + 1);
      store_part(row, parts[j], range, before, after);
    }
  }

  template <int kWords>
  __device__ __forceinline__ void store_part(uint64_t row, const RowPart<T, kWords>& part,
                                             const RowRange& range, float before,
                                             float after) const {
    constexpr int kPairs = RowPart<T, kWords>::kElements / 2;
    if (range.count <= 0) return;
    const int left = range.num_until_next_scale();
    uint16_t pairs[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float scale = 2 * i < left ? before : after;
      pairs[i] = static_cast<uint16_t>(to_fp8x2<false>(__fmul_rn(part.value(2 * i), scale),
                                                       __fmul_rn(part.value(2 * i + 1), scale)));
    }
    store_pairs(n_.quantized + row * (n_.row_bytes / sizeof(T)) + range.begin, pairs, range.count);
  }

  RowMaxima& maxima_;
  const NormParams& n_;
  const uint32_t first_scale_;
};

template <typename T>
class Quantizer<T, false> {
 public:
  __device__ __forceinline__ Quantizer(RowMaxima&, const NormParams&, uint32_t) {}
  template <typename... Args>
  __device__ __forceinline__ void collect(const Args&...) {}
  template <typename... Args>
  __device__ __forceinline__ void store(const Args&...) const {}
};

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
