#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/gemm/sm90/maps.h"
#include "torch_overlap/overlap/cuda/blocks.h"
#include "torch_overlap/overlap/cuda/direct_host.h"
#include "torch_overlap/overlap/cuda/fused.h"
#include "torch_overlap/overlap/cuda/fused_host.h"
#include "torch_overlap/overlap/cuda/fused_operands.h"

namespace torch_overlap::cuda {
namespace {

constexpr int kPieceRows = 64;  // of outputs that are loaded, and stored, at a time

// What links take of SMs that all store to them.
constexpr double kLinkBytesPerNs = 350;

// What the blocks of the kernel that sends its tiles have before them, in ns; kStageNs is what
// H200s take at the best.
struct TilesToSend {
  double product;      // of a tile
  double links;        // for a tile of every block
  int64_t of_others;   // tiles that the busiest block computes for other ranks
  int64_t all;         // tiles that it computes
  double part_at_end;  // of the blocks, that have the last of those for others

  // A block has room for one tile on its way, so it sends one while it computes the next. The own
  // tiles come behind those that the other ranks send last. A tile takes more than at the best
  // where all SMs multiply; by the best, small-down of four ranks would have the slower tile.
  double time(int ranks) const {
    constexpr double kOfBest = 7.0 / 6;
    constexpr double kFlagNs = 3000;
    constexpr double kAddNs = 1500;
    const double tile = kOfBest * product;
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
  return {.product = static_cast<double>(stages) * kStageNs * cost * outputs / kOutputsOfTile,
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

// What waits for a link is in the way of what the products load. So where the next tile is another
// rank's, over the larger part of the time that it takes, which is not known; where own ones are
// next, no faster than links take what all that still send do. If that is one, it will wait for
// what is sent: at once, but for two ranks, which send each other so little that it need not. If
// the busiest block has none, at once.
Pace pace_of(const TilesToSend& tiles, const KernelInfo& kernel, int ranks) {
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

// The own rows, with what has come for them.
void run_fused_sum(CudaTransport& transport, const FusedScatter& problem, const at::Tensor& out) {
  const int rank = transport.words().rank;
  const RowShare& rows = problem.rows;
  const int64_t length = rows.length(rank);
  if (length == 0) return;
  const int64_t n = out.size(1);
  const BlocksBesideOthers beside(sm_count(out.device()));
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
    params.from[params.sources] =
        sm90::matrix_map(transport.data(rank, problem.at + source * slot), out.scalar_type(),
                         length, n, n, sm90::kAddendRows);
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
  const auto element = static_cast<double>(problem.gemm.rhs.data.element_size());
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
  const BlocksBesideOthers beside(sm_count(device));
  const auto tiles_of_chunk = [&](const KernelInfo& kernel) {
    return ceil_div(rows.largest(), kernel.rows) * ceil_div(n, kernel.columns);
  };
  const auto units = [&](const KernelInfo& kernel) { return rows.size * tiles_of_chunk(kernel); };
  const auto to_send = [&](const KernelInfo& kernel, double cost) {
    return tiles_to_send(ceil_div(operands.lhs.size(1), kernel.depth), kernel, cost,
                         static_cast<int64_t>(out.element_size()), beside.of(kernel, units(kernel)),
                         tiles_of_chunk(kernel), rows.size);
  };
  const KernelInfo& kernel = choose_kernel(
      find_fused_scatter, key_of(operands), [&](const TimedTile& tile, const KernelInfo& found) {
        // By what all ranks have alike: each tile has a word. Of two ranks by waves, as where k may
        // differ: small tiles cost more there than this time has (bench_two_ranks-*.json).
        const bool is_known = problem.ranks_share_k && rows.size > 2;
        if (is_known) return to_send(found, tile.cost).time(rows.size);
        return static_cast<double>(beside.waves(found, units(found))) * tile.time();
      });
  FusedScatterParams params{};
  params.gemm = gemm_params(problem.gemm, operands, kernel);
  params.gemm.row_group = kRowGroup;
  const int64_t slot = rows.largest() * n * static_cast<int64_t>(out.element_size());
  for (int chunk = 0; chunk < rows.size; ++chunk) {
    const int64_t length = rows.length(chunk);
    params.first[chunk] = static_cast<int>(rows.begin(chunk));
    params.rows[chunk] = static_cast<int>(length);
    params.tell[chunk] = transport.tile_word(chunk, rank);
    params.told[chunk] = transport.tile_word(rank, chunk);
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
  params.operation =
      operation_of(transport, {.rows = rows.rows, .way = Way::kernel(kernel.columns)});
  params.begun = begun_words(transport);
  const Pace pace = pace_of(to_send(kernel, 1), kernel, rows.size);
  params.pace_ns = pace.between_tiles;
  params.last_pace_ns = pace.before_own;
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  check(beside.start(launch_fused_scatter, kernel, params, units(kernel), stream),
        "fused product and reduce-scatter");
  if (!out.is_same(problem.out)) problem.out.copy_(out);
}

}  // namespace torch_overlap::cuda
