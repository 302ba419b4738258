#pragma once

#include <cstdint>

// MMA of a warpgroup (PTX ISA, wgmma.mma_async): d [64, n] += a [64, k] b [k, n]. Both operands are
// in shared memory under the 128-byte swizzle, or b under the 64-byte one; k is 32 bytes. A thread
// holds n / 2 elements of d: those of rows 16 * warp + lane / 4 (+ 8) and columns 8 * i + 2 * (lane
// % 4) (+ 1) in d[4 * i + 2 * row + column].
namespace torch_overlap::sm90 {

// Types of the operands, named like the instruction's. 8-bit operands must both be K-major.
struct Bf16 {
  static constexpr int kBytes = 2;
};
struct F16 {
  static constexpr int kBytes = 2;
};
struct E4m3E4m3 {
  static constexpr int kBytes = 1;
};
struct E4m3E5m2 {
  static constexpr int kBytes = 1;
};
struct E5m2E4m3 {
  static constexpr int kBytes = 1;
};

template <int n>
struct WgmmaN {};

// Descriptor of a K-major operand: rows of 128 bytes, in consecutive groups of 8 rows (1024 bytes).
__device__ __forceinline__ uint64_t make_k_major_descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | (uint64_t{1} << 16) |
         (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);
}

// Descriptor of an MN-major operand: consecutive blocks, 64 elements (128 bytes, 128-byte swizzle)
// or 32 elements (64 bytes, 64-byte swizzle) wide and 64 rows (of k) deep.
template <int kBlock>
__device__ __forceinline__ uint64_t make_mn_major_descriptor(uint32_t address) {
  static_assert(kBlock == 64 || kBlock == 32);
  constexpr uint64_t kSwizzle = kBlock == 64 ? 1 : 2;
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | (uint64_t{kBlock * 128 >> 4} << 16) |
         (uint64_t{kBlock * 16 >> 4} << 32) | (kSwizzle << 62);
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until all but the last n groups are done.
template <int n>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}

// Keeps the compiler from moving accesses of d across this point.
template <int n>
__device__ __forceinline__ void warpgroup_fence_operand(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// clang-format off
#define TO_TEN(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define TO_D4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define TO_D16(i) TO_D4(i), TO_D4((i) + 4), TO_D4((i) + 8), TO_D4((i) + 12)
#define TO_D32(i) TO_D16(i), TO_D16((i) + 16)

#define TO_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TO_NAMES_16 TO_TEN() ", %10, %11, %12, %13, %14, %15"
#define TO_NAMES_32 TO_TEN() ", " TO_TEN(1) ", " TO_TEN(2) ", %30, %31"
#define TO_NAMES_64 TO_TEN() ", " TO_TEN(1) ", " TO_TEN(2) ", " TO_TEN(3) ", " TO_TEN(4) ", " TO_TEN(5) ", %60, %61, %62, %63"
#define TO_NAMES_96 TO_TEN() ", " TO_TEN(1) ", " TO_TEN(2) ", " TO_TEN(3) ", " TO_TEN(4) ", " TO_TEN(5) ", " TO_TEN(6) ", " \
                    TO_TEN(7) ", " TO_TEN(8) ", %90, %91, %92, %93, %94, %95"
#define TO_NAMES_112 TO_TEN() ", " TO_TEN(1) ", " TO_TEN(2) ", " TO_TEN(3) ", " TO_TEN(4) ", " TO_TEN(5) ", " TO_TEN(6) ", " \
                     TO_TEN(7) ", " TO_TEN(8) ", " TO_TEN(9) ", " TO_TEN(10) ", %110, %111"
#define TO_NAMES_128 TO_TEN() ", " TO_TEN(1) ", " TO_TEN(2) ", " TO_TEN(3) ", " TO_TEN(4) ", " TO_TEN(5) ", " TO_TEN(6) ", " \
                     TO_TEN(7) ", " TO_TEN(8) ", " TO_TEN(9) ", " TO_TEN(10) ", " TO_TEN(11) ", %120, %121, %122, %123, %124, %125, %126, %127"
#define TO_D_8 TO_D4(0), TO_D4(4)
#define TO_D_16 TO_D16(0)
#define TO_D_32 TO_D32(0)
#define TO_D_64 TO_D32(0), TO_D32(32)
#define TO_D_96 TO_D32(0), TO_D32(32), TO_D32(64)
#define TO_D_112 TO_D32(0), TO_D32(32), TO_D32(64), TO_D16(96)
#define TO_D_128 TO_D32(0), TO_D32(32), TO_D32(64), TO_D32(96)

// The operands of the asm after those of d: a, b, accumulate and the two orientations.
#define DEFINE_WGMMA_16(tag, type, n, half, a, b, accumulate, trans_a, trans_b)                                                       \
  template <int is_lhs_transposed, int is_rhs_transposed>                                                                                     \
  __device__ __forceinline__ void wgmma(tag, WgmmaN<n>, float (&d)[half], uint64_t lhs, uint64_t rhs, bool adds) {             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate ", 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type " {" TO_NAMES_##half "}, %" #a ", %" #b                 \
                 ", p, 1, 1, %" #trans_a ", %" #trans_b ";\n}"                                                                    \
                 : TO_D_##half : "l"(lhs), "l"(rhs), "r"(static_cast<int>(adds)), "n"(is_lhs_transposed), "n"(is_rhs_transposed));            \
  }
#define DEFINE_WGMMA_16_BIT(tag, type)                           \
  DEFINE_WGMMA_16(tag, type, 16, 8, 8, 9, 10, 11, 12)           \
  DEFINE_WGMMA_16(tag, type, 32, 16, 16, 17, 18, 19, 20)        \
  DEFINE_WGMMA_16(tag, type, 64, 32, 32, 33, 34, 35, 36)        \
  DEFINE_WGMMA_16(tag, type, 128, 64, 64, 65, 66, 67, 68)       \
  DEFINE_WGMMA_16(tag, type, 192, 96, 96, 97, 98, 99, 100)      \
  DEFINE_WGMMA_16(tag, type, 224, 112, 112, 113, 114, 115, 116) \
  DEFINE_WGMMA_16(tag, type, 256, 128, 128, 129, 130, 131, 132)

// The same without orientations: both operands are K-major.
#define TO_WGMMA_8(tag, type, n, half, a, b, accumulate)                                                                        \
  template <int is_lhs_transposed, int is_rhs_transposed>                                                                                     \
  __device__ __forceinline__ void wgmma(tag, WgmmaN<n>, float (&d)[half], uint64_t lhs, uint64_t rhs, bool adds) {             \
    static_assert(is_lhs_transposed == 0 && is_rhs_transposed == 0);                                                                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate ", 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32." type " {" TO_NAMES_##half "}, %" #a ", %" #b                 \
                 ", p, 1, 1;\n}"                                                                                                \
                 : TO_D_##half : "l"(lhs), "l"(rhs), "r"(static_cast<int>(adds)));                                              \
  }
#define DEFINE_WGMMA_8_BIT(tag, type)                 \
  TO_WGMMA_8(tag, type, 16, 8, 8, 9, 10)         \
  TO_WGMMA_8(tag, type, 32, 16, 16, 17, 18)      \
  TO_WGMMA_8(tag, type, 64, 32, 32, 33, 34)      \
  TO_WGMMA_8(tag, type, 128, 64, 64, 65, 66)     \
  TO_WGMMA_8(tag, type, 192, 96, 96, 97, 98)     \
  TO_WGMMA_8(tag, type, 224, 112, 112, 113, 114) \
  TO_WGMMA_8(tag, type, 256, 128, 128, 129, 130)

DEFINE_WGMMA_16_BIT(Bf16, "bf16.bf16")
DEFINE_WGMMA_16_BIT(F16, "f16.f16")
DEFINE_WGMMA_8_BIT(E4m3E4m3, "e4m3.e4m3")
DEFINE_WGMMA_8_BIT(E4m3E5m2, "e4m3.e5m2")
DEFINE_WGMMA_8_BIT(E5m2E4m3, "e5m2.e4m3")

#undef TO_TEN
#undef TO_D4
#undef TO_D16
#undef TO_D32
#undef TO_NAMES_8
#undef TO_NAMES_16
#undef TO_NAMES_32
#undef TO_NAMES_64
#undef TO_NAMES_96
#undef TO_NAMES_112
#undef TO_NAMES_128
#undef TO_D_8
#undef TO_D_16
#undef TO_D_32
#undef TO_D_64
#undef TO_D_96
#undef TO_D_112
#undef TO_D_128
#undef DEFINE_WGMMA_16
#undef DEFINE_WGMMA_16_BIT
#undef TO_WGMMA_8
#undef DEFINE_WGMMA_8_BIT
// clang-format on

}  // namespace torch_overlap::sm90
