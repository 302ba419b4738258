#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/gemm/sm90/maps.h"
#include "torch_overlap/overlap/cuda/direct_host.h"
#include "torch_overlap/overlap/cuda/fused.h"
#include "torch_overlap/overlap/cuda/fused_host.h"
#include "torch_overlap/overlap/cuda/fused_operands.h"

namespace torch_overlap::cuda {
namespace {

constexpr int kPieceRows = 64;  // of outputs that are loaded, and stored, at a time

// The blocks of a kernel that waits for what other ranks compute. They leave two SMs, on which a
// cluster of two fits: what other streams have goes on there, one block or cluster after the other.
// Else a kernel there that waits for ranks, too, might never come to run, and on another rank,
// where it came first, hold all SMs that the products of this operation need.
struct BlocksBesideOthers {
  explicit BlocksBesideOthers(c10::Device device) : sms(sm_count(device)) {}

  // In pairs, so that the SMs that are left are pairs, too; one of them may have no tile.
  static int cluster_of(const KernelInfo& kernel) { return std::max(kernel.cluster, 2); }
  int most(const KernelInfo& kernel) const {
    const int cluster = cluster_of(kernel);
    return std::max(1, sms / cluster - 1) * cluster;
  }
  int of(const KernelInfo& kernel, int64_t units) const {
    const int cluster = cluster_of(kernel);
    const int64_t needed = ceil_div(units * kernel.cluster, cluster) * cluster;
    return static_cast<int>(std::min<int64_t>(needed, most(kernel)));
  }
  int64_t waves(const KernelInfo& kernel, int64_t units) const {
    return ceil_div(units * kernel.cluster, most(kernel));
  }
  template <typename Params>
  using Launch = cudaError_t (*)(const KernelInfo&, const Params&, int, cudaStream_t);
  template <typename Params>
  cudaError_t start(Launch<Params> launch, KernelInfo kernel, const Params& params, int64_t units,
                    cudaStream_t stream) const {
    const int blocks = of(kernel, units);
    kernel.cluster = cluster_of(kernel);
    return launch(kernel, params, blocks, stream);
  }

  const int sms;
};

// What links take of SMs that all store to them.
constexpr double kLinkBytesPerNs = 350;

struct Pace {
  uint32_t between_tiles;
  uint32_t before_own;
};

// Never faster than links take what all that send do: what waits for a link is in the way of what
// the products load. Where the next tile is another rank's, over the larger part of the time that
// it takes, which is not known: kStageNs is what H200s take at the best.
Pace pace_of(int64_t stages, const KernelInfo& kernel, int64_t element, int64_t senders) {
  constexpr double kPart = 0.9;
  const double parts = static_cast<double>(kernel.rows) * kernel.columns / (kPacedRows * 64);
  const double tile =
      static_cast<double>(stages) * kStageNs * kernel.rows * kernel.columns / kOutputsOfTile;
  const double of_link = kPacedRows * 64 * static_cast<double>(element * senders) / kLinkBytesPerNs;
  return {.between_tiles = static_cast<uint32_t>(kMovers * std::max(kPart * tile / parts, of_link)),
          .before_own = static_cast<uint32_t>(kMovers * of_link)};
}

// The own rows, with what has come for them.
void run_fused_sum(CudaTransport& transport, const FusedScatter& problem, const at::Tensor& out) {
  const int rank = transport.words().rank;
  const RowShare& rows = problem.rows;
  const int64_t length = rows.length(rank);
  if (length == 0) return;
  const int64_t n = out.size(1);
  const BlocksBesideOthers beside(out.device());
  const Operands operands =
      operands_of(problem.gemm, plain_lhs(problem.gemm.lhs), out.scalar_type());
  const KernelInfo& kernel = choose_kernel(
      find_fused_sum, key_of(operands), [&](const TimedTile& tile, const KernelInfo& found) {
        return static_cast<double>(beside.waves(found, units_of(found, length, n))) * tile.time();
      });
  FusedSumParams params{};
  params.gemm = gemm_params(problem.gemm, operands, kernel);
  params.gemm.out = sm90::matrix_map(out, sm90::kWarpRows);
  params.gemm.m = static_cast<int>(length);
  params.piece_rows = static_cast<int>(problem.piece_rows());
  TORCH_OVERLAP_CHECK(problem.piece_rows() * kMostPieces >= rows.largest(), kRuntime,
                      "product and reduce-scatter: expected at most ", kMostPieces,
                      " pieces of the rows of a rank, got ", problem.pieces);
  params.gemm.row_group =
      std::max(1, std::min(kRowGroup, params.piece_rows / kernel.rows) / kernel.cluster);
  params.flag_words = static_cast<int>(transport.flag(rank, rows.size) - transport.flag(rank, 0));
  const int64_t slot = rows.largest() * n * static_cast<int64_t>(out.element_size());
  // The one before this rank has sent to it first.
  for (int i = 1; i < rows.size; ++i) {
    const int source = (rank + rows.size - i) % rows.size;
    params.from[params.sources] = sm90::matrix_map(transport.data(rank, problem.at + source * slot),
                                                   out.scalar_type(), length, n, n, kPieceRows);
    params.told[params.sources] = transport.flag(rank, source);
    params.ranks[params.sources++] = source;
  }
  params.factor = static_cast<float>(problem.factor);
  params.words = transport.words();
  params.control = transport.control();
  const auto stream = c10::cuda::getCurrentCUDAStream(out.device().index());
  check(beside.start(launch_fused_sum, kernel, params, units_of(kernel, length, n), stream),
        "product and sums of a reduce-scatter");
}

}  // namespace

int scatter_pieces(const FusedScatter& problem, int most, int sms) {
  // Of what a rank sends. Less takes less time by the kernel, which begins with the first tiles.
  constexpr int64_t kLeastBytes = int64_t{16} << 20;
  // Of a piece, so that its product keeps all SMs busy.
  constexpr int64_t kLeastOutputs = int64_t{120} * 128 * 256;
  // More were not quicker: smaller products are slower ones.
  constexpr int64_t kPieces = 2;
  const int64_t outputs = problem.rows.largest() * problem.out.size(1);
  const int64_t sent = outputs * (problem.rows.size - 1);
  const int64_t bytes = sent * static_cast<int64_t>(problem.out.element_size());
  const auto k = static_cast<double>(gemm_shape(problem.gemm).k);
  const double element = problem.gemm.rhs.data.element_size();
  const double product =
      static_cast<double>(sent) / kOutputsOfTile * k * element / kStageBytes * kStageNs / sms;
  // The stores of the kernel have the time of the products of other ranks' rows.
  const bool are_hidden =
      problem.ranks_share_k && static_cast<double>(bytes) / kLinkBytesPerNs < product;
  if (bytes < kLeastBytes || are_hidden) return 0;
  return static_cast<int>(std::clamp<int64_t>(outputs / kLeastOutputs, 1,
                                              std::min<int64_t>({kPieces, kMostPieces, most})));
}

void run_fused(CudaTransport& transport, const FusedScatter& problem) {
  const int rank = transport.words().rank;
  const RowShare& rows = problem.rows;
  const auto device = problem.out.device();
  const auto dtype = problem.out.scalar_type();
  const at::Tensor out = mappable_out(problem.out);
  if (problem.pieces > 0) {
    run_fused_sum(transport, problem, out);
    if (!out.is_same(problem.out)) problem.out.copy_(out);
    return;
  }
  const Operands operands = operands_of(problem.gemm, plain_lhs(problem.gemm.lhs), dtype);
  const int64_t n = operands.rhs.size(operands.rhs_along_k ? 0 : 1);
  const BlocksBesideOthers beside(device);
  const auto tiles_of_chunk = [&](const KernelInfo& kernel) {
    return ceil_div(rows.largest(), kernel.rows) * ceil_div(n, kernel.columns);
  };
  const auto units = [&](const KernelInfo& kernel) { return rows.size * tiles_of_chunk(kernel); };
  const KernelInfo& kernel = choose_kernel(
      find_fused_scatter, key_of(operands), [&](const TimedTile& tile, const KernelInfo& found) {
        return static_cast<double>(beside.waves(found, units(found))) * tile.time();
      });
  FusedScatterParams params{};
  params.gemm = gemm_params(problem.gemm, operands, kernel);
  params.gemm.row_group = kRowGroup;
  const int64_t slot = rows.largest() * n * static_cast<int64_t>(out.element_size());
  const WordOfAll begin_of_all = transport.begun_of_all();
  for (int chunk = 0; chunk < rows.size; ++chunk) {
    const int64_t length = rows.length(chunk);
    params.first[chunk] = static_cast<int>(rows.begin(chunk));
    params.rows[chunk] = static_cast<int>(length);
    params.tell[chunk] = transport.tile_word(chunk, rank);
    params.told[chunk] = transport.tile_word(rank, chunk);
    params.begin[chunk] = begin_of_all.at[chunk];
    params.begun[chunk] = transport.begun_by(chunk);
    if (chunk == rank) {
      params.out = rows_map(out, kPieceRows);
      continue;
    }
    params.to[chunk] = transport.data(chunk, problem.at + rank * slot);
    if (rows.length(rank) == 0) continue;
    params.from[chunk] = sm90::matrix_map(transport.data(rank, problem.at + chunk * slot), dtype,
                                          rows.length(rank), n, n, kPieceRows);
  }
  params.most_row_tiles = static_cast<int>(ceil_div(rows.largest(), kernel.rows));
  params.factor = static_cast<float>(problem.factor);
  params.operation = operation_of(transport, rows.rows);
  const int64_t blocks = beside.of(kernel, units(kernel));
  const Pace pace = pace_of(ceil_div(params.gemm.k, kernel.depth), kernel, out.element_size(),
                            std::min<int64_t>(blocks, units(kernel) - tiles_of_chunk(kernel)));
  params.pace_ns = pace.between_tiles;
  params.last_pace_ns = pace.before_own;
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  check(beside.start(launch_fused_scatter, kernel, params, units(kernel), stream),
        "fused product and reduce-scatter");
  if (!out.is_same(problem.out)) problem.out.copy_(out);
}

}  // namespace torch_overlap::cuda
