#pragma once

#include <cstdint>
#include <string_view>

#include "torch_overlap/base/export.h"

// What holds for all products of the process. Threads: any.
namespace torch_overlap {

// How a plan gets its algorithm: the library's first proposal; the fastest of its first eight,
// measured on the operands of the first call (never during a capture); or the fastest of those and
// of our own kernels, which Hopper has for 8- and 16-bit floats. Plans that exist stay.
enum class GemmTuning { kHeuristic, kMeasured, kBest };
// "heuristic" (the default), "measured" or "best".
TORCH_OVERLAP_API void set_gemm_tuning(std::string_view tuning);
TORCH_OVERLAP_API GemmTuning gemm_tuning();

// MXFP8 where tensor cores do not read it: dequantized to bf16 and multiplied, or an error that
// names the architecture which does.
enum class Mxfp8Path { kDequantize, kNative };
// "dequantize" (the default) or "native".
TORCH_OVERLAP_API void set_gemm_mxfp8(std::string_view path);
TORCH_OVERLAP_API Mxfp8Path gemm_mxfp8();

// Since the process began, or the last reset.
struct GemmStatistics {
  int64_t calls = 0;     // products that were not empty
  int64_t plans = 0;     // plans made: descriptors built
  int64_t queries = 0;   // times that the library was asked for algorithms
  int64_t measured = 0;  // algorithms whose time was measured
  int64_t composed = 0;  // calls whose epilogue ran as operators of torch after the product
};
TORCH_OVERLAP_API GemmStatistics gemm_statistics();
TORCH_OVERLAP_API void reset_gemm_statistics();

}  // namespace torch_overlap
