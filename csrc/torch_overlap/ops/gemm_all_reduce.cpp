#include "torch_overlap/ops/gemm_all_reduce.h"

#include <ATen/ops/add.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "torch_overlap/common/views.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/overlap/execute_common.h"

namespace torch_overlap::ops {
namespace {

// Returns the number of blocks of rows over channels. Each block has some waves of tiles, and there
// are few blocks, because each one has a fixed cost.
int64_t block_count(int64_t rows, int64_t features) {
  constexpr int64_t kMinElementsPerBlock = int64_t{1} << 24;
  constexpr int64_t kMaxBlocks = 4;
  return std::clamp<int64_t>(rows * features / kMinElementsPerBlock, 1, kMaxBlocks);
}

// Blocks of rows: the sums of each block are computed at their owners, and then gathered on all
// ranks while the products of the next block run. Among reductions of 8- and 16-bit floats this one
// accumulates in fp32, in rank order.
class BlockwiseGemmAllReduce {
 public:
  explicit BlockwiseGemmAllReduce(const GemmAllReduce& problem) : problem_(problem) {}

  void run(bool fused) {
    const auto& comm = problem_.comm;
    const auto& out = problem_.out;
    for (const RowRange& block :
         row_chunks(out.size(0), block_count(out.size(0), out.size(1)), problem_.row_unit)) {
      const auto rows = row_view(out, block.begin, block.length);
      const RowShare share{block.length, comm->size(), problem_.row_unit};
      const auto own = rows_of_rank(rows, share, comm->rank());
      channel_scatter_gemms(problem_.op, comm, {problem_.arguments(block)},
                            {.start = {},
                             .bias = {},
                             .mean = problem_.mean,
                             .out = own,
                             .fused = fused,
                             .row_unit = problem_.row_unit});
      finish_gather();
      in_flight_ = Block{rows, share};
      gather_.emplace(problem_.op, comm, own, share, /*with_own=*/false);
    }
    finish_gather();
  }

 private:
  struct Block {
    at::Tensor rows;
    RowShare share;
  };

  // Copies the gathered rows to their place in the result.
  void finish_gather() {
    if (!gather_) return;
    gather_->finish();
    const auto& [rows, share] = in_flight_;
    const int rank = problem_.comm->rank();
    const int64_t begin = share.begin(rank);
    const int64_t end = begin + share.length(rank);
    for (const auto& [first, last] : {std::pair(int64_t{0}, begin), std::pair(end, share.rows)}) {
      if (last > first)
        copy_with_bias(row_view(rows, first, last - first),
                       row_view(gather_->rows(), first, last - first));
    }
    // Every rank adds its own bias, as in the other algorithms: to its rows, after all ranks
    // received them.
    if (problem_.bias.defined()) rows_of_rank(rows, share, rank).add_(problem_.bias);
    gather_.reset();
  }

  void copy_with_bias(at::Tensor to, const at::Tensor& from) const {
    if (problem_.bias.defined()) {
      at::add_out(to, from, problem_.bias);
    } else {
      to.copy_(from);
    }
  }

  const GemmAllReduce& problem_;
  Block in_flight_;
  std::optional<ChannelGather> gather_;
};

ReduceProduct whole_gemm(const GemmAllReduce& problem) {
  return {.product = problem.arguments({0, problem.out.size(0)}),
          .rows = problem.out.size(0),
          .bias = problem.bias,
          .mean = problem.mean,
          .everywhere = true,
          .out = problem.out};
}

void run_in_pieces(const GemmAllReduce& problem, RedOpType reduction) {
  const auto chunks = row_chunks(problem.out.size(0), kNumAllReduceChunks, problem.row_unit);
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const auto chunk = row_view(problem.out, chunks[i].begin, chunks[i].length);
    {
      const ProfilerRange span("chunk_gemm", i);
      problem.multiply(chunks[i], chunk);
    }
    const ProfilerRange span("chunk_comm", i);
    works.push_back(problem.comm->all_reduce(chunk, reduction, /*async_op=*/true));
  }
  for (size_t i = 0; i < works.size(); ++i) {
    const ProfilerRange span("chunk_wait", i);
    works[i]->wait();
  }
}

}  // namespace

OverlapProblem gemm_all_reduce_problem(std::string_view op, const TorchComm& comm, int64_t rows,
                                       int64_t features, int64_t local_k, at::ScalarType dtype,
                                       int64_t row_unit) {
  const auto blocks = static_cast<int>(block_count(rows, features));
  const int64_t block = RowShare{rows, blocks, row_unit}.largest();
  return {.op = op,
          .dtype = dtype,
          .m = rows,
          .n = features,
          .k = local_k * comm.size(),
          .chunk_rows = rows / kNumAllReduceChunks,
          .gather_bytes = std::max<int64_t>(
              block * features * static_cast<int64_t>(c10::elementSize(dtype)), 1),
          .scatter_bytes = scatter_bytes(comm, block, features, dtype, row_unit),
          .local_n = features,
          .local_k = local_k,
          .local_m = block,
          .low_latency_bytes = low_latency_bytes(comm, rows, features, dtype),
          .is_all_reduce = true,
          .prefers_channels = false};
}

void run_gemm_all_reduce(const GemmAllReduce& problem, Algorithm algorithm) {
  const RedOpType reduction = problem.mean ? RedOpType::AVG : RedOpType::SUM;
  switch (algorithm) {
    case Algorithm::p2p:
      return BlockwiseGemmAllReduce(problem).run(false);
    case Algorithm::fused:
      if (try_fused_all_reduce_gemm(problem.op, problem.comm, whole_gemm(problem))) return;
      return BlockwiseGemmAllReduce(problem).run(true);
    case Algorithm::low_latency:
      return low_latency_sum_gemm(problem.op, problem.comm, whole_gemm(problem));
    case Algorithm::sequential:
      problem.multiply({0, problem.out.size(0)}, problem.out);
      problem.comm->all_reduce(problem.out, reduction, /*async_op=*/false);
      break;
    default:
      run_in_pieces(problem, reduction);
  }
  if (problem.bias.defined()) problem.out.add_(problem.bias);
}

}  // namespace torch_overlap::ops
