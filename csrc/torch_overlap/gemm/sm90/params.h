#pragma once

#include <cuda.h>

#include <cstdint>

// What our GEMM kernels for Hopper take, for the host and for kernels.
namespace torch_overlap::sm90 {

enum class VectorType : int { none, f32, f16, bf16 };

// What becomes of the product before it is rounded, in this order: scales, bias, GELU or its
// derivative, residual. Pointers are null where there is nothing of the kind. Matrices are [m, n]
// of the type of the output.
struct Epilogue {
  // Factors of rows and of columns; a step of 0: one for all.
  const float* lhs_scale;
  const float* rhs_scale;
  int lhs_scale_step;
  int rhs_scale_step;
  const void* bias;  // [n]
  VectorType bias_type;
  bool gelu;
  void* pre_gelu;          // becomes what GELU is taken of
  const void* gelu_input;  // the product is multiplied with the derivative of GELU there
  const void* residual;
  int64_t pre_gelu_stride;
  int64_t gelu_input_stride;
  int64_t residual_stride;
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
  // Tiles at the beginning that blocks share, each taking an equal part of their k (stream-K), and
  // where the parts are handed over: for each block fp32 [tile rows, tile columns] and a word that
  // is 0 between launches.
  int shared_tiles;
  float* parts;
  uint32_t* part_ready;
};

}  // namespace torch_overlap::sm90
