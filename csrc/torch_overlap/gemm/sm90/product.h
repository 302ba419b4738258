#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "torch_overlap/gemm/sm90/kernels.h"

// Our own plain products on Hopper, as candidates beside the library's.
namespace torch_overlap::sm90 {

// out [m, n] = lhs [m, k] * rhs [k, n] (+ bias, then GELU, + residual) of types that multiplies()
// takes.
// Strides are those of rows in memory, in elements.
struct Product {
  at::ScalarType lhs_type = at::kBFloat16;
  at::ScalarType rhs_type = at::kBFloat16;
  at::ScalarType out_type = at::kBFloat16;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  const void* lhs = nullptr;  // [m, k]
  int64_t lhs_stride = 0;
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
  const void* residual = nullptr;  // [m, n] of out_type; it may be out
  int64_t residual_stride = 0;
  int sm_target = 0;  // so many SMs at most; 0: all
  // For kernels that share tiles along k, aligned to 256 bytes. Only one of a time may use it.
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

// A way to compute it: the tile, and whether tiles are shared along k (stream_k.cuh).
struct Choice {
  int rows = 0;
  int columns = 0;
  bool stream_k = false;
};

std::string to_string(const Choice& choice);

// All ways there are on the current device; none where it is no sm_90, or where tensor copies
// cannot read the matrices: they want rows at multiples of 16 bytes. Tiles are shared where they
// are no whole number of waves, and the workspace holds the sums of those that are.
std::vector<Choice> choices(const Product& product);

// The one whose waves of tiles take the least time, by their number and size; nothing was measured,
// and no tile is shared.
std::optional<Choice> guess(const Product& product);

// On the current stream. Capture-safe once the kernel has run on this device.
void run(const Product& product, const Choice& choice);

}  // namespace torch_overlap::sm90
