#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/overlap/schedule.h"

// Products that wait for the chunks of other ranks, or send them theirs, by themselves: what a
// device may offer in place of a product for each chunk.
namespace torch_overlap {

// Types of a product, and how its 8-bit operands are scaled and summed.
struct FusedTypes {
  at::ScalarType lhs;
  at::ScalarType rhs;
  at::ScalarType out;
  ScalingMode scaling = ScalingMode::NO_SCALING;  // of rhs
  bool use_split_accumulator = false;
  bool operator==(const FusedTypes&) const = default;
  static FusedTypes all(at::ScalarType dtype) { return {.lhs = dtype, .rhs = dtype, .out = dtype}; }
};

// What decides whether a device has a kernel for it, on every rank alike.
struct FusedShape {
  c10::Device device;
  FusedTypes types;
  RowShare rows;
  int64_t n = 0;  // of this rank's product
  int64_t k = 0;
};

// out = all rows * rhs + bias, of each chunk as soon as it is there: flag r says so of that of rank
// r, if the kernel does not send by itself.
struct FusedGather {
  GemmArgs gemm;  // lhs.data is not looked at
  RowShare rows;
  at::Tensor own;       // this rank's rows
  at::Tensor gathered;  // all rows, this rank's own left out
  // The same of scales where each row has one, contiguous; else undefined.
  at::Tensor own_scales;
  at::Tensor gathered_scales;
  std::vector<int> order;  // in which chunks are asked for; this rank's own is first
  // So many blocks of the kernel send this rank's rows, in an operation that nobody has begun. 0:
  // they are sent otherwise.
  int senders = 0;
};

// out = this rank's rows of the sum of lhs * rhs over ranks, * factor + bias.
struct FusedScatter {
  GemmArgs gemm;  // of all rows, or those that the kernel computes; out is not looked at
  RowShare rows;
  int64_t at = 0;  // byte of the channel's data: room for size x rows.largest() rows
  at::Tensor out;
  double factor = 1;
  bool ranks_share_k = true;
  // 0: one kernel computes all, and sends. Else it computes this rank's rows alone; those of every
  // other rank are computed before, and sent beside it, in so many pieces. Flag piece * size + r
  // says that a piece of rank r is here.
  int pieces = 0;

  // Of all pieces but the last of a rank.
  TORCH_OVERLAP_API int64_t piece_rows() const;
  // Of the rows of a rank, which they count from its first. It may have fewer than others.
  TORCH_OVERLAP_API std::vector<Piece> pieces_of(int rank) const;
};

// out = the sum of lhs * rhs over ranks, * factor + bias, on every rank: one kernel, of few rows.
struct FusedReduce {
  GemmArgs gemm;  // of all rows; out is not looked at
  RowShare rows;
  int64_t bytes = 0;  // of the channel's data, all of it
  at::Tensor out;     // [rows, columns], contiguous
  double factor = 1;
  at::Tensor bias;  // [columns] of this rank, contiguous; or undefined
};

}  // namespace torch_overlap
