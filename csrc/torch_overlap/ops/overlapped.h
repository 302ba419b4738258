#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/ops/choose.h"
#include "torch_overlap/ops/chunking.h"
#include "torch_overlap/overlap/execute.h"

// Products whose left operand is gathered, or whose result is reduced: the descriptions that the
// operators with and without scales share. problem_of() gives what the choice of an algorithm
// depends on, and run_...() executes the chosen one on the current stream.
namespace torch_overlap::ops {

struct MatmulAllReduce;  // ops.h

// out_i = all ranks' rows * rhs_i.
struct GatherProducts {
  std::string_view op;
  std::shared_ptr<TorchComm> comm;
  at::Tensor own;       // this rank's rows [rows, k], contiguous, the same shape on all ranks
  at::Tensor scales{};  // block scales of 8-bit `own` [rows, blocks], contiguous; or undefined
  // Receive the rows of all ranks, [size * rows, ...], contiguous; or undefined.
  at::Tensor gathered{};
  at::Tensor gathered_scales{};
  // The products of all rows. lhs.data is ignored, and so is lhs.scale_inv if scales are gathered.
  std::vector<GemmArgs> gemms{};
  // If set, called after the products with the rows of all ranks, [size * rows, k], which are valid
  // on the current stream until it returns: they may be in the channel's memory.
  std::function<void(const at::Tensor& rows)> use_rows{};
};
OverlapProblem problem_of(const GatherProducts& products);
// Checks the products of this rank's rows.
void check(const GatherProducts& products);
void run_gather(GatherProducts products, Algorithm algorithm);

// out = this rank's rows of the sum (or mean) over ranks of start + the sum of the products, plus
// bias.
struct ReduceScatterProducts {
  std::string_view op;
  std::shared_ptr<TorchComm> comm;
  std::vector<GemmArgs> gemms;  // the products of all rows; `out` is ignored
  // [rows of all ranks, columns], added to this rank's products; or undefined. Not with `fused`.
  at::Tensor start{};
  at::Tensor bias{};  // added after the reduction; or undefined
  bool mean = false;
  at::Tensor out;  // [rows, columns], contiguous
  // See ReduceScatterGemm.
  bool ranks_share_k = true;
  // The number of rows of each rank is a multiple of it.
  int64_t row_unit = 1;
  // If set, called once on the current stream for work that does not depend on `out`. It hides the
  // last transfers of `p2p` and `pipelined`; other algorithms call it after the reduction.
  std::function<void()> meanwhile{};
};
OverlapProblem problem_of(const ReduceScatterProducts& products);
// Checks the product of this rank's rows.
void check(const ReduceScatterProducts& products);
void run_reduce_scatter(ReduceScatterProducts products, Algorithm algorithm);
// The gradient's "bulk": one product for all rows. `before_reduction` is called after it, and the
// reduction runs concurrently with the GEMMs `concurrent`. A sum without bias.
void run_bulk(const ReduceScatterProducts& products, const std::function<void()>& before_reduction,
              const std::vector<GemmArgs>& concurrent);

// out = the sum (or mean) over ranks of the product, plus bias, on every rank.
struct AllReduceProduct {
  std::string_view op;
  std::shared_ptr<TorchComm> comm;
  GemmArgs gemm;    // the product of all rows; `out` is ignored
  at::Tensor bias;  // this rank's bias, added to every row of `out` after the reduction
  bool mean = false;
  at::Tensor out;  // [rows, columns], contiguous
  // The rows of every partial product are a multiple of it, as all rows are.
  int64_t row_unit = 1;
};
OverlapProblem problem_of(const AllReduceProduct& product);
// Returns the product of a call that writes to `out`, the result's memory.
AllReduceProduct product_of(const MatmulAllReduce& call, const std::shared_ptr<TorchComm>& comm,
                            const at::Tensor& out);
void check(const AllReduceProduct& product);
void run_all_reduce(const AllReduceProduct& product, Algorithm algorithm);

// Number of pieces of a pipelined all-reduce: each travels while the next one is computed.
inline constexpr int64_t kNumAllReduceChunks = 4;
// Number of blocks of a reduction that runs concurrently with a product.
inline constexpr int kBulkBlocks = 16;

// Gathers all ranks' rows in the background.
class ChannelGather {
 public:
  // `algorithm`: pipelined gathers through the communicator, any other over the gather channel.
  ChannelGather(std::string_view op, const std::shared_ptr<TorchComm>& comm, const at::Tensor& own,
                Algorithm algorithm = Algorithm::p2p)
      : ChannelGather(op, comm, own, {own.size(0) * comm->size(), comm->size()}, true, algorithm) {}
  // `partition`: split of all rows among the ranks. Without `with_own`, rows() has only other
  // ranks' rows.
  ChannelGather(std::string_view op, const std::shared_ptr<TorchComm>& comm, const at::Tensor& own,
                const RowPartition& partition, bool with_own, Algorithm algorithm = Algorithm::p2p);
  // Valid after finish(), for the lifetime of this object.
  const at::Tensor& rows() const { return rows_; }
  void finish() { gather_->finish(); }

 private:
  std::shared_ptr<OverlapChannel> channel_;
  std::optional<OverlapChannel::Use> use_;
  at::Tensor rows_;
  std::optional<BackgroundGather> gather_;
};

// Returns the bytes of the gather channel for these rows of one rank, and of the reduce-scatter
// channel for the products of all rows; never 0.
int64_t gather_bytes(const TorchComm& comm, const at::Tensor& own, const at::Tensor& scales = {});
int64_t reduce_scatter_bytes(const TorchComm& comm, int64_t rows, int64_t columns,
                             at::ScalarType dtype, int64_t row_unit = 1);

// Returns the types of the fused kernels of a product with results of type `out`.
FusedTypes fused_types(const GemmArgs& args, at::ScalarType lhs, at::ScalarType out);

// "low_latency": sums products where the ranks wrote them.
int64_t low_latency_bytes(const TorchComm& comm, int64_t rows, int64_t columns,
                          at::ScalarType dtype);
void run_low_latency_on_channel(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                                const ReduceGemm& problem);

}  // namespace torch_overlap::ops
