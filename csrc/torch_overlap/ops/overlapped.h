#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/ops/choose.h"
#include "torch_overlap/overlap/execute.h"

// How the fused operators run their products over a channel of their communicator.
namespace torch_overlap::ops {

// Blocks of a reduction beside a product.
inline constexpr int kBulkBlocks = 16;

// op(x) as an operand: x [m, k] itself, or the transpose of what lies in memory.
GemmOperand operand(const at::Tensor& x);
// op(x) = x^T: what a linear layer multiplies with.
GemmOperand transposed_operand(const at::Tensor& x);

// What is gathered: this rank's rows, and where all go, if that is asked.
struct GatherInput {
  at::Tensor own;     // [rows, k], contiguous
  at::Tensor scales;  // 8-bit values with block scales: those of `own` [rows, blocks], contiguous
  at::Tensor gathered;
  at::Tensor gathered_scales;
  // By fused kernels, where the device has them for all of the products.
  bool fused = false;
  // All rows first, from the memory of each rank to that of the others. Without scales.
  bool direct = false;
};
// Products of all rows, which are the lhs of each; undefined there: data, and scale_inv if it is
// gathered.
void ring_gather_gemms(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                       const GatherInput& input, std::vector<GemmArgs> gemms);
// products[i] = all rows * weights[i]^T + biases[i]
void ring_gather_multiply(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                          const GatherInput& input, at::TensorList weights,
                          const std::vector<at::Tensor>& biases,
                          const std::vector<at::Tensor>& products);

// out = this rank's rows of the sum (or mean) over ranks of all products + start, plus bias.
struct ScatterSum {
  at::Tensor start;  // [rows of all, columns]: added to this rank's; or undefined
  at::Tensor bias;
  bool mean = false;
  at::Tensor out;
  // By a fused kernel, where there is one product and nothing to start from, and the device has it.
  bool fused = false;
  // See ScatterGemm.
  bool ranks_share_k = true;
  // The ranks' rows are multiples of it.
  int64_t row_unit = 1;
};
// Of these products of all rows, whose outs are not looked at.
void ring_scatter_gemms(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                        std::vector<GemmArgs> gemms, const ScatterSum& sum);

// The sum of inputs[i] weights[i].
struct ScatterMultiply {
  std::vector<at::Tensor> inputs;   // [rows of all, k_i]
  std::vector<at::Tensor> weights;  // [k_i, columns]
  ScatterSum sum;
};
void ring_multiply_scatter(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                           const ScatterMultiply& problem);

// The same with one product for all rows: `before_sum` is called behind it, and the reduction goes
// on beside `beside`.
void bulk_multiply_scatter(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                           const ScatterMultiply& problem, const std::function<void()>& before_sum,
                           const std::vector<GemmArgs>& beside);

// out = the sum (or mean) over ranks of this product of all rows, plus bias: this rank's rows of
// it, or `everywhere` all of them. It is summed from where the ranks' products lie.
struct DirectProduct {
  GemmArgs product;  // out is not looked at
  int64_t rows = 0;  // of all
  at::Tensor bias;
  bool mean = false;
  bool everywhere = false;
  at::Tensor out;  // contiguous
};
void direct_sum_gemm(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                     DirectProduct problem);

// The same, everywhere, by one kernel of few rows. False: there is none for it.
bool fused_reduce_gemm(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                       const DirectProduct& problem);

// How a matmul_all_reduce of these `rows` goes.
Algorithm matmul_all_reduce_algorithm(const std::shared_ptr<TorchComm>& comm,
                                      const at::Tensor& rows, int64_t features,
                                      std::string_view asked);

// All ranks' rows, gathered in the background.
class ChannelGather {
 public:
  ChannelGather(std::string_view op, const std::shared_ptr<TorchComm>& comm, const at::Tensor& own)
      : ChannelGather(op, comm, own, {own.size(0) * comm->size(), comm->size()}, true) {}
  // `share`: which of all rows each rank has. Without `with_own` rows() has only those of others.
  ChannelGather(std::string_view op, const std::shared_ptr<TorchComm>& comm, const at::Tensor& own,
                const RowShare& share, bool with_own);
  // Valid after finish(), as long as this lives.
  const at::Tensor& rows() const { return rows_; }
  void finish() { gather_->finish(); }

 private:
  std::shared_ptr<OverlapChannel> channel_;
  std::optional<OverlapChannel::Use> use_;
  at::Tensor rows_;
  std::optional<BackgroundGather> gather_;
};

// Bytes of a channel that the two need; never 0, which stands for none.
int64_t gather_bytes(const TorchComm& comm, const at::Tensor& own, const at::Tensor& scales = {});
int64_t scatter_bytes(const TorchComm& comm, int64_t rows, int64_t columns, at::ScalarType dtype,
                      int64_t row_unit = 1);
int64_t direct_bytes(const TorchComm& comm, int64_t rows, int64_t columns, at::ScalarType dtype);

}  // namespace torch_overlap::ops
