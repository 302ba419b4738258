#include <ATen/ops/empty.h>

#include <algorithm>

#include "torch_overlap/overlap/execute.h"
#include "torch_overlap/overlap/execute_common.h"

namespace torch_overlap {
namespace {

// One reduce-scatter of the contiguous [rows, columns] at offset `at` of every rank's data.
struct ScatterPart {
  RowPartition rows;
  int64_t columns;
  at::ScalarType dtype;
  int64_t at;
  int flags;    // first of `size` flags
  SumArgs sum;  // everything but the parts
};

// Peer-mapped: every rank signals that its operand is ready, and each rank sums its rows by reading
// them from all ranks. Otherwise each part is sent to the rank that sums it; `received` is the
// memory for received parts.
void enqueue_reduce_scatter(OverlapChannel& channel, OverlapChannel::Session& session, int stream,
                            const ScatterPart& part, const at::Tensor& received) {
  const int rank = channel.group().rank();
  const int size = channel.group().size();
  const int64_t length = part.rows.length(rank);
  const int64_t row = part.columns * static_cast<int64_t>(c10::elementSize(part.dtype));
  const Transport& transport = session.transport;
  SumArgs sum = part.sum;
  const auto others = flags_of_others(channel.group(), part.flags);
  if (transport.is_peer_mapped()) {
    session.post(stream, part.flags);
    session.wait_for_flags(stream, others);
    for (int peer = 0; peer < size; ++peer) {
      sum.parts.push_back(transport.peer(peer, part.at + part.rows.begin(rank) * row,
                                         {length, part.columns}, part.dtype));
    }
  } else {
    const auto mine = channel.data(part.at, {part.rows.rows, part.columns}, part.dtype);
    for (const Exchange& exchange : reduce_scatter_schedule(rank, size).exchanges) {
      session.exchange(stream, {.dst = exchange.dst,
                                .send = rows_of_rank(mine, part.rows, exchange.dst),
                                .dst_offset_bytes = 0,
                                .flag = part.flags + rank,
                                .src = exchange.src,
                                .recv = received[exchange.src],
                                .recv_flag = part.flags + exchange.src});
    }
    session.wait_for_flags(stream, others);
    for (int peer = 0; peer < size; ++peer) {
      sum.parts.push_back(peer == rank ? rows_of_rank(mine, part.rows, rank) : received[peer]);
    }
  }
  if (length == 0) return;
  session.sum(stream, sum);
}

// Returns the memory for what enqueue_reduce_scatter() receives; undefined if it receives nothing.
at::Tensor make_recv_scratch(const OverlapChannel& channel, const RowPartition& rows,
                             int64_t columns, at::ScalarType dtype) {
  if (channel.transport().is_peer_mapped()) return {};
  const auto& group = channel.group();
  return at::empty({group.size(), rows.length(group.rank()), columns},
                   at::TensorOptions().dtype(dtype).device(group.device()));
}

// Returns the multiple to which the columns of a piece are rounded. All ranks must cut at the same
// columns. With 128 columns or more the multiple is 128, whatever the scaling of this rank's
// weight, because scales of a weight may be in tiles of 128. With fewer it is the larger of
// the multiple that block-scaled GEMMs need and 16 bytes, which the kernels move at a time; a
// weight whose scales are in tiles is not cut.
int64_t piece_multiple(int64_t columns, int64_t element, const GemmOperand& weight) {
  constexpr int64_t kTile = 128;
  constexpr int64_t kBytes = 16;
  const bool has_tiles = weight.scaling == ScalingMode::BLOCK_2D_SCALING || weight.swizzled;
  return columns >= kTile || has_tiles ? kTile : std::max(kBlockScaledMultiple, kBytes / element);
}

}  // namespace

void enqueue_all_gather(OverlapChannel& channel, OverlapChannel::Session& session, int stream,
                        const RowPartition& rows, const GatheredRows& part, int first_flag) {
  const auto schedule =
      gather_schedule(channel.group().rank(), channel.group().size(), GatherOrder::all_pairs);
  for (const Exchange& exchange : schedule.exchanges) {
    session.exchange(stream, chunk_move(channel, part, rows, exchange, first_flag));
  }
}

BackgroundGather::BackgroundGather(std::string_view op, OverlapChannel& channel,
                                   const RowPartition& rows, const at::Tensor& own,
                                   const at::Tensor& gathered, bool with_own, bool single_stream)
    : flags_(flags_of_others(channel.group(), 0)) {
  operation_.emplace(
      op, channel,
      OperationOptions{.entry = EntryPayload{.rows = rows.rows}, .single_stream = single_stream});
  operation_->enqueue([&](OverlapChannel::Session& session) {
    const int comm = session.streams.comm();
    enqueue_all_gather(channel, session, comm, rows, {.own = own, .all = gathered}, 0);
    // On a CPU work is queued: this starts the transfers, which then run in the background.
    if (!channel.transport().is_peer_mapped()) session.streams.join_stream(comm);
    if (!with_own) return;
    session.streams.run(
        comm, "copy",
        [to = rows_of_rank(gathered, rows, channel.group().rank()), own] { to.copy_(own); });
  });
}

void BackgroundGather::finish() {
  // On the caller's stream, after what the caller has issued since: GEMMs that wait for other ranks
  // come first, and would have to be waited for here.
  operation_->enqueue([&](OverlapChannel::Session& session) { session.wait_for_flags(0, flags_); });
  operation_->finish();
}

int run_split_gemm(std::string_view op, OverlapChannel& channel, const SplitGemm& problem) {
  const int size = channel.group().size();
  const auto element = static_cast<int64_t>(c10::elementSize(problem.dtype));
  const auto column_ranges = pieces(problem.columns, problem.splits,
                                    piece_multiple(problem.columns, element, problem.gemm.rhs));
  const int count = static_cast<int>(column_ranges.size());
  const auto received = make_recv_scratch(
      channel, problem.rows, column_ranges.empty() ? 0 : column_ranges[0].length, problem.dtype);
  std::vector<at::Tensor> blocks;
  std::vector<CheckedGemm> products;
  GemmArgs args = problem.gemm;
  args.overlaps_communication = true;
  PartialAmax largest(std::exchange(args.out_amax, {}), column_ranges.size());
  const CheckedGemm whole(op, std::move(args));
  for (const IndexRange& piece : column_ranges) {
    blocks.push_back(channel.data(piece.begin * problem.rows.rows * element,
                                  {problem.rows.rows, piece.length}, problem.dtype));
    GemmArgs part = whole.columns(piece.begin, piece.length);
    part.out = blocks.back();
    largest.next(part);
    products.emplace_back(op, std::move(part));
  }
  const auto body = [&](OverlapChannel::Session& session) {
    OverlapStreams& streams = session.streams;
    const int comm = streams.comm();
    std::vector<OverlapStreams::Mark> computed(count);
    for (const auto [is_product, i] : pipeline_order(count, problem.overlap_first_gemm)) {
      if (is_product) {
        const int stream = i % streams.num_compute_streams();
        session.gemm(stream, products[i]);
        computed[i] = streams.mark(stream);
        continue;
      }
      streams.after(comm, computed[i]);
      const IndexRange& piece = column_ranges[i];
      at::Tensor recv_scratch;
      if (received.defined()) {
        recv_scratch = received.flatten()
                           .narrow(0, 0, size * received.size(1) * piece.length)
                           .view({size, received.size(1), piece.length});
      }
      enqueue_reduce_scatter(
          channel, session, comm,
          {.rows = problem.rows,
           .columns = piece.length,
           .dtype = problem.dtype,
           .at = piece.begin * problem.rows.rows * element,
           .flags = i * size,
           .sum = {.out = problem.out.narrow(1, piece.begin, piece.length),
                   .scale_inv = problem.scale_inv,
                   .factor = 1,
                   .bias = problem.bias.defined()
                               ? problem.bias.narrow(0, piece.begin, piece.length)
                               : problem.bias,
                   // Nothing is left to overlap with the last piece.
                   .blocks = i + 1 == count ? 2 * problem.blocks : problem.blocks,
                   .cluster = problem.cluster}},
          recv_scratch);
    }
    enqueue_barrier(channel, session, comm, count * size);
  };
  channel.operate(op, body,
                  {.entry = EntryPayload{.rows = problem.rows.rows,
                                         .signature = OpSignature::columns(std::max(1, count))},
                   .begin_on_comm_stream = channel.is_captured()});
  largest.finish();
  return count;
}

void run_bulk_gemm(std::string_view op, OverlapChannel& channel, const BulkGemm& problem) {
  const int rank = channel.group().rank();
  const int size = channel.group().size();
  const RowPartition& rows = problem.rows;
  const auto data = channel.data(0, {rows.rows, problem.columns}, problem.dtype);
  const auto received = problem.gathers
                            ? at::Tensor()
                            : make_recv_scratch(channel, rows, problem.columns, problem.dtype);
  std::vector<CheckedGemm> products;
  for (GemmArgs args : problem.gemms) {
    args.overlaps_communication = true;
    products.emplace_back(op, std::move(args));
  }
  channel.operate(
      op,
      [&](OverlapChannel::Session& session) {
        OverlapStreams& streams = session.streams;
        const int comm = streams.comm();
        if (problem.gathers) {
          enqueue_all_gather(channel, session, comm, rows,
                             {.own = rows_of_rank(data, rows, rank), .all = data}, 0);
          if (size > 1) session.wait_for_flags(comm, flags_of_others(channel.group(), 0));
        } else {
          enqueue_reduce_scatter(channel, session, comm,
                                 {.rows = rows,
                                  .columns = problem.columns,
                                  .dtype = problem.dtype,
                                  .at = 0,
                                  .flags = 0,
                                  .sum = {.out = problem.out,
                                          .scale_inv = problem.scale_inv,
                                          .factor = 1,
                                          .blocks = problem.blocks,
                                          .cluster = problem.cluster}},
                                 received);
          enqueue_barrier(channel, session, comm, size);
        }
        for (size_t i = 0; i < products.size(); ++i) {
          session.gemm(static_cast<int>(i) % streams.num_compute_streams(), products[i]);
        }
      },
      {.entry = EntryPayload{.rows = rows.rows,
                             .signature =
                                 problem.gathers ? OpSignature::chunks() : OpSignature::columns(1)},
       .lender = problem.lender});
}

}  // namespace torch_overlap
