#pragma once

// Rows in registers, and sums over the blocks of a cluster. For .cu files.
#include "torch_overlap/collectives/cuda/protocol_device.h"

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
