#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "torch_overlap/gemm/early_start.h"
#include "torch_overlap/gemm/sm90/kernels.h"

// This project's plain GEMMs on Hopper, as candidates in addition to the library's.
namespace torch_overlap::sm90 {

// out [m, n] = lhs [m, k] * rhs [k, n] (+ bias, then GELU, then + residual), of types that
// supports_types() accepts. Strides are those of rows in memory, in elements.
struct Problem {
  at::ScalarType lhs_type = at::kBFloat16;
  at::ScalarType rhs_type = at::kBFloat16;
  at::ScalarType out_type = at::kBFloat16;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  const void* lhs = nullptr;  // [m, k] if is_lhs_k_major, otherwise [k, m]
  int64_t lhs_stride = 0;
  bool is_lhs_k_major = true;
  const void* rhs = nullptr;  // [n, k] if is_rhs_k_major, otherwise [k, n]
  int64_t rhs_stride = 0;
  bool is_rhs_k_major = true;
  // Scales of 8-bit operands: one element each, or [m] and [n].
  const float* lhs_scale = nullptr;
  const float* rhs_scale = nullptr;
  bool scaled_by_row = false;
  void* out = nullptr;
  int64_t out_stride = 0;
  const void* bias = nullptr;
  ElementType bias_type = ElementType::none;
  bool gelu = false;
  const void* residual = nullptr;  // [m, n] of out_type; may be out, otherwise must not overlap it
  int64_t residual_stride = 0;
};

// Tile of a kernel.
struct TileShape {
  int rows = 0;
  int columns = 0;
};

// Returns the tiles of all kernels that support the problem on the current device. Empty if it is
// not sm_90, or if TMA cannot access the matrices: rows must begin at multiples of 16 bytes, and
// rows of the result must also end there.
std::vector<TileShape> supported_tile_shapes(const Problem& product);

// Returns the tile with the least estimated time, from the number and the size of its waves;
// without measurements.
std::optional<TileShape> heuristic_tile_shape(const Problem& product);

// Runs on the current stream. Capture-safe once the kernel has run on this device.
void run(const Problem& product, const TileShape& tile_shape);

// Runs a product of few rows by a K-major rhs [n, k] of the same type, not e5m2, without an
// epilogue (small_m_kernels.cu). Returns false if there is no kernel for it.
bool run_small_m(const Problem& product, EarlyStart start);
bool supports_small_m(const Problem& product);
// Loads the kernel that run_small_m() runs, which may wait for running kernels. Returns false if
// there is none.
bool load_small_m(const Problem& product, EarlyStart start);

}  // namespace torch_overlap::sm90
