#include "torch_overlap/overlap/execute.h"
#include "torch_overlap/overlap/execute_common.h"

namespace torch_overlap {
namespace {

IndexRange rows_of_step(const RowPartition& rows, const ChunkStep& step) {
  const int64_t begin = rows.begin(step.first);
  return {begin, rows.begin(step.first + step.count) - begin};
}

}  // namespace

void run_gather_gemm(std::string_view op, OverlapChannel& channel, const GatherGemm& problem) {
  const int rank = channel.group().rank();
  const int size = channel.group().size();
  const RowPartition& rows = problem.rows;
  const auto schedule = gather_schedule(rank, size, problem.order);
  // Part p has flags p * size + chunk.
  std::vector<GatheredRows> parts{problem.data};
  if (problem.scales.all.defined()) parts.push_back(problem.scales);
  // A chunk that is multiplied together with a neighbour must be in its slot of the gathered
  // matrix.
  std::vector<std::pair<at::Tensor, at::Tensor>> to_slots;
  if (problem.order == GatherOrder::chunk_pairs) {
    for (GatheredRows& part : parts) {
      const auto slot = rows_of_rank(part.all, rows, rank);
      const auto own = std::exchange(part.own, slot);
      if (own.data_ptr() != slot.data_ptr()) to_slots.emplace_back(slot, own);
    }
  }
  std::vector<CheckedGemm> gemms;
  std::vector<PartialAmax> largest;
  std::vector<PartialBiasGrad> bias_grads;
  for (GemmArgs whole : problem.gemms) {
    largest.emplace_back(std::exchange(whole.out_amax, {}), schedule.steps.size());
    bias_grads.emplace_back(whole, schedule.steps.size());
    whole.overlaps_communication = true;
    gemms.emplace_back(op, std::move(whole));
  }
  // Indexed by step. Checked before anything is sent.
  std::vector<std::vector<CheckedGemm>> products(schedule.steps.size());
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    const IndexRange piece = rows_of_step(rows, schedule.steps[i]);
    if (piece.length == 0) continue;
    for (size_t j = 0; j < gemms.size(); ++j) {
      GemmArgs part = gemms[j].rows(piece.begin, piece.length);
      if (schedule.steps[i] == ChunkStep{rank}) {
        part.lhs.data = parts[0].own;
        if (parts.size() > 1) part.lhs.scale_inv = parts[1].own;
      }
      largest[j].next(part);
      bias_grads[j].next(part);
      products[i].emplace_back(op, std::move(part));
    }
  }
  const auto body = [&](OverlapChannel::Session& session) {
    OverlapStreams& streams = session.streams;
    const int comm = streams.comm();
    for (const auto& [slot, own] : to_slots) {
      streams.run(comm, "copy", [slot = slot, own = own] { slot.copy_(own); });
    }
    const auto copied = to_slots.empty() ? OverlapStreams::Mark{} : streams.mark(comm);
    // Returns the flags of the `count` chunks from `first` on that other ranks send.
    const auto flags_of = [&](int first, int count) {
      std::vector<int> flags;
      for (int chunk = first; chunk < first + count; ++chunk) {
        if (chunk == rank) continue;
        for (size_t p = 0; p < parts.size(); ++p) {
          flags.push_back(static_cast<int>(p) * size + chunk);
        }
      }
      return flags;
    };
    for (const Exchange& exchange : schedule.exchanges) {
      if (exchange.send != rank) session.wait_for_flags(comm, flags_of(exchange.send, 1));
      for (size_t p = 0; p < parts.size(); ++p) {
        session.exchange(comm,
                         chunk_move(channel, parts[p], rows, exchange, static_cast<int>(p) * size));
      }
    }
    for (size_t i = 0; i < schedule.steps.size(); ++i) {
      const auto [first, count] = schedule.steps[i];
      const int stream = static_cast<int>(i) % streams.num_compute_streams();
      const bool has_own = first <= rank && rank < first + count;
      if (!to_slots.empty() && has_own) streams.after(stream, copied);
      if (const auto flags = flags_of(first, count); !flags.empty())
        session.wait_for_flags(stream, flags);
      for (CheckedGemm& product : products[i]) session.gemm(stream, product);
      const auto [begin, length] = rows_of_step(rows, schedule.steps[i]);
      if (length == 0) continue;
      const bool from_own = schedule.steps[i] == ChunkStep{rank};
      for (const GatheredRows& part : parts) {
        if (!part.copy.defined()) continue;
        streams.run(
            stream, "copy",
            [to = row_view(part.copy, begin, length),
             from = from_own ? part.own : row_view(part.all, begin, length)] { to.copy_(from); });
      }
    }
  };
  channel.operate(
      op, body, {.entry = EntryPayload{.rows = rows.rows}, .single_stream = problem.single_stream});
  for (const auto& one : largest) one.finish();
  for (const auto& one : bias_grads) one.finish();
}

void run_reduce_scatter_gemm(std::string_view op, OverlapChannel& channel,
                             const ReduceScatterGemm& problem) {
  const int rank = channel.group().rank();
  const int size = channel.group().size();
  const RowPartition& rows = problem.rows;
  const int64_t length = rows.length(rank);
  const auto schedule = reduce_scatter_schedule(rank, size);
  const auto slot = [&](int peer) {
    return row_view(problem.received, peer * rows.largest(), length);
  };
  SumArgs sum{.out = problem.out,
              .scale_inv = problem.scale_inv,
              .factor = problem.factor,
              .bias = problem.bias};
  for (int peer = 0; peer < size; ++peer) {
    sum.parts.push_back(peer == rank ? rows_of_rank(problem.partial, rows, rank) : slot(peer));
  }
  std::vector<GemmArgs> terms = problem.gemms;
  PartialAmax largest(std::exchange(terms.at(0).out_amax, {}), schedule.steps.size());
  std::vector<CheckedGemm> gemms;
  for (GemmArgs& term : terms) {
    term.overlaps_communication = true;
    gemms.emplace_back(op, std::move(term));
  }
  // Indexed by step. Checked before anything is sent.
  std::vector<std::vector<CheckedGemm>> products(schedule.steps.size());
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    const IndexRange piece = rows_of_step(rows, schedule.steps[i]);
    if (piece.length == 0) continue;
    for (size_t j = 0; j < gemms.size(); ++j) {
      GemmArgs part = gemms[j].rows(piece.begin, piece.length);
      part.accumulate |= j > 0;
      if (j == 0) largest.next(part);
      products[i].emplace_back(op, std::move(part));
    }
  }
  const int64_t slots_offset = channel.offset_of(problem.received);
  const auto body = [&](OverlapChannel::Session& session) {
    OverlapStreams& streams = session.streams;
    const int comm = streams.comm();
    int stream = 0;
    std::vector<OverlapStreams::Mark> computed;
    for (size_t i = 0; i < schedule.steps.size(); ++i) {
      const int chunk = schedule.steps[i].first;
      stream = static_cast<int>(i) % streams.num_compute_streams();
      // This order also holds if the streams are branches of a graph: a GEMM is ordered after the
      // last but one before it. Of the first two, the second waits for begin() and for no flags, so
      // it usually starts a moment after the first. That is not guaranteed, but makes graphs
      // faster.
      if (i == 1 && streams.num_compute_streams() > 1 && streams.is_captured())
        session.wait_for_flags(stream, {});
      if (i > 1 && streams.num_compute_streams() > 2) streams.after(stream, computed[i - 2]);
      for (CheckedGemm& product : products[i]) session.gemm(stream, product);
      if (i >= schedule.exchanges.size()) continue;  // this rank's chunk: nothing waits for it
      computed.push_back(streams.mark(stream));
      const Exchange& exchange = schedule.exchanges[i];
      streams.after(comm, computed.back());
      session.exchange(comm, {.dst = exchange.dst,
                              .send = rows_of_rank(problem.partial, rows, chunk),
                              .dst_offset_bytes =
                                  slots_offset + rank * rows.largest() * row_bytes(problem.partial),
                              .flag = rank,
                              .src = exchange.src,
                              .recv = sum.parts[exchange.src],
                              .recv_flag = exchange.src});
    }
    if (problem.meanwhile) streams.run(0, "meanwhile", problem.meanwhile);
    // On the stream of this rank's GEMM, which is the last one.
    session.wait_for_flags(stream, flags_of_others(channel.group(), 0));
    if (length > 0) session.sum(stream, sum);
  };
  channel.operate(op, body,
                  {.entry = EntryPayload{.rows = rows.rows},
                   .single_stream = problem.single_stream,
                   .begin_on_comm_stream = channel.is_captured()});
  largest.finish();
}

}  // namespace torch_overlap
