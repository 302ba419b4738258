#include <ATen/ops/add.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "torch_overlap/common/views.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/rows.h"
#include "torch_overlap/overlap/execute_common.h"
#include "torch_overlap/overlap/op_channels.h"

// The algorithms of AllReduceProduct.
namespace torch_overlap::ops {
namespace {

// Returns the number of blocks of rows over channels. Each block has some waves of tiles, and there
// are few blocks, because each one has a fixed cost.
int64_t block_count(int64_t rows, int64_t features) {
  constexpr int64_t kMinElementsPerBlock = int64_t{1} << 24;
  constexpr int64_t kMaxBlocks = 4;
  return std::clamp<int64_t>(rows * features / kMinElementsPerBlock, 1, kMaxBlocks);
}

// The product of some rows.
GemmArgs product_of_rows(const AllReduceProduct& product, const IndexRange& rows,
                         const at::Tensor& out) {
  GemmArgs args = ops::product_of_rows(product.gemm, rows.begin, rows.length, out);
  args.overlaps_communication = rows.length < product.out.size(0);
  return args;
}

// Blocks of rows: the sums of each block are computed at their owners, and then gathered on all
// ranks while the products of the next block run. Among reductions of 8- and 16-bit floats this one
// accumulates in fp32, in rank order.
class BlockwiseReduction {
 public:
  explicit BlockwiseReduction(const AllReduceProduct& product) : product_(product) {}

  void run(Algorithm algorithm) {
    const auto& comm = product_.comm;
    const auto& out = product_.out;
    for (const IndexRange& block :
         row_chunks(out.size(0), block_count(out.size(0), out.size(1)), product_.row_unit)) {
      const auto rows = row_view(out, block.begin, block.length);
      const RowPartition partition{block.length, comm->size(), product_.row_unit};
      const auto own = rows_of_rank(rows, partition, comm->rank());
      run_reduce_scatter(ReduceScatterProducts{.op = product_.op,
                                               .comm = comm,
                                               .gemms = {product_of_rows(product_, block, rows)},
                                               .mean = product_.mean,
                                               .out = own,
                                               .row_unit = product_.row_unit},
                         algorithm);
      finish_gather();
      in_flight_ = Block{rows, partition};
      gather_.emplace(product_.op, comm, own, partition, /*with_own=*/false);
    }
    finish_gather();
  }

 private:
  struct Block {
    at::Tensor rows;
    RowPartition partition;
  };

  // Copies the gathered rows to their place in the result.
  void finish_gather() {
    if (!gather_) return;
    gather_->finish();
    const auto& [rows, partition] = in_flight_;
    const int rank = product_.comm->rank();
    const int64_t begin = partition.begin(rank);
    const int64_t end = begin + partition.length(rank);
    for (const auto& [first, last] :
         {std::pair(int64_t{0}, begin), std::pair(end, partition.rows)}) {
      if (last > first)
        copy_with_bias(row_view(rows, first, last - first),
                       row_view(gather_->rows(), first, last - first));
    }
    // Every rank adds its own bias, as in the other algorithms: to its rows, after all ranks
    // received them.
    if (product_.bias.defined()) rows_of_rank(rows, partition, rank).add_(product_.bias);
    gather_.reset();
  }

  void copy_with_bias(at::Tensor to, const at::Tensor& from) const {
    if (product_.bias.defined()) {
      at::add_out(to, from, product_.bias);
    } else {
      to.copy_(from);
    }
  }

  const AllReduceProduct& product_;
  Block in_flight_;
  std::optional<ChannelGather> gather_;
};

RedOpType reduction_of(const AllReduceProduct& product) {
  return product.mean ? RedOpType::AVG : RedOpType::SUM;
}

void add_bias(const AllReduceProduct& product) {
  if (product.bias.defined()) at::Tensor(product.out).add_(product.bias);
}

void multiply_then_reduce(const AllReduceProduct& product) {
  GemmArgs args = product.gemm;
  args.out = product.out;
  Product(product.op, std::move(args)).run();
  product.comm->all_reduce(product.out, reduction_of(product), /*async_op=*/false);
  add_bias(product);
}

void reduce_in_pieces(const AllReduceProduct& product) {
  const auto chunks = row_chunks(product.out.size(0), kNumAllReduceChunks, product.row_unit);
  std::vector<Product> products;  // checked before anything is sent
  for (const IndexRange& chunk : chunks) {
    products.emplace_back(
        product.op,
        product_of_rows(product, chunk, row_view(product.out, chunk.begin, chunk.length)));
  }
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < chunks.size(); ++i) {
    {
      const ProfilerRange span("chunk_gemm", i);
      products[i].run();
    }
    const ProfilerRange span("chunk_comm", i);
    works.push_back(
        product.comm->all_reduce(row_view(product.out, chunks[i].begin, chunks[i].length),
                                 reduction_of(product), /*async_op=*/true));
  }
  for (size_t i = 0; i < works.size(); ++i) {
    const ProfilerRange span("chunk_wait", i);
    works[i]->wait();
  }
  add_bias(product);
}

ReduceGemm reduce_gemm(const AllReduceProduct& product) {
  return {.gemm = product.gemm,
          .rows = {product.out.size(0), product.comm->size()},
          .is_all_reduce = true,
          .out = product.out,
          .factor = product.mean ? 1.0 / product.comm->size() : 1.0,
          .bias = contiguous_or_undefined(product.bias)};
}

}  // namespace

int64_t low_latency_bytes(const TorchComm& comm, int64_t rows, int64_t columns,
                          at::ScalarType dtype) {
  return std::max<int64_t>(
      low_latency_sum_bytes({rows, comm.size()},
                            columns * static_cast<int64_t>(c10::elementSize(dtype))),
      1);
}

void run_low_latency_on_channel(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                                const ReduceGemm& problem) {
  const auto bytes =
      low_latency_bytes(*comm, problem.rows.rows, problem.out.size(1), problem.out.scalar_type());
  run_low_latency_sum(op, *operator_channel(op, comm, OperatorChannel::low_latency, bytes),
                      problem);
}

OverlapProblem problem_of(const AllReduceProduct& product) {
  const TorchComm& comm = *product.comm;
  const int64_t rows = product.out.size(0);
  const int64_t features = product.out.size(1);
  const auto dtype = product.out.scalar_type();
  const int64_t local_k = gemm_shape(product.gemm).k;
  const auto blocks = static_cast<int>(block_count(rows, features));
  const int64_t block = RowPartition{rows, blocks, product.row_unit}.largest();
  return {
      .op = product.op,
      .dtype = dtype,
      .global_shape = GemmShape{rows, features, local_k * comm.size()},
      .chunk_rows = rows / kNumAllReduceChunks,
      // The channels hold the largest block.
      .gather_bytes =
          std::max<int64_t>(block * features * static_cast<int64_t>(c10::elementSize(dtype)), 1),
      .reduce_scatter_bytes = reduce_scatter_bytes(comm, block, features, dtype, product.row_unit),
      .fused = FusedProducts{.n = {features},
                             .k = local_k,
                             .rows = block,
                             .types = fused_types(product.gemm, product.gemm.lhs.data.scalar_type(),
                                                  dtype)},
      .low_latency = ChannelRequirement{OperatorChannel::low_latency,
                                        low_latency_bytes(comm, rows, features, dtype)},
      .is_all_reduce = true};
}

void check(const AllReduceProduct& product) {
  GemmArgs args = product.gemm;
  args.out = product.out;
  check_gemm(product.op, args);
}

void run_all_reduce(const AllReduceProduct& product, Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::sequential:
    case Algorithm::bulk:  // differs in the gradient only
      return multiply_then_reduce(product);
    case Algorithm::pipelined:
      return reduce_in_pieces(product);
    case Algorithm::p2p:
      return BlockwiseReduction(product).run(algorithm);
    case Algorithm::fused: {
      const int64_t bytes = fused_allreduce_bytes(problem_of(product), *product.comm);
      if (bytes == 0) return BlockwiseReduction(product).run(algorithm);
      const auto channel =
          operator_channel(product.op, product.comm, OperatorChannel::fused_all_reduce, bytes);
      return run_fused_all_reduce(product.op, *channel, reduce_gemm(product));
    }
    case Algorithm::low_latency:
      return run_low_latency_on_channel(product.op, product.comm, reduce_gemm(product));
  }
}

}  // namespace torch_overlap::ops
