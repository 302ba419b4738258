#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/gemm/sm90/tensor_maps.h"
#include "torch_overlap/overlap/cuda/fused.h"
#include "torch_overlap/overlap/cuda/fused_host.h"
#include "torch_overlap/overlap/cuda/fused_operands.h"
#include "torch_overlap/overlap/cuda/low_latency_host.h"
#include "torch_overlap/overlap/cuda/resident_grid.h"

namespace torch_overlap::cuda {
namespace {

constexpr int kPieceRows = 64;  // Rows of outputs that are loaded or stored at a time.

// Link bandwidth if all SMs store to peers.
constexpr double kLinkBytesPerNs = 350;

// Work of the blocks of the kernel that sends its tiles; times in ns. kStageNs is the best case on
// H200.
struct TilesToSend {
  double product;      // Time of a tile's product.
  double links;        // Time in which the links transfer a tile of every block.
  int64_t of_others;   // Tiles that the busiest block computes for other ranks.
  int64_t all;         // Tiles that the busiest block computes.
  double part_at_end;  // Fraction of the blocks that have the last tiles for other ranks.

  // A block has memory for one tile in flight, so it sends one while it computes the next. Its own
  // tiles come after the last ones that the other ranks send. A tile takes longer than in the best
  // case if all SMs multiply; without kSlowdownFactor, the model would choose slower tiles.
  double time(int ranks) const {
    constexpr double kSlowdownFactor = 7.0 / 6;
    constexpr double kFlagNs = 3000;
    constexpr double kAddNs = 1500;
    const double tile = kSlowdownFactor * product;
    const double sent = tile + static_cast<double>(of_others - 1) * std::max(tile, links) +
                        part_at_end * links + kFlagNs;
    return std::max(sent, static_cast<double>(all) * tile) + (ranks - 1) * kAddNs;
  }
};

TilesToSend tiles_to_send(int64_t stages, const KernelInfo& kernel, double cost, int64_t element,
                          int64_t blocks, int64_t of_chunk, int ranks) {
  const double outputs = static_cast<double>(kernel.rows) * kernel.columns;
  const int64_t others = of_chunk * (ranks - 1);
  const int64_t rounds = std::max<int64_t>(1, ceil_div(others, blocks));
  return {.product = static_cast<double>(stages) * kStageNs * cost * outputs / kOutputsPerTile,
          .links = outputs * static_cast<double>(element * blocks) / kLinkBytesPerNs,
          .of_others = rounds,
          .all = ceil_div(of_chunk * ranks, blocks),
          .part_at_end =
              static_cast<double>(others - (rounds - 1) * blocks) / static_cast<double>(blocks)};
}

struct Pace {
  uint32_t between_tiles;
  uint32_t before_own;
};

// Stores that wait for a link delay the loads of the products. If the next tile is for another
// rank, the stores are spread over most of its time, of which only an estimate is known. If own
// tiles are next, they are no faster than the links can transfer the tiles of all blocks that still
// send. If there is only one own tile, it will wait for the tiles of the peers: they are not paced,
// except with two ranks, which send each other so little that it need not wait. If the busiest
// block has no own tile, they are not paced.
Pace choose_pace(const TilesToSend& tiles, const KernelInfo& kernel, int ranks) {
  constexpr double kPart = 0.9;
  const double of_warp =
      kMovers * static_cast<double>(kPacedRows * 64) / (kernel.rows * kernel.columns);
  const auto over_a_tile = static_cast<uint32_t>(of_warp * kPart * tiles.product);
  const auto as_links = static_cast<uint32_t>(of_warp * tiles.part_at_end * tiles.links);
  const int64_t own = tiles.all - tiles.of_others;
  const uint32_t before_one = ranks == 2 ? over_a_tile : 0;
  return {.between_tiles = over_a_tile,
          .before_own = own == 0   ? 0
                        : own == 1 ? before_one
                                   : as_links};
}

// Computes this rank's rows and adds the rows that arrived from the peers.
void run_fused_reduce_scatter_sum(CudaTransport& transport, const FusedReduceScatter& problem,
                                  const at::Tensor& out) {
  const int rank = transport.words().rank;
  const RowPartition& rows = problem.rows;
  const int64_t length = rows.length(rank);
  if (length == 0) return;
  const int64_t n = out.size(1);
  const ResidentGrid grid(sm_count(out.device()));
  const Operands operands =
      operands_of(problem.gemm, plain_lhs(problem.gemm.lhs), out.scalar_type());
  const KernelInfo& kernel = choose_kernel(
      find_fused_reduce_scatter_sum, key_of(operands),
      [&](const TileCost& tile, const KernelInfo& found) {
        return static_cast<double>(grid.waves(found, num_units(found, length, n))) * tile.time();
      });
  FusedReduceScatterSumParams params{};
  params.gemm = gemm_params(problem.gemm, operands, kernel);
  params.gemm.out = sm90::make_tensor_map(out, sm90::kWarpRows);
  params.gemm.m = static_cast<int>(length);
  params.piece_rows = static_cast<int>(problem.piece_rows());
  TORCH_OVERLAP_CHECK(problem.piece_rows() * kMaxPieces >= rows.largest(), kRuntime,
                      "product and reduce-scatter: expected at most ", kMaxPieces,
                      " pieces of the rows of a rank, got ", problem.pieces);
  params.gemm.row_group =
      std::max(1, std::min(kRowGroup, params.piece_rows / kernel.rows) / kernel.cluster);
  params.flag_words = static_cast<int>(transport.flag(rank, rows.size) - transport.flag(rank, 0));
  const int64_t slot = rows.largest() * n * static_cast<int64_t>(out.element_size());
  // The previous rank is the first to send to this one.
  for (int i = 1; i < rows.size; ++i) {
    const int source = (rank + rows.size - i) % rows.size;
    params.from[params.sources] =
        sm90::make_tensor_map(transport.data(rank, problem.at + source * slot), out.scalar_type(),
                              length, n, n, sm90::kAddendRows);
    params.notified[params.sources] = transport.flag(rank, source);
    params.ranks[params.sources++] = source;
  }
  params.factor = static_cast<float>(problem.factor);
  params.words = transport.words();
  params.control = transport.control();
  const auto stream = c10::cuda::getCurrentCUDAStream(out.device().index());
  check(grid.start(launch_fused_reduce_scatter_sum, kernel, params, num_units(kernel, length, n),
                   stream),
        "product and sums of a reduce-scatter");
}

}  // namespace

int num_reduce_scatter_pieces(const FusedReduceScatter& problem, int most, int sms) {
  // Minimum number of bytes that a rank sends. Less is faster by the kernel, which sends from its
  // first tile on.
  constexpr int64_t kMinBytes = int64_t{16} << 20;
  // Minimum number of outputs of a piece, so that its product keeps all SMs busy.
  constexpr int64_t kMinPieceOutputs = int64_t{120} * 128 * 256;
  // Maximum number: more pieces make smaller, and slower, products.
  constexpr int64_t kPieces = 2;
  const int64_t outputs = problem.rows.largest() * problem.out.size(1);
  const int64_t sent = outputs * (problem.rows.size - 1);
  const int64_t bytes = sent * static_cast<int64_t>(problem.out.element_size());
  const auto k = static_cast<double>(gemm_shape(problem.gemm).k);
  const auto element = static_cast<double>(problem.gemm.rhs.data.element_size());
  const double product =
      static_cast<double>(sent) / kOutputsPerTile * k * element / kStageBytes * kStageNs / sms;
  // The stores of the kernel overlap with the products of other ranks' rows.
  const bool are_hidden =
      problem.ranks_share_k && static_cast<double>(bytes) / kLinkBytesPerNs < product;
  if (bytes < kMinBytes || are_hidden) return 0;
  return static_cast<int>(std::clamp<int64_t>(outputs / kMinPieceOutputs, 1,
                                              std::min<int64_t>({kPieces, kMaxPieces, most})));
}

void run_fused(CudaTransport& transport, const FusedReduceScatter& problem) {
  const int rank = transport.words().rank;
  const RowPartition& rows = problem.rows;
  const auto device = problem.out.device();
  const auto dtype = problem.out.scalar_type();
  const at::Tensor out = mappable_out(problem.out);
  if (problem.pieces > 0) {
    run_fused_reduce_scatter_sum(transport, problem, out);
    if (!out.is_same(problem.out)) problem.out.copy_(out);
    return;
  }
  const Operands operands = operands_of(problem.gemm, plain_lhs(problem.gemm.lhs), dtype);
  const int64_t n = operands.rhs.size(operands.is_rhs_k_major ? 0 : 1);
  const ResidentGrid grid(sm_count(device));
  const auto tiles_of_chunk = [&](const KernelInfo& kernel) {
    return ceil_div(rows.largest(), kernel.rows) * ceil_div(n, kernel.columns);
  };
  const auto units = [&](const KernelInfo& kernel) { return rows.size * tiles_of_chunk(kernel); };
  const auto to_send = [&](const KernelInfo& kernel, double cost) {
    return tiles_to_send(ceil_div(operands.lhs.size(1), kernel.depth), kernel, cost,
                         static_cast<int64_t>(out.element_size()),
                         grid.num_blocks(kernel, units(kernel)), tiles_of_chunk(kernel), rows.size);
  };
  const KernelInfo& kernel =
      choose_kernel(find_fused_reduce_scatter, key_of(operands),
                    [&](const TileCost& tile, const KernelInfo& found) {
                      // All ranks must choose the same tile, since each tile has a flag; therefore
                      // the choice depends only on values that they share. Two ranks choose by
                      // waves, like ranks whose k may differ: small tiles cost more there than this
                      // model estimates.
                      const bool is_known = problem.ranks_share_k && rows.size > 2;
                      if (is_known) return to_send(found, tile.cost).time(rows.size);
                      return static_cast<double>(grid.waves(found, units(found))) * tile.time();
                    });
  FusedReduceScatterParams params{};
  params.gemm = gemm_params(problem.gemm, operands, kernel);
  params.gemm.row_group = kRowGroup;
  const int64_t slot = rows.largest() * n * static_cast<int64_t>(out.element_size());
  for (int chunk = 0; chunk < rows.size; ++chunk) {
    const int64_t length = rows.length(chunk);
    params.first[chunk] = static_cast<int>(rows.begin(chunk));
    params.rows[chunk] = static_cast<int>(length);
    params.peer_flags[chunk] = transport.tile_flags(chunk, rank);
    params.notified[chunk] = transport.tile_flags(rank, chunk);
    if (chunk == rank) {
      params.out = rows_map(out, kPieceRows);
      continue;
    }
    params.to[chunk] = transport.data(chunk, problem.at + rank * slot);
    if (rows.length(rank) == 0) continue;
    params.from[chunk] = sm90::make_tensor_map(transport.data(rank, problem.at + chunk * slot),
                                               dtype, rows.length(rank), n, n, kPieceRows);
  }
  params.max_row_tiles = static_cast<int>(ceil_div(rows.largest(), kernel.rows));
  params.factor = static_cast<float>(problem.factor);
  params.operation = operation_of(
      transport, {.rows = rows.rows, .signature = OpSignature::kernel(kernel.columns)});
  params.entry_flags = entry_flags(transport);
  const Pace pace = choose_pace(to_send(kernel, 1), kernel, rows.size);
  params.pace_ns = pace.between_tiles;
  params.last_pace_ns = pace.before_own;
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  check(grid.start(launch_fused_reduce_scatter, kernel, params, units(kernel), stream),
        "fused product and reduce-scatter");
  if (!out.is_same(problem.out)) problem.out.copy_(out);
}

}  // namespace torch_overlap::cuda
