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

// The same where blocks share tiles along k: see stream_k.cuh.
struct StreamKParams {
  GemmParams gemm;
  // Tiles of a cluster of blocks, and stages of a tile.
  int rows;
  int columns;
  int depth;
  // Of all tiles, in their order, the first ones are computed by one cluster each. The others are
  // shared out, as rows of so many stages, each to a group of clusters; of a row so many to each,
  // the first `rest` have one more.
  int whole_tiles;
  int row_stages;
  int row_clusters;
  int share;
  int rest;
  // Sums of parts: for two parts at each border between clusters, the tile of each block of a
  // cluster.
  float* sums;
  // For each tile that is cut, by the cluster that has its first part, each block of a cluster and
  // each warp: how many parts have left their sums. 0 before and after.
  uint32_t* arrived;
};

// The same, of which tiles may be shared, and out = epilogue(lhs rhs) + residual.
struct ResidualParams {
  StreamKParams product;
  CUtensorMap residual;
};

// Warps of a block that multiply.
inline constexpr int kMultiplyingWarps = 8;

}  // namespace torch_overlap::sm90
