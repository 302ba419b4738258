#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "torch_overlap/gemm/sm90/kernels.h"

// Our own plain products on Hopper, as candidates beside the library's.
namespace torch_overlap::sm90 {

// out [m, n] = lhs [m, k] * rhs [k, n] (+ bias, then GELU, then + residual) of types that
// multiplies() takes. Strides are those of rows in memory, in elements.
struct Product {
  at::ScalarType lhs_type = at::kBFloat16;
  at::ScalarType rhs_type = at::kBFloat16;
  at::ScalarType out_type = at::kBFloat16;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  const void* lhs = nullptr;  // [m, k] where lhs_along_k, else [k, m]
  int64_t lhs_stride = 0;
  bool lhs_along_k = true;
  const void* rhs = nullptr;  // [n, k] where rhs_along_k, else [k, n]
  int64_t rhs_stride = 0;
  bool rhs_along_k = true;
  // Of 8-bit operands: what their values are multiplied by, one element each, or [m] and [n].
  const float* lhs_scale = nullptr;
  const float* rhs_scale = nullptr;
  bool scaled_by_row = false;
  void* out = nullptr;
  int64_t out_stride = 0;
  const void* bias = nullptr;
  VectorType bias_type = VectorType::none;
  bool gelu = false;
  const void* residual = nullptr;  // [m, n] of out_type; it may be out, else it is apart from that
  int64_t residual_stride = 0;
};

// A way to compute it: the tile.
struct Choice {
  int rows = 0;
  int columns = 0;
};

// All ways there are on the current device; none where it is no sm_90, or where tensor copies
// cannot take the matrices: they want rows that begin at multiples of 16 bytes, and of the result
// rows that end there too.
std::vector<Choice> choices(const Product& product);

// The one whose waves of tiles take the least time, by their number and size; nothing was measured.
std::optional<Choice> guess(const Product& product);

// On the current stream. Capture-safe once the kernel has run on this device.
void run(const Product& product, const Choice& choice);

}  // namespace torch_overlap::sm90
