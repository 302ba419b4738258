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

// The products of the fused operators over a channel of their communicator.
namespace torch_overlap::ops {

// Number of blocks of a reduction that runs concurrently with a product.
inline constexpr int kBulkBlocks = 16;

// op(x) as an operand: x [m, k] itself, or the transpose of the stored matrix.
GemmOperand operand(const at::Tensor& x);
// op(x) = x^T: the operand that a linear layer multiplies by.
GemmOperand transposed_operand(const at::Tensor& x);

// Inputs of a gather: this rank's rows, and the destination of all rows if they are wanted.
struct GatherInput {
  at::Tensor own;     // [rows, k], contiguous
  at::Tensor scales;  // block scales of 8-bit `own` [rows, blocks], contiguous
  at::Tensor gathered;
  at::Tensor gathered_scales;
  // `fused` falls back to `chunks` unless the device has kernels for all products.
  GatherMethod method = GatherMethod::p2p;
};
inline GatherMethod gather_method(Algorithm algorithm) {
  if (algorithm == Algorithm::low_latency) return GatherMethod::low_latency;
  return algorithm == Algorithm::fused ? GatherMethod::fused : GatherMethod::p2p;
}
// Computes products whose lhs is all gathered rows. The lhs data of `gemms` is undefined, and so is
// its scale_inv if scales are gathered.
void channel_gather_gemms(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                          const GatherInput& input, std::vector<GemmArgs> gemms);
//  products[i] = all rows * weights[i]^T + biases[i]
void channel_gather_linear(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                           const GatherInput& input, at::TensorList weights,
                           const std::vector<at::Tensor>& biases,
                           const std::vector<at::Tensor>& products);

//  out = this rank's rows of the sum (or mean) over ranks of all products + start, plus bias.
struct ScatterSum {
  at::Tensor start;  // [rows of all ranks, columns], added to this rank's product; or undefined
  at::Tensor bias;
  bool mean = false;
  at::Tensor out;
  // Uses a fused kernel if there is one product, `start` is undefined, and the device has the
  // kernel.
  bool fused = false;
  // See ScatterGemm.
  bool ranks_share_k = true;
  // The number of rows of each rank is a multiple of it.
  int64_t row_unit = 1;
};
// Reduces these products of all rows. Their `out` is ignored.
void channel_scatter_gemms(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                           std::vector<GemmArgs> gemms, const ScatterSum& sum);

// The sum of inputs[i] weights[i].
struct ScatterMultiply {
  std::vector<at::Tensor> inputs;   // [rows of all ranks, k_i]
  std::vector<at::Tensor> weights;  // [k_i, columns]
  ScatterSum sum;
};
void channel_scatter_matmul(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                            const ScatterMultiply& problem);

// The same with one product for all rows. `before_reduction` is called after it, and the reduction
// runs concurrently with the products `beside`.
void bulk_scatter_matmul(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                         const ScatterMultiply& problem,
                         const std::function<void()>& before_reduction,
                         const std::vector<GemmArgs>& concurrent_gemms);

// out = the sum (or mean) over ranks of this product of all rows, plus bias: this rank's rows, or
// all rows if `everywhere`. The sum reads the ranks' products where they were written.
struct ReduceProduct {
  GemmArgs product;  // `out` is ignored
  int64_t rows = 0;  // rows of all ranks
  at::Tensor bias;
  bool mean = false;
  bool everywhere = false;
  at::Tensor out;  // contiguous
};
void low_latency_sum_gemm(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                          ReduceProduct problem);

// The same with `everywhere`, by one kernel for few rows. Returns false if there is no such kernel.
bool try_fused_all_reduce_gemm(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                               const ReduceProduct& problem);

// Returns the algorithm of a matmul_all_reduce of these `rows`.
Algorithm matmul_all_reduce_algorithm(const std::shared_ptr<TorchComm>& comm,
                                      const at::Tensor& rows, int64_t features,
                                      std::string_view asked);

// Gathers all ranks' rows in the background.
class ChannelGather {
 public:
  ChannelGather(std::string_view op, const std::shared_ptr<TorchComm>& comm, const at::Tensor& own)
      : ChannelGather(op, comm, own, {own.size(0) * comm->size(), comm->size()}, true) {}
  // `share`: split of all rows among the ranks. Without `with_own`, rows() has only other ranks'
  // rows.
  ChannelGather(std::string_view op, const std::shared_ptr<TorchComm>& comm, const at::Tensor& own,
                const RowShare& share, bool with_own);
  // Valid after finish(), for the lifetime of this object.
  const at::Tensor& rows() const { return rows_; }
  void finish() { gather_->finish(); }

 private:
  std::shared_ptr<OverlapChannel> channel_;
  std::optional<OverlapChannel::Use> use_;
  at::Tensor rows_;
  std::optional<BackgroundGather> gather_;
};

// Return the bytes of a channel that a gather, a scatter or low_latency needs; never 0, which would
// mean that no channel is used.
int64_t gather_bytes(const TorchComm& comm, const at::Tensor& own, const at::Tensor& scales = {});
int64_t scatter_bytes(const TorchComm& comm, int64_t rows, int64_t columns, at::ScalarType dtype,
                      int64_t row_unit = 1);
int64_t low_latency_bytes(const TorchComm& comm, int64_t rows, int64_t columns,
                          at::ScalarType dtype);

}  // namespace torch_overlap::ops
