#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cmath>

#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/views.h"
#include "torch_overlap/gemm/sm90/maps.h"
#include "torch_overlap/overlap/cuda/blocks.h"
#include "torch_overlap/overlap/cuda/direct_host.h"
#include "torch_overlap/overlap/cuda/fused.h"
#include "torch_overlap/overlap/cuda/fused_host.h"
#include "torch_overlap/overlap/cuda/fused_operands.h"

namespace torch_overlap::cuda {
namespace {

// What H200s take, for choosing: copies to peers, until the first byte of the first chunk is there,
// and then; blocks that send, the same.
constexpr double kFirstByteNs = 6000;
constexpr double kCopyBytesPerNs = 386;
constexpr double kFirstSentNs = 4000;
constexpr double kSentBytesPerNs = 330;

// Enough for the links; pairs, as blocks are launched.
constexpr int kSenders = 8;
static_assert(kSenders % 2 == 0 && kSenders <= 32);
// A slice of k is so many stages: what tiles wait for at a time.
constexpr int kSliceStages = 4;
constexpr int kStagesOfBox = kSentBytes / static_cast<int>(kStageBytes);
static_assert(kSliceStages % kStagesOfBox == 0);
constexpr int kMostSlices = 64;
static_assert(kMostSlices * kSenders <= kMostTiles);

// A multiple of those of a box.
int slice_stages(int64_t stages) {
  const int64_t least = ceil_div(stages, kMostSlices);
  return std::max(kSliceStages, static_cast<int>(ceil_div(least, kStagesOfBox)) * kStagesOfBox);
}

double chunk_bytes(const KernelKey& key, const GatherShape& shape) {
  const bool is_8_bit = key.lhs == sm90::OperandType::e4m3 || key.lhs == sm90::OperandType::e5m2;
  return static_cast<double>(shape.rows.largest() * shape.k * (is_8_bit ? 1 : 2));
}

double tile_ns(const GatherShape& shape, const TimedTile& tile, const KernelInfo& kernel) {
  return static_cast<double>(ceil_div(shape.k, kernel.depth)) * kStageNs * tile.time();
}

// How tiles, or pairs of them in clusters, are shared out where blocks send first.
struct Share {
  double ns;
  int64_t of_others;  // units of the clusters that do not send
};

// Those that send take part from the next tile of the others on. Slices of all chunks come side by
// side, and tiles are computed as they do: one of others' rows ends some time behind the last
// slice, if it would not end later. That holds up what comes behind the first tile of a cluster
// that has no own rows, and behind the second one of others.
Share share_out(const KernelKey& key, const GatherShape& shape, const TimedTile& tile,
                const KernelInfo& kernel, int sms, int senders) {
  // Of a tile's time: slices come in bursts.
  constexpr double kBehind = 0.3;
  const double of_tile = tile_ns(shape, tile, kernel);
  const double arrival =
      kFirstSentNs + chunk_bytes(key, shape) * (shape.rows.size - 1) / kSentBytesPerNs;
  const double first = std::max(of_tile, arrival + kBehind * of_tile);
  const int64_t all = BlocksBesideOthers(sms).most(kernel) / kernel.cluster;
  const int64_t sending = senders / kernel.cluster;
  const int64_t others = std::max<int64_t>(1, all - sending);
  const int64_t units = units_of(kernel, shape.rows, shape.n);
  const auto alone = static_cast<int64_t>(std::ceil(arrival / of_tile));
  const int64_t left = std::max<int64_t>(0, units - alone * others);
  const int64_t of_senders = std::min(left, sending * ceil_div(left, all));
  const int64_t of_others = units - of_senders;
  const int64_t own =
      std::min(others, units_of(kernel, shape.rows.length(shape.order.at(0)), shape.n));
  const auto tiles_from = [&](int64_t cluster) {
    return static_cast<double>(ceil_div(std::max<int64_t>(0, of_others - cluster), others));
  };
  const double with_own = std::max(tiles_from(0) * of_tile, first + (tiles_from(0) - 2) * of_tile);
  const double without = own < others ? first + (tiles_from(own) - 1) * of_tile : 0;
  return {.ns = std::max(with_own, without), .of_others = of_others};
}

// Every block goes through its tiles in order, so a chunk holds up all that is behind it.
double time_with_copies(const KernelKey& key, const GatherShape& shape, const TimedTile& tile,
                        const KernelInfo& kernel, int sms) {
  // Smaller tiles ask L2 for more, where copies pass too.
  const double of_tile = tile_ns(shape, tile, kernel) * (tile.columns < 224 ? 1.02 : 1);
  const double chunk_ns = chunk_bytes(key, shape) / kCopyBytesPerNs;
  const int64_t side_by_side = sms / kernel.cluster;
  int64_t left = 0;
  double time = 0;
  for (int step = shape.rows.size - 1; step >= 0; --step) {
    left += units_of(kernel, shape.rows.length(shape.order.at(step)), shape.n);
    const double arrival = step == 0 ? 0 : kFirstByteNs + step * chunk_ns;
    const auto waves = static_cast<double>(ceil_div(left, side_by_side));
    time = std::max(time, arrival + waves * of_tile);
  }
  return time;
}

}  // namespace

int gather_senders(const FusedGather& problem, int sms) {
  // Of what a rank sends. What is more takes the SMs of those that send for too long. Of two ranks
  // half of the rows are there from the beginning, and copies are quicker from 4 MiB on.
  constexpr int64_t kMostBytes = int64_t{16} << 20;
  constexpr int64_t kMostBytesOfTwo = int64_t{2} << 20;
  constexpr int kLeastSms = 4 * kSenders;
  if (sms < kLeastSms) return 0;
  const int64_t row = problem.own.size(1) * static_cast<int64_t>(problem.own.element_size());
  const int64_t bytes = problem.rows.largest() * row * (problem.rows.size - 1);
  const int64_t most = problem.rows.size == 2 ? kMostBytesOfTwo : kMostBytes;
  return bytes > 0 && bytes <= most ? kSenders : 0;
}

const KernelInfo& choose_gather_kernel(const KernelKey& key, const GatherShape& shape, int sms,
                                       int senders) {
  return choose_kernel(find_fused_gather, key,
                       [&](const TimedTile& tile, const KernelInfo& kernel) {
                         return senders > 0 ? share_out(key, shape, tile, kernel, sms, senders).ns
                                            : time_with_copies(key, shape, tile, kernel, sms);
                       });
}

namespace {

// As those that send see rows of `bytes` each.
CUtensorMap sent_map(const void* data, int64_t rows, int64_t bytes) {
  const int64_t columns = bytes / kSentElement;
  return sm90::matrix_map(data, at::kInt, rows, columns, columns, kSentRows, kSentBytes);
}

// Of a kernel whose first blocks send.
void add_senders(const CudaTransport& transport, const FusedGather& problem,
                 const Operands& operands, FusedGatherParams& params) {
  const int rank = transport.words().rank;
  const RowShare& rows = problem.rows;
  const auto at_of = [&](const at::Tensor& part) {
    return static_cast<const std::byte*>(part.const_data_ptr()) -
           static_cast<const std::byte*>(transport.data(rank, 0));
  };
  const int64_t row = problem.own.size(1) * static_cast<int64_t>(problem.gathered.element_size());
  const int64_t own_at = at_of(problem.gathered) + rows.begin(rank) * row;
  const int64_t length = rows.length(rank);
  params.senders = problem.senders;
  params.begun = begun_words(transport);
  for (int peer = 0; peer < rows.size; ++peer) {
    params.tell[peer] = transport.tile_word(peer, rank);
    if (length == 0) continue;
    params.to[peer] = sent_map(transport.data(peer, own_at), length, row);
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
  const RowShare& rows = problem.rows;
  const auto device = problem.own.device();
  const auto dtype = problem.gemm.out.scalar_type();
  const Operands operands = operands_of(problem.gemm, problem.own, dtype);
  const int64_t n = operands.rhs.size(operands.rhs_along_k ? 0 : 1);
  const int sms = sm_count(device);
  const KernelKey key = key_of(operands);
  const GatherShape shape{.rows = rows, .order = problem.order, .n = n, .k = problem.own.size(1)};
  const KernelInfo& kernel = choose_gather_kernel(key, shape, sms, problem.senders);
  const at::Tensor out = mappable_out(problem.gemm.out);
  FusedGatherParams params{};
  if (operands.lhs.size(0) > 0) {
    params.gemm = gemm_params(problem.gemm, operands, kernel);
  } else {  // no rows of its own: nothing reads this map
    params.gemm =
        gemm_params(problem.gemm, operands_of(problem.gemm, problem.gathered, dtype), kernel);
  }
  params.gemm.row_group = kRowGroup / kernel.cluster;
  params.gathered = sm90::matrix_map(problem.gathered, kernel.rows);
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
    params.told[chunk] = sends ? transport.tile_word(rank, chunk) : transport.flag(rank, chunk);
    params.order[chunk] = problem.order.at(chunk);
  }
  params.operation =
      operation_of(transport, {.rows = rows.rows, .way = sends ? Way::kernel() : Way::chunks()});
  if (sends) add_senders(transport, problem, operands, params);
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  const int64_t units = units_of(kernel, rows, n);
  if (sends) {
    const TimedTile& tile = sm90::timed_tile(kernel.rows, kernel.columns);
    params.units_of_others =
        static_cast<int>(share_out(key, shape, tile, kernel, sms, problem.senders).of_others);
    check(BlocksBesideOthers(sms).start(launch_fused_gather, kernel, params,
                                        units + problem.senders / kernel.cluster, stream),
          "fused all-gather and product");
  } else {
    params.units_of_others = static_cast<int>(units);
    const int64_t most = int64_t{sms} / kernel.cluster;
    const auto blocks = static_cast<int>(std::min(units, most) * kernel.cluster);
    check(launch_fused_gather(kernel, params, blocks, stream), "fused all-gather and product");
  }
  if (!out.is_same(problem.gemm.out)) problem.gemm.out.copy_(out);
}

}  // namespace torch_overlap::cuda
