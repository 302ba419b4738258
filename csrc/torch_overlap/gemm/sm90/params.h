#pragma once

#include <cuda.h>

#include <cstdint>

// What our GEMM kernels for Hopper take, for the host and for kernels.
namespace torch_overlap::sm90 {

enum class VectorType : int { none, f32, f16, bf16 };

// Each warp stores so many rows of outputs at a time.
inline constexpr int kWarpRows = 16;

// What is added to outputs is loaded by so many rows and columns.
inline constexpr int kAddendRows = 64;

// What becomes of the product before it is rounded, in this order.
struct Epilogue {
  // Of 8-bit operands: what the values of each are to be multiplied by, one fp32 element, or one
  // for each row of lhs and column of the product.
  const float* lhs_scale;
  const float* rhs_scale;
  bool scaled_by_row;
  const void* bias;  // [n]; null: none
  VectorType bias_type;
  bool gelu;
};

// One matrix product out [m, n] = epilogue(lhs [m, k] rhs [k, n]).
struct GemmParams {
  CUtensorMap lhs;
  CUtensorMap rhs;
  CUtensorMap out;
  int m;
  int n;
  int k;
  // Tiles of so many rows are computed one after the other before the next columns: what they read
  // stays in L2.
  int row_group;
  bool plain;  // nothing to do in the epilogue but for scales
  Epilogue epilogue;
};

// One of few rows, [m, k] by the transpose of a weight [n, k].
struct FewRowsParams {
  CUtensorMap weight;  // boxes of all features of a tile, or of 64 x 64 where it is not along k
  CUtensorMap rows;    // boxes of as many as the kernel takes
  int m;
  int n;
  int stages;  // of all of k, at least one for each part of it
};

// out = epilogue(lhs rhs) + residual, [m, n] too. The sum is rounded once.
struct ResidualParams {
  GemmParams product;
  CUtensorMap residual;
};

}  // namespace torch_overlap::sm90
