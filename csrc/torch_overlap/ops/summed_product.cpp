#include "torch_overlap/ops/summed_product.h"

#include <ATen/ops/add.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "torch_overlap/common/views.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/overlap/execute_parts.h"

namespace torch_overlap::ops {
namespace {

// Into how many blocks of rows channels cut it: of some waves of tiles each, and few, as a product
// pays for each block.
int64_t block_count(int64_t rows, int64_t features) {
  constexpr int64_t kElements = int64_t{1} << 24;
  constexpr int64_t kMost = 4;
  return std::clamp<int64_t>(rows * features / kElements, 1, kMost);
}

// Blocks of rows: the sums of each at their owners, then all of them everywhere beside the products
// of the next block. Of reductions of 8- and 16-bit floats this is the one that accumulates in
// fp32, in rank order.
class Blockwise {
 public:
  explicit Blockwise(const SummedProduct& problem) : problem_(problem) {}

  void run(bool fused) {
    const auto& comm = problem_.comm;
    const auto& out = problem_.out;
    for (const RowRange& block :
         row_chunks(out.size(0), block_count(out.size(0), out.size(1)), problem_.row_unit)) {
      const auto rows = row_view(out, block.begin, block.length);
      const RowShare share{block.length, comm->size(), problem_.row_unit};
      const auto own = rows_of_rank(rows, share, comm->rank());
      ring_scatter_gemms(problem_.op, comm, {problem_.arguments(block)},
                         {.start = {},
                          .bias = {},
                          .mean = problem_.mean,
                          .out = own,
                          .fused = fused,
                          .row_unit = problem_.row_unit});
      take();
      under_way_ = Block{rows, share};
      gather_.emplace(problem_.op, comm, own, share, /*with_own=*/false);
    }
    take();
  }

 private:
  struct Block {
    at::Tensor rows;
    RowShare share;
  };

  // What was gathered goes where it belongs.
  void take() {
    if (!gather_) return;
    gather_->finish();
    const auto& [rows, share] = under_way_;
    const int rank = problem_.comm->rank();
    const int64_t begin = share.begin(rank);
    const int64_t end = begin + share.length(rank);
    for (const auto& [first, last] : {std::pair(int64_t{0}, begin), std::pair(end, share.rows)}) {
      if (last > first)
        put(row_view(rows, first, last - first), row_view(gather_->rows(), first, last - first));
    }
    // Every rank adds its own bias, as in the other algorithms: to its rows when all have got them.
    if (problem_.bias.defined()) rows_of_rank(rows, share, rank).add_(problem_.bias);
    gather_.reset();
  }

  void put(at::Tensor to, const at::Tensor& from) const {
    if (problem_.bias.defined()) {
      at::add_out(to, from, problem_.bias);
    } else {
      to.copy_(from);
    }
  }

  const SummedProduct& problem_;
  Block under_way_;
  std::optional<ChannelGather> gather_;
};

DirectProduct whole_product(const SummedProduct& problem) {
  return {.product = problem.arguments({0, problem.out.size(0)}),
          .rows = problem.out.size(0),
          .bias = problem.bias,
          .mean = problem.mean,
          .everywhere = true,
          .out = problem.out};
}

void run_in_pieces(const SummedProduct& problem, RedOpType reduction) {
  const auto chunks = row_chunks(problem.out.size(0), kAllReduceChunks, problem.row_unit);
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const auto chunk = row_view(problem.out, chunks[i].begin, chunks[i].length);
    {
      const Span span("chunk_gemm", i);
      problem.multiply(chunks[i], chunk);
    }
    const Span span("chunk_comm", i);
    works.push_back(problem.comm->all_reduce(chunk, reduction, /*async_op=*/true));
  }
  for (size_t i = 0; i < works.size(); ++i) {
    const Span span("chunk_wait", i);
    works[i]->wait();
  }
}

}  // namespace

OverlapProblem summed_product_problem(std::string_view op, const TorchComm& comm, int64_t rows,
                                      int64_t features, int64_t local_k, at::ScalarType dtype,
                                      int64_t row_unit) {
  const auto blocks = static_cast<int>(block_count(rows, features));
  const int64_t block = RowShare{rows, blocks, row_unit}.largest();
  return {.op = op,
          .dtype = dtype,
          .m = rows,
          .n = features,
          .k = local_k * comm.size(),
          .chunk_rows = rows / kAllReduceChunks,
          .gather_bytes = std::max<int64_t>(
              block * features * static_cast<int64_t>(c10::elementSize(dtype)), 1),
          .scatter_bytes = scatter_bytes(comm, block, features, dtype, row_unit),
          .local_n = features,
          .local_k = local_k,
          .local_m = block,
          .direct_bytes = direct_bytes(comm, rows, features, dtype),
          .reduces = true,
          .prefers_channels = false};
}

void run_summed_product(const SummedProduct& problem, Algorithm algorithm) {
  const RedOpType reduction = problem.mean ? RedOpType::AVG : RedOpType::SUM;
  switch (algorithm) {
    case Algorithm::ring:
      return Blockwise(problem).run(false);
    case Algorithm::fused:
      if (fused_reduce_gemm(problem.op, problem.comm, whole_product(problem))) return;
      return Blockwise(problem).run(true);
    case Algorithm::direct:
      return direct_sum_gemm(problem.op, problem.comm, whole_product(problem));
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
