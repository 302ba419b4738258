#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cmath>

#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/views.h"
#include "torch_overlap/gemm/sm90/tensor_maps.h"
#include "torch_overlap/overlap/cuda/fused.h"
#include "torch_overlap/overlap/cuda/fused_host.h"
#include "torch_overlap/overlap/cuda/fused_operands.h"
#include "torch_overlap/overlap/cuda/low_latency_host.h"
#include "torch_overlap/overlap/cuda/resident_grid.h"

namespace torch_overlap::cuda {
namespace {

// Cost model on H200, for choosing a kernel: latency of the first chunk and bandwidth of copies to
// peers; then the same for blocks that send.
constexpr double kFirstByteNs = 6000;
constexpr double kCopyBytesPerNs = 386;
constexpr double kFirstSentNs = 4000;
constexpr double kSentBytesPerNs = 330;

// Enough blocks to saturate the links; even, because blocks are launched in pairs.
constexpr int kSenders = 8;
static_assert(kSenders % 2 == 0 && kSenders <= 32);
// Minimum number of stages of a slice of k, the unit for which tiles wait.
constexpr int kSliceStages = 4;
constexpr int kStagesPerBox = kSendBoxBytes / static_cast<int>(kStageBytes);
static_assert(kSliceStages % kStagesPerBox == 0);
constexpr int kMaxSlices = 64;
static_assert(kMaxSlices * kSenders <= kMaxTileFlags);

// Returns the number of stages of a slice, a multiple of the stages of a box.
int slice_stages(int64_t stages) {
  const int64_t min_stages = ceil_div(stages, kMaxSlices);
  return std::max(kSliceStages,
                  static_cast<int>(ceil_div(min_stages, kStagesPerBox)) * kStagesPerBox);
}

double chunk_bytes(const KernelKey& key, const GatherShape& shape) {
  const bool is_8_bit = key.lhs == sm90::OperandType::e4m3 || key.lhs == sm90::OperandType::e5m2;
  return static_cast<double>(shape.rows.largest() * shape.k * (is_8_bit ? 1 : 2));
}

double tile_time_ns(const GatherShape& shape, const TileCost& tile, const KernelInfo& kernel) {
  return static_cast<double>(ceil_div(shape.k, kernel.depth)) * kStageNs * tile.time();
}

// Split of the units (tiles, or pairs of tiles in clusters) if blocks send first.
struct UnitSplit {
  double time_ns;
  int64_t num_nonsender_units;  // Units of the clusters that do not send.
};

// The senders begin to compute when the other clusters begin their next tile. Slices of all chunks
// arrive concurrently, and tiles are computed as slices arrive: a tile of other ranks' rows ends
// some time after the last slice, unless it would end later anyway. This delays the work after the
// first tile of a cluster that has no own rows, and the work after the second tile of other
// clusters.
UnitSplit split_units(const KernelKey& key, const GatherShape& shape, const TileCost& tile,
                      const KernelInfo& kernel, int sms, int senders) {
  // Lag in units of a tile's time, because slices arrive in bursts.
  constexpr double kLagTiles = 0.3;
  const double tile_ns = tile_time_ns(shape, tile, kernel);
  const double arrival =
      kFirstSentNs + chunk_bytes(key, shape) * (shape.rows.size - 1) / kSentBytesPerNs;
  const double first = std::max(tile_ns, arrival + kLagTiles * tile_ns);
  const int64_t clusters = ResidentGrid(sms).max_blocks(kernel) / kernel.cluster;
  const int64_t sending = senders / kernel.cluster;
  const int64_t others = std::max<int64_t>(1, clusters - sending);
  const int64_t units = num_units(kernel, shape.rows, shape.n);
  const auto alone = static_cast<int64_t>(std::ceil(arrival / tile_ns));
  const int64_t left = std::max<int64_t>(0, units - alone * others);
  const int64_t sender_units = std::min(left, sending * ceil_div(left, clusters));
  const int64_t nonsender_units = units - sender_units;
  const int64_t own =
      std::min(others, num_units(kernel, shape.rows.length(shape.order.at(0)), shape.n));
  const auto tiles_from = [&](int64_t cluster) {
    return static_cast<double>(ceil_div(std::max<int64_t>(0, nonsender_units - cluster), others));
  };
  const double with_own = std::max(tiles_from(0) * tile_ns, first + (tiles_from(0) - 2) * tile_ns);
  const double without = own < others ? first + (tiles_from(own) - 1) * tile_ns : 0;
  return {.time_ns = std::max(with_own, without), .num_nonsender_units = nonsender_units};
}

// Every block computes its tiles in order, so a late chunk delays all tiles after it.
double time_with_copies(const KernelKey& key, const GatherShape& shape, const TileCost& tile,
                        const KernelInfo& kernel, int sms) {
  // Smaller tiles read more from L2, which the copies use, too.
  const double tile_ns = tile_time_ns(shape, tile, kernel) * (tile.columns < 224 ? 1.02 : 1);
  const double chunk_ns = chunk_bytes(key, shape) / kCopyBytesPerNs;
  const int64_t side_by_side = sms / kernel.cluster;
  int64_t left = 0;
  double time = 0;
  for (int step = shape.rows.size - 1; step >= 0; --step) {
    left += num_units(kernel, shape.rows.length(shape.order.at(step)), shape.n);
    const double arrival = step == 0 ? 0 : kFirstByteNs + step * chunk_ns;
    const auto waves = static_cast<double>(ceil_div(left, side_by_side));
    time = std::max(time, arrival + waves * tile_ns);
  }
  return time;
}

}  // namespace

int num_gather_senders(const FusedGather& problem, int sms) {
  // Maximum number of bytes that a rank sends. More would occupy the SMs of the senders for too
  // long. With two ranks half of the rows are local, and copies are already faster for smaller
  // messages.
  constexpr int64_t kMaxBytes = int64_t{16} << 20;
  constexpr int64_t kMaxBytesTwoRanks = int64_t{2} << 20;
  constexpr int kMinSms = 4 * kSenders;
  if (sms < kMinSms) return 0;
  const int64_t row = problem.own.size(1) * static_cast<int64_t>(problem.own.element_size());
  const int64_t bytes = problem.rows.largest() * row * (problem.rows.size - 1);
  const int64_t max_bytes = problem.rows.size == 2 ? kMaxBytesTwoRanks : kMaxBytes;
  return bytes > 0 && bytes <= max_bytes ? kSenders : 0;
}

const KernelInfo& choose_gather_kernel(const KernelKey& key, const GatherShape& shape, int sms,
                                       int senders) {
  return choose_kernel(find_fused_gather, key, [&](const TileCost& tile, const KernelInfo& kernel) {
    return senders > 0 ? split_units(key, shape, tile, kernel, sms, senders).time_ns
                       : time_with_copies(key, shape, tile, kernel, sms);
  });
}

namespace {

// Returns the map by which senders access rows of `bytes` each.
CUtensorMap sent_map(const void* data, int64_t rows, int64_t bytes) {
  const int64_t columns = bytes / kSendElementBytes;
  return sm90::make_tensor_map(data, at::kInt, rows, columns, columns, kSendBoxRows, kSendBoxBytes);
}

// Sets the parameters of a kernel whose first blocks send.
void add_senders(const CudaTransport& transport, const FusedGather& problem,
                 const Operands& operands, FusedGatherParams& params) {
  const int rank = transport.words().rank;
  const RowPartition& rows = problem.rows;
  const auto at_of = [&](const at::Tensor& part) {
    return static_cast<const std::byte*>(part.const_data_ptr()) -
           static_cast<const std::byte*>(transport.data(rank, 0));
  };
  const int64_t row = problem.own.size(1) * static_cast<int64_t>(problem.gathered.element_size());
  const int64_t own_offset = at_of(problem.gathered) + rows.begin(rank) * row;
  const int64_t length = rows.length(rank);
  params.senders = problem.senders;
  params.entry_flags = entry_flags(transport);
  for (int peer = 0; peer < rows.size; ++peer) {
    params.peer_flags[peer] = transport.tile_flags(peer, rank);
    if (length == 0) continue;
    params.to[peer] = sent_map(transport.data(peer, own_offset), length, row);
    if (operands.scaled_by_row) {
      params.scales_to[peer] =
          static_cast<float*>(transport.data(peer, at_of(problem.gathered_scales))) +
          rows.begin(rank);
    }
  }
  if (length > 0) params.own = sent_map(operands.lhs.const_data_ptr(), length, row);
}

}  // namespace

void run_fused(CudaTransport& transport, const FusedGather& problem) {
  TORCH_OVERLAP_CHECK(problem.senders > 0 || transport.uses_copy_engine(), kUnsupported,
                      "fused all-gather and product: expected copy engines to move the rows, got a "
                      "buffer with use_ce=False; kernels would find no SM free");
  const int rank = transport.words().rank;
  const RowPartition& rows = problem.rows;
  const auto device = problem.own.device();
  const auto dtype = problem.gemm.out.scalar_type();
  const Operands operands = operands_of(problem.gemm, problem.own, dtype);
  const int64_t n = operands.rhs.size(operands.is_rhs_k_major ? 0 : 1);
  const int sms = sm_count(device);
  const KernelKey key = key_of(operands);
  const GatherShape shape{.rows = rows, .order = problem.order, .n = n, .k = problem.own.size(1)};
  const KernelInfo& kernel = choose_gather_kernel(key, shape, sms, problem.senders);
  const at::Tensor out = mappable_out(problem.gemm.out);
  FusedGatherParams params{};
  if (operands.lhs.size(0) > 0) {
    params.gemm = gemm_params(problem.gemm, operands, kernel);
  } else {  // Nothing reads this map if the rank has no rows.
    params.gemm =
        gemm_params(problem.gemm, operands_of(problem.gemm, problem.gathered, dtype), kernel);
  }
  params.gemm.row_group = kRowGroup / kernel.cluster;
  params.gathered = sm90::make_tensor_map(problem.gathered, kernel.rows);
  const auto stages = static_cast<int>(ceil_div(shape.k, kernel.depth));
  const bool sends = problem.senders > 0;
  params.slice_stages = sends ? slice_stages(stages) : stages;
  for (int chunk = 0; chunk < rows.size; ++chunk) {
    const int64_t begin = rows.begin(chunk);
    const int64_t length = rows.length(chunk);
    params.out[chunk] = rows_map(row_view(out, begin, length), sm90::kWarpRows);
    params.begin[chunk] = static_cast<int>(begin);
    params.rows[chunk] = static_cast<int>(length);
    if (operands.scaled_by_row) {
      params.lhs_scale[chunk] = chunk == rank
                                    ? problem.own_scales.const_data_ptr<float>()
                                    : problem.gathered_scales.const_data_ptr<float>() + begin;
    }
    params.notified[chunk] =
        sends ? transport.tile_flags(rank, chunk) : transport.flag(rank, chunk);
    params.order[chunk] = problem.order.at(chunk);
  }
  params.operation = operation_of(
      transport,
      {.rows = rows.rows, .signature = sends ? OpSignature::kernel() : OpSignature::chunks()});
  if (sends) add_senders(transport, problem, operands, params);
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  const int64_t units = num_units(kernel, rows, n);
  if (sends) {
    const TileCost& tile = sm90::find_tile_cost(kernel.rows, kernel.columns);
    params.num_nonsender_units = static_cast<int>(
        split_units(key, shape, tile, kernel, sms, problem.senders).num_nonsender_units);
    check(ResidentGrid(sms).start(launch_fused_gather, kernel, params,
                                  units + problem.senders / kernel.cluster, stream),
          "fused all-gather and product");
  } else {
    params.num_nonsender_units = static_cast<int>(units);
    const int64_t max_units = int64_t{sms} / kernel.cluster;
    const auto blocks = static_cast<int>(std::min(units, max_units) * kernel.cluster);
    check(launch_fused_gather(kernel, params, blocks, stream), "fused all-gather and product");
  }
  if (!out.is_same(problem.gemm.out)) problem.gemm.out.copy_(out);
}

}  // namespace torch_overlap::cuda
