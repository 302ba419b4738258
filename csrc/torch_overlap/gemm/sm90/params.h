#pragma once

#include <cuda.h>

#include <cstdint>

// Parameters of this project's GEMM kernels for Hopper, for the host and for kernels.
namespace torch_overlap::sm90 {

enum class ElementType : int { none, f32, f16, bf16 };

// Number of rows of outputs that a warp stores at a time.
inline constexpr int kWarpRows = 16;

// Number of rows, and of columns, of an addend that are loaded at a time.
inline constexpr int kAddendRows = 64;

// Epilogue: applied to the product before it is rounded, in this order.
struct Epilogue {
  // Scales of 8-bit operands: one fp32 element each, or one per row of lhs and per column of the
  // result.
  const float* lhs_scale;
  const float* rhs_scale;
  bool scaled_by_row;
  const void* bias;  // [n]; null: none
  ElementType bias_type;
  bool gelu;
};

// A GEMM: out [m, n] = epilogue(lhs [m, k] rhs [k, n]).
struct GemmParams {
  CUtensorMap lhs;
  CUtensorMap rhs;
  CUtensorMap out;
  int m;
  int n;
  int k;
  // Number of rows of tiles that are computed before the next columns, so that what they read stays
  // in L2.
  int row_group;
  bool plain;  // no epilogue except scales
  Epilogue epilogue;
};

// A GEMM with few rows, [m, k] by the transpose of a weight [n, k].
struct SmallMParams {
  CUtensorMap weight;  // boxes of all features of a tile, or of 64 x 64 if it is not K-major
  CUtensorMap rows;    // boxes of the kernel's number of rows
  int m;
  int n;
  int stages;  // stages of all of k, at least one per part of it
};

// out = epilogue(lhs rhs) + residual, [m, n] too. The sum is rounded once.
struct ResidualParams {
  GemmParams product;
  CUtensorMap residual;
};

}  // namespace torch_overlap::sm90
