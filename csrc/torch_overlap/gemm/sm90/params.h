#pragma once

#include <cuda.h>

#include <cstdint>

// What our GEMM kernels for Hopper take, for the host and for kernels.
namespace torch_overlap::sm90 {

enum class VectorType : int { none, f32, f16, bf16 };

// Each warp stores so many rows of outputs at a time.
inline constexpr int kWarpRows = 16;

// What becomes of the product before it is rounded, in this order.
struct Epilogue {
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
  bool plain;  // nothing to do in the epilogue
  Epilogue epilogue;
};

}  // namespace torch_overlap::sm90
