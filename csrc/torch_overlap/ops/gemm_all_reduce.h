#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string_view>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/ops/choose.h"
#include "torch_overlap/ops/chunking.h"

// A product whose sum over ranks every rank gets: matmul_all_reduce and its scaled form.
namespace torch_overlap::ops {

// Number of pieces of the pipelined algorithm: each travels while the next one is computed.
inline constexpr int64_t kNumAllReduceChunks = 4;

// Returns the problem of [rows, local_k] x [local_k, features] on each rank, with sums of `dtype`.
// Channels hold the largest of its blocks of rows. "auto" does not select them without a
// measurement, because each element moves twice over channels. row_unit: see GemmAllReduce.
TORCH_OVERLAP_API OverlapProblem gemm_all_reduce_problem(std::string_view op, const TorchComm& comm,
                                                         int64_t rows, int64_t features,
                                                         int64_t local_k, at::ScalarType dtype,
                                                         int64_t row_unit = 1);

struct GemmAllReduce {
  std::string_view op;
  std::shared_ptr<TorchComm> comm;
  at::Tensor out;   // [rows, features], contiguous: the sum, or mean, of all ranks' products
  at::Tensor bias;  // this rank's bias, added to every row of out after the reduction; or undefined
  bool mean = false;
  // The rows of every partial product are a multiple of it, as all rows are.
  int64_t row_unit = 1;
  // Writes this rank's product of `rows` to `to`.
  std::function<void(const RowRange& rows, const at::Tensor& to)> multiply;
  // Returns the GEMM arguments of that product without `out`, for channels.
  std::function<GemmArgs(const RowRange& rows)> arguments;
};
// Runs on the current stream.
void run_gemm_all_reduce(const GemmAllReduce& problem, Algorithm algorithm);

}  // namespace torch_overlap::ops
