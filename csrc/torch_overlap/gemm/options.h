#pragma once

#include <cstdint>
#include <string_view>

#include "torch_overlap/base/export.h"

// Process-wide options of GEMMs. Thread-safe.
namespace torch_overlap {

// Selection of the algorithm of a plan: the first proposal of the library; the fastest of its first
// eight, measured on the operands of the first call (never during a capture); or the fastest of
// those and of this project's kernels, which exist on Hopper for 8- and 16-bit floats. Products of
// few rows of e4m3 have one of these in any case. Existing plans are not changed.
enum class GemmTuning { kHeuristic, kMeasured, kBest };
// "heuristic" (the default), "measured" or "best".
TORCH_OVERLAP_API void set_gemm_tuning(std::string_view tuning);
TORCH_OVERLAP_API GemmTuning gemm_tuning();

// MXFP8 on devices whose tensor cores do not support it: dequantize to bf16 and multiply, or throw
// an error that names the architecture which does.
enum class Mxfp8Path { kDequantize, kNative };
// "dequantize" (the default) or "native".
TORCH_OVERLAP_API void set_gemm_mxfp8(std::string_view path);
TORCH_OVERLAP_API Mxfp8Path gemm_mxfp8();

// Counts since the process began, or since the last reset.
struct GemmStatistics {
  int64_t calls = 0;     // non-empty GEMMs
  int64_t plans = 0;     // plans created
  int64_t queries = 0;   // heuristic queries to the library
  int64_t measured = 0;  // algorithms that were timed
  int64_t composed = 0;  // calls whose epilogue ran as torch operators after the GEMM
};
TORCH_OVERLAP_API GemmStatistics gemm_statistics();
TORCH_OVERLAP_API void reset_gemm_statistics();

}  // namespace torch_overlap
