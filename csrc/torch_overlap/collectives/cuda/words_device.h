#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "torch_overlap/collectives/cuda/kernels.h"

// User memory of any alignment, staged memory, and reductions, in registers. For .cu files.
namespace torch_overlap::cuda {

// --- Cases ---------------------------------------------------------------------------------------
//
// A kernel of a few microseconds executes its code once, and waits for most of it to be fetched.
// Code that the common case does not need costs as much as code that it needs. The common cases
// therefore have kernels of their own, from the same source.

// Any group, any alignment, any reduction.
struct GenericCase {
  static constexpr int kMaxRanks = CollectiveGeometry::kMaxRanks;
  static constexpr bool kHasStaticSize = false;
  static constexpr bool kIsAligned = false;
};
// The same in a group of two, whose Simple kernels have more blocks.
struct GenericCaseOf2 {
  static constexpr int kMaxRanks = 2;
  static constexpr bool kHasStaticSize = true;
  static constexpr bool kIsAligned = false;
};
// A sum in a group of kRanks ranks. All parts consist of whole, aligned words (LL) or vectors
// (other protocols).
template <int kRanks>
struct FastCase {
  static constexpr int kMaxRanks = kRanks;
  static constexpr bool kHasStaticSize = true;
  static constexpr bool kIsAligned = true;
};

template <typename Case>
__device__ __forceinline__ int size_of(const CollectiveParams& p) {
  return Case::kHasStaticSize ? Case::kMaxRanks : p.size;
}

// --- Data in registers ---------------------------------------------------------------------------

template <int kWords>
struct Words {
  uint32_t at[kWords];
};

// Loads from any alignment. Not inlined: smaller kernels are faster than kernels that save a call.
template <int kWords>
__device__ __noinline__ Words<kWords> load_unaligned(const char* from, uint64_t valid) {
  Words<kWords> out{};
  const auto bits = reinterpret_cast<uintptr_t>(from);
  if (valid < kWords * 4) {
    auto* bytes = reinterpret_cast<unsigned char*>(out.at);
#pragma unroll
    for (int i = 0; i < kWords * 4; ++i) {
      if (i < static_cast<int>(valid)) bytes[i] = static_cast<unsigned char>(from[i]);
    }
    return out;
  }
  if (kWords == 4 && bits % 16 == 0) {
    const uint4 all = *reinterpret_cast<const uint4*>(from);
    std::memcpy(out.at, &all, sizeof(out.at));
  } else if (bits % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) out.at[i] = reinterpret_cast<const uint32_t*>(from)[i];
  } else if (bits % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const auto* half = reinterpret_cast<const uint16_t*>(from) + 2 * i;
      out.at[i] = half[0] | static_cast<uint32_t>(half[1]) << 16;
    }
  } else {
    const auto* byte = reinterpret_cast<const unsigned char*>(from);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      out.at[i] = byte[4 * i] | static_cast<uint32_t>(byte[4 * i + 1]) << 8 |
                  static_cast<uint32_t>(byte[4 * i + 2]) << 16 |
                  static_cast<uint32_t>(byte[4 * i + 3]) << 24;
    }
  }
  return out;
}

template <int kWords>
__device__ __noinline__ void store_unaligned(char* to, Words<kWords> words, uint64_t valid) {
  const auto bits = reinterpret_cast<uintptr_t>(to);
  if (valid < kWords * 4) {
#pragma unroll
    for (int i = 0; i < kWords * 4; ++i) {
      if (i < static_cast<int>(valid)) to[i] = static_cast<char>(words.at[i / 4] >> 8 * (i % 4));
    }
    return;
  }
  if (kWords == 4 && bits % 16 == 0) {
    uint4 all;
    std::memcpy(&all, words.at, sizeof(all));
    *reinterpret_cast<uint4*>(to) = all;
  } else if (bits % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32_t*>(to)[i] = words.at[i];
  } else if (bits % 2 == 0) {
#pragma unroll
    for (int i = 0; i < 2 * kWords; ++i) {
      reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(words.at[i / 2] >> 16 * (i % 2));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i) {
      to[i] = static_cast<char>(words.at[i / 4] >> 8 * (i % 4));
    }
  }
}

// Loads the first `valid` bytes of `from`, at most kWords words; the rest is zero.
template <typename Case, int kWords>
__device__ __forceinline__ Words<kWords> load_words(const char* from, uint64_t valid) {
  if constexpr (!Case::kIsAligned) {
    return load_unaligned<kWords>(from, valid);
  } else if constexpr (kWords == 4) {
    const uint4 all = *reinterpret_cast<const uint4*>(from);
    Words<kWords> out;
    std::memcpy(out.at, &all, sizeof(out.at));
    return out;
  } else {
    Words<kWords> out{};
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (4 * i < valid) out.at[i] = reinterpret_cast<const uint32_t*>(from)[i];
    }
    return out;
  }
}

template <typename Case, int kWords>
__device__ __forceinline__ void store_words(char* to, const Words<kWords>& words, uint64_t valid) {
  if constexpr (!Case::kIsAligned) {
    store_unaligned<kWords>(to, words, valid);
  } else if constexpr (kWords == 4) {
    uint4 all;
    std::memcpy(&all, words.at, sizeof(all));
    *reinterpret_cast<uint4*>(to) = all;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (4 * i < valid) reinterpret_cast<uint32_t*>(to)[i] = words.at[i];
    }
  }
}

// Loads a vector that a peer has written. No cache of this SM may supply an older value.
__device__ __forceinline__ Words<4> load_staged(const char* from) {
  Words<4> out;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.at[0]), "=r"(out.at[1]), "=r"(out.at[2]), "=r"(out.at[3])
               : "l"(from)
               : "memory");
  return out;
}

__device__ __forceinline__ void store_staged(char* to, const Words<4>& words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.at[0]),
               "r"(words.at[1]), "r"(words.at[2]), "r"(words.at[3])
               : "memory");
}

// --- Reductions ----------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ auto widen(T value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(value);
  } else {
    return value;
  }
}

template <typename T, typename Wide>
__device__ __forceinline__ T narrow(Wide value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return static_cast<T>(value);
  }
}

// Integers wrap around. A minimum or maximum with NaN is NaN.
template <typename Case, typename Wide>
__device__ __forceinline__ Wide combine(ReductionOp op, Wide a, Wide b) {
  if constexpr (Case::kIsAligned) return a + b;
  switch (op) {
    case ReductionOp::product:
      if constexpr (std::is_integral_v<Wide>) {
        using Unsigned = std::make_unsigned_t<Wide>;
        return static_cast<Wide>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b));
      } else {
        return a * b;
      }
    case ReductionOp::min:
      return a < b || a != a ? a : b;
    case ReductionOp::max:
      return a > b || a != a ? a : b;
    case ReductionOp::sum:
    case ReductionOp::average:
      break;
  }
  if constexpr (std::is_integral_v<Wide>) {
    using Unsigned = std::make_unsigned_t<Wide>;
    return static_cast<Wide>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  } else {
    return a + b;
  }
}

// Accumulates the elements of some words in the wide type, one rank after the other.
template <typename Case, typename T, int kWords>
class Accumulator {
 public:
  using Wide = decltype(widen(T{}));
  static constexpr int kElements = kWords * 4 / static_cast<int>(sizeof(T));

  __device__ __forceinline__ void start(const Words<kWords>& words) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) value_[i] = widen(element(words, i));
  }
  __device__ __forceinline__ void add(ReductionOp op, const Words<kWords>& words) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      value_[i] = combine<Case>(op, value_[i], widen(element(words, i)));
    }
  }
  __device__ __forceinline__ Wide value(int i) const { return value_[i]; }
  __device__ __forceinline__ Words<kWords> result(ReductionOp op, int ranks) {
    Words<kWords> out;
    T elements[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (!Case::kIsAligned && op == ReductionOp::average)
        value_[i] = value_[i] / static_cast<Wide>(ranks);
      elements[i] = narrow<T>(value_[i]);
    }
    std::memcpy(out.at, elements, sizeof(out.at));
    return out;
  }

 private:
  __device__ __forceinline__ static T element(const Words<kWords>& words, int i) {
    T value;
    std::memcpy(&value, reinterpret_cast<const char*>(words.at) + i * sizeof(T), sizeof(T));
    return value;
  }

  Wide value_[kElements];
};

}  // namespace torch_overlap::cuda
