#include <ATen/record_function.h>

#include <optional>

#include "torch_overlap/overlap/execute.h"
#include "torch_overlap/overlap/execute_common.h"

namespace torch_overlap {
namespace {

// Copies what was gathered, after all of it has arrived; this rank's rows are copied from their
// source.
void enqueue_copy(OverlapStreams& streams, int stream, const GatheredRows& data,
                  const RowPartition& rows, int rank) {
  if (!data.copy.defined()) return;
  const int64_t begin = rows.begin(rank);
  const int64_t end = begin + rows.length(rank);
  streams.run(stream, "copy", [data, begin, end, all_rows = rows.rows] {
    data.copy.narrow(0, begin, end - begin).copy_(data.own);
    for (const auto& [first, last] : {std::pair(int64_t{0}, begin), std::pair(end, all_rows)}) {
      if (first == last) continue;
      data.copy.narrow(0, first, last - first).copy_(data.all.narrow(0, first, last - first));
    }
  });
}

}  // namespace

void run_fused_gather(std::string_view op, OverlapChannel& channel, const GatherGemm& problem) {
  const int rank = channel.group().rank();
  const int size = channel.group().size();
  FusedGather fused{.rows = problem.rows,
                    .own = problem.data.own,
                    .gathered = problem.data.all,
                    .own_scales = problem.scales.own,
                    .gathered_scales = problem.scales.all};
  for (const ChunkStep& step : gather_schedule(rank, size, GatherOrder::all_pairs).steps) {
    fused.order.push_back(step.first);
  }
  for (const GemmArgs& args : problem.gemms) check_gemm(op, args);
  TORCH_OVERLAP_CHECK(!channel.shares_devices(), kUnsupported, op,
                      ": expected a GPU of its own for each rank, got ranks that share one, where "
                      "copies find no SM beside a kernel that waits for them");
  // With one GEMM, one kernel sends and multiplies. Several GEMMs share what copy engines bring.
  if (problem.gemms.size() == 1) fused.senders = channel.device().num_gather_senders(fused);
  const auto body = [&](OverlapChannel::Session& session) {
    if (fused.senders == 0) {
      // Enqueued before the GEMMs, which wait for it and leave no room on the device for anything
      // but copies. A stream runs in order, so the flag of a chunk is set after its scales have
      // arrived.
      const int comm = session.streams.comm();
      if (problem.scales.all.defined()) {
        enqueue_all_gather(channel, session, comm, problem.rows, problem.scales, size);
      }
      enqueue_all_gather(channel, session, comm, problem.rows, problem.data, 0);
    }
    for (const GemmArgs& args : problem.gemms) {
      fused.gemm = args;
      session.streams.run(0, "fused",
                          [&device = channel.device(), &transport = session.transport, fused] {
                            device.run_fused(transport, fused);
                          });
    }
    for (const GatheredRows& part : {problem.data, problem.scales}) {
      enqueue_copy(session.streams, 0, part, problem.rows, rank);
    }
  };
  std::optional<EntryPayload> entry;
  if (fused.senders == 0) entry = EntryPayload{.rows = problem.rows.rows};
  channel.operate(
      op, body,
      {.entry = entry, .single_stream = problem.single_stream, .fills_device = fused.senders > 0});
}

namespace {

// Returns the GEMMs of the pieces of each chunk, by exchange.
std::vector<std::vector<CheckedGemm>> products_of_pieces(std::string_view op,
                                                         const CheckedGemm& all,
                                                         const FusedReduceScatter& fused,
                                                         const std::vector<Exchange>& exchanges) {
  std::vector<std::vector<CheckedGemm>> products;
  for (const Exchange& exchange : exchanges) {
    auto& of_chunk = products.emplace_back();
    for (const IndexRange& piece : fused.pieces_of(exchange.send)) {
      of_chunk.emplace_back(op,
                            all.rows(fused.rows.begin(exchange.send) + piece.begin, piece.length));
    }
  }
  return products;
}

// Enqueues the GEMMs of the other ranks' rows, piece by piece, and sends each piece to its owner
// when it is done; then the kernel that computes this rank's rows and adds what arrives. The kernel
// is ordered after all of these GEMMs and after begin(): none of its blocks may wait for another
// rank while those still need its SM. `fused` and `products` must live until the streams are
// joined.
void enqueue_products_and_sends(OverlapChannel::Session& session, const ReduceScatterGemm& problem,
                                const FusedReduceScatter& fused,
                                const std::vector<Exchange>& exchanges,
                                std::vector<std::vector<CheckedGemm>>& products) {
  const OverlapChannel& channel = session.channel;
  const int rank = channel.group().rank();
  const int size = channel.group().size();
  OverlapStreams& streams = session.streams;
  const int comm = streams.comm();
  const int64_t row = row_bytes(problem.partial);
  const int64_t offset_bytes = fused.at + rank * problem.rows.largest() * row;
  for (size_t i = 0; i < exchanges.size(); ++i) {
    const auto rows = rows_of_rank(problem.partial, problem.rows, exchanges[i].send);
    const auto pieces = fused.pieces_of(exchanges[i].send);
    for (size_t j = 0; j < pieces.size(); ++j) {
      session.gemm(0, products[i][j]);
      streams.after(comm, streams.mark(0));
      const int flag = static_cast<int>(j) * size;
      session.exchange(comm, {.dst = exchanges[i].dst,
                              .send = row_view(rows, pieces[j].begin, pieces[j].length),
                              .dst_offset_bytes = offset_bytes + pieces[j].begin * row,
                              .flag = flag + rank,
                              .src = exchanges[i].src,
                              .recv_flag = flag + exchanges[i].src});
    }
  }
  session.order_after_begin(0);
  streams.run(0, "fused", [&device = channel.device(), &transport = session.transport, &fused] {
    device.run_fused(transport, fused);
  });
}

}  // namespace

void run_fused_reduce_scatter(std::string_view op, OverlapChannel& channel,
                              const ReduceScatterGemm& problem) {
  FusedReduceScatter fused{.gemm = problem.gemms.at(0),
                           .rows = problem.rows,
                           .at = channel.offset_of(problem.received),
                           .out = problem.out,
                           .factor = problem.factor,
                           .ranks_share_k = problem.ranks_share_k};
  check_gemm(op, fused.gemm);
  const int rank = channel.group().rank();
  const int size = channel.group().size();
  // Copies within a device need SMs, and the kernel leaves none.
  if (!channel.shares_devices()) {
    fused.pieces = channel.device().num_reduce_scatter_pieces(channel.transport(), fused,
                                                              channel.flags() / size);
  }
  std::vector<Exchange> exchanges;
  std::vector<std::vector<CheckedGemm>> products;
  if (fused.pieces > 0) {
    fused.gemm.overlaps_communication = true;
    const CheckedGemm all(op, fused.gemm);
    exchanges = reduce_scatter_schedule(rank, size).exchanges;
    products = products_of_pieces(op, all, fused, exchanges);
    fused.gemm = all.rows(problem.rows.begin(rank), problem.rows.length(rank));
  }
  fused.gemm.epilogue.bias = problem.bias;
  const auto body = [&](OverlapChannel::Session& session) {
    if (fused.pieces > 0) {
      return enqueue_products_and_sends(session, problem, fused, exchanges, products);
    }
    RECORD_USER_SCOPE("torch_overlap::fused");  // on the caller's stream
    channel.device().run_fused(session.transport, fused);
  };
  std::optional<EntryPayload> entry;
  if (fused.pieces > 0)
    entry = EntryPayload{.rows = problem.rows.rows, .signature = OpSignature::pieces(fused.pieces)};
  // Ranks that share a device may be threads of this process, which would wait for each other's
  // lock.
  channel.operate(
      op, body,
      {.entry = entry, .begin_on_comm_stream = true, .fills_device = !channel.shares_devices()});
  if (problem.meanwhile) problem.meanwhile();
}

void run_fused_all_reduce(std::string_view op, OverlapChannel& channel, const ReduceGemm& problem) {
  FusedAllReduce fused{.gemm = problem.gemm,
                       .rows = problem.rows,
                       .bytes = channel.bytes(),
                       .out = problem.out,
                       .factor = problem.factor,
                       .bias = problem.bias};
  fused.gemm.out = problem.out;
  check_gemm(op, fused.gemm);
  channel.operate(op,
                  [&](OverlapChannel::Session& session) {
                    session.streams.run(
                        0, "fused", [&] { channel.device().run_fused(session.transport, fused); });
                  },
                  {.entry = {}, .single_stream = true});
}

}  // namespace torch_overlap
