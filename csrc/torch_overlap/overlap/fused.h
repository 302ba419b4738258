#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/overlap/schedule.h"

// Fused GEMMs, which wait for the chunks of other ranks, or send their own, inside the kernel: an
// alternative that a device may offer to one GEMM per chunk.
namespace torch_overlap {

// Types of a GEMM, and the scaling and accumulation of its 8-bit operands.
struct FusedTypes {
  at::ScalarType lhs;
  at::ScalarType rhs;
  at::ScalarType out;
  ScalingMode scaling = ScalingMode::NO_SCALING;  // scaling of rhs
  bool use_split_accumulator = false;
  bool operator==(const FusedTypes&) const = default;
  static FusedTypes all(at::ScalarType dtype) { return {.lhs = dtype, .rhs = dtype, .out = dtype}; }
};

// Everything that decides whether a device has a kernel, equally on every rank.
struct FusedShape {
  c10::Device device;
  FusedTypes types;
  RowPartition rows;
  int64_t n = 0;  // columns of this rank's GEMM
  int64_t k = 0;
};

// out = all rows * rhs + bias. Each chunk is multiplied as soon as it has arrived. Flag r signals
// the arrival of rank r's chunk, unless the kernel sends the chunks itself.
struct FusedGather {
  GemmArgs gemm{};  // lhs.data is ignored
  RowPartition rows;
  at::Tensor own;       // this rank's rows
  at::Tensor gathered;  // destination of all rows; this rank's own are not written
  // own and gathered for the scales, contiguous, if each row has its own; otherwise undefined.
  at::Tensor own_scales;
  at::Tensor gathered_scales;
  std::vector<int> order{};  // order in which chunks are multiplied; this rank's own is first
  // Number of blocks of the kernel that send this rank's rows; the kernel then enters the operation
  // itself. 0: the rows are sent by other means.
  int senders = 0;
};

// out = this rank's rows of the sum of lhs * rhs over ranks, * factor + bias.
struct FusedReduceScatter {
  GemmArgs gemm;  // GEMM of all rows, or of those that the kernel computes; out is ignored
  RowPartition rows;
  int64_t at = 0;  // offset in bytes in the channel's data, of size x rows.largest() rows
  at::Tensor out;
  double factor = 1;
  bool ranks_share_k = true;
  // 0: one kernel computes all rows and sends them. Otherwise the kernel computes only this rank's
  // rows. Those of every other rank are computed by separate GEMMs in this number of pieces, each
  // of which is sent while the next is computed. Flag piece * size + r signals the arrival of a
  // piece of rank r.
  int pieces = 0;

  // Returns the number of rows of every piece of a rank but its last one.
  TORCH_OVERLAP_API int64_t piece_rows() const;
  // Returns the pieces of the rows of `rank`, relative to its first row. A rank may have fewer
  // pieces than others.
  TORCH_OVERLAP_API std::vector<IndexRange> pieces_of(int rank) const;
};

// out = the sum of lhs * rhs over ranks, * factor + bias, on every rank: one kernel, for few rows.
struct FusedAllReduce {
  GemmArgs gemm;  // GEMM of all rows; out is ignored
  RowPartition rows;
  int64_t bytes = 0;  // size in bytes of the channel's data, all of which is used
  at::Tensor out;     // [rows, columns], contiguous
  double factor = 1;
  at::Tensor bias;  // [columns] of this rank, contiguous; or undefined
};

}  // namespace torch_overlap
