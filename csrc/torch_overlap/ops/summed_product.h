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

// A product whose sum over ranks all of them get: matmul_all_reduce, and its scaled form.
namespace torch_overlap::ops {

// In how many pieces it goes when it is chunked: each travels while the next is computed.
inline constexpr int64_t kAllReduceChunks = 4;

// What its choice depends on: [rows, local_k] by [local_k, features] on each rank, with sums of
// `dtype`. Channels hold the largest of its blocks of rows, and are not taken unasked: over them
// each element moves twice. row_unit: as below.
TORCH_OVERLAP_API OverlapProblem summed_product_problem(std::string_view op, const TorchComm& comm,
                                                        int64_t rows, int64_t features,
                                                        int64_t local_k, at::ScalarType dtype,
                                                        int64_t row_unit = 1);

struct SummedProduct {
  std::string_view op;
  std::shared_ptr<TorchComm> comm;
  at::Tensor out;   // [rows, features], contiguous: the sum, or mean, of all ranks' products
  at::Tensor bias;  // of this rank, added to all rows of out behind the sum; or undefined
  bool mean = false;
  // Products of fewer rows are of a multiple of it, as that of all is.
  int64_t row_unit = 1;
  // `to` = this rank's product of some of the rows.
  std::function<void(const RowRange& rows, const at::Tensor& to)> multiply;
  // That product as the GEMM layer takes it, without `out`: for channels.
  std::function<GemmArgs(const RowRange& rows)> arguments;
};
// On the current stream.
void run_summed_product(const SummedProduct& problem, Algorithm algorithm);

}  // namespace torch_overlap::ops
