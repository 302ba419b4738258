#include <ATen/record_function.h>

#include <optional>

#include "torch_overlap/overlap/execute.h"
#include "torch_overlap/overlap/execute_parts.h"

namespace torch_overlap {
namespace {

// A copy of what is gathered, once all of it is there; the own rows from where they came.
void put_copy(Lanes& lanes, int lane, const GatheredRows& data, const RowShare& rows, int rank) {
  if (!data.copy.defined()) return;
  const int64_t begin = rows.begin(rank);
  const int64_t end = begin + rows.length(rank);
  lanes.run(lane, "copy", [&] {
    data.copy.narrow(0, begin, end - begin).copy_(data.own);
    for (const auto& [first, last] : {std::pair(int64_t{0}, begin), std::pair(end, rows.rows)}) {
      if (first == last) continue;
      data.copy.narrow(0, first, last - first).copy_(data.all.narrow(0, first, last - first));
    }
  });
}

}  // namespace

void run_fused_gather(std::string_view op, OverlapChannel& channel, const GatherGemm& problem) {
  const int rank = channel.group().rank();
  const int size = channel.group().size();
  FusedGather fused{.gemm = {},
                    .rows = problem.rows,
                    .own = problem.data.own,
                    .gathered = problem.data.all,
                    .own_scales = problem.scales.own,
                    .gathered_scales = problem.scales.all,
                    .order = {}};
  for (const ChunkStep& step : gather_schedule(rank, size, GatherOrder::direct).steps) {
    fused.order.push_back(step.first);
  }
  for (const GemmArgs& args : problem.gemms) check_gemm(op, args);
  TORCH_OVERLAP_CHECK(!channel.shares_devices(), kUnsupported, op,
                      ": expected a GPU of its own for each rank, got ranks that share one, where "
                      "copies find no SM beside a kernel that waits for them");
  // One kernel sends and multiplies; several products share what copy engines bring.
  if (problem.gemms.size() == 1) fused.senders = channel.device().gather_senders(fused);
  const auto body = [&](OverlapChannel::Session& session) {
    if (fused.senders == 0) {
      // Before the products, which wait for it and leave no room for anything that is not a copy.
      // The flag of a chunk comes behind its scales: a lane does one thing after the other.
      const int comm = session.lanes.comm();
      if (problem.scales.all.defined()) {
        put_all_gather(channel, session, comm, problem.rows, problem.scales, size);
      }
      put_all_gather(channel, session, comm, problem.rows, problem.data, 0);
    }
    for (const GemmArgs& args : problem.gemms) {
      fused.gemm = args;
      session.lanes.run(0, "fused", [&] { channel.device().run_fused(session.transport, fused); });
    }
    for (const GatheredRows& part : {problem.data, problem.scales}) {
      put_copy(session.lanes, 0, part, problem.rows, rank);
    }
  };
  std::optional<Begin> begin;
  if (fused.senders == 0) begin = Begin{.rows = problem.rows.rows};
  channel.operate(op, body,
                  {.begin = begin, .as_one = problem.as_one, .fills_device = fused.senders > 0});
}

namespace {

// The products of pieces of each chunk, by exchange.
std::vector<std::vector<CheckedGemm>> products_of_pieces(std::string_view op,
                                                         const CheckedGemm& all,
                                                         const FusedScatter& fused,
                                                         const std::vector<Exchange>& exchanges) {
  std::vector<std::vector<CheckedGemm>> products;
  for (const Exchange& exchange : exchanges) {
    auto& of_chunk = products.emplace_back();
    for (const Piece& piece : fused.pieces_of(exchange.give)) {
      of_chunk.emplace_back(op,
                            all.rows(fused.rows.begin(exchange.give) + piece.begin, piece.length));
    }
  }
  return products;
}

// The products of the other ranks' rows, piece by piece, each sent to its owner when it is there;
// then the kernel that computes the own ones and takes in what comes. It comes behind all of these
// products, and the begin: no block may wait for another rank while they still want its SM.
void put_sent_pieces(OverlapChannel::Session& session, const ScatterGemm& problem,
                     const FusedScatter& fused, const std::vector<Exchange>& exchanges,
                     std::vector<std::vector<CheckedGemm>>& products) {
  const OverlapChannel& channel = session.channel;
  const int rank = channel.group().rank();
  const int size = channel.group().size();
  Lanes& lanes = session.lanes;
  const int comm = lanes.comm();
  const int64_t row = row_bytes(problem.partial);
  const int64_t at = problem.at + rank * problem.rows.largest() * row;
  for (size_t i = 0; i < exchanges.size(); ++i) {
    const auto rows = rows_of_rank(problem.partial, problem.rows, exchanges[i].give);
    const auto pieces = fused.pieces_of(exchanges[i].give);
    for (size_t j = 0; j < pieces.size(); ++j) {
      session.gemm(0, products[i][j]);
      lanes.after(comm, lanes.mark(0));
      const int flag = static_cast<int>(j) * size;
      session.exchange(comm, {.to = exchanges[i].to,
                              .give = row_view(rows, pieces[j].begin, pieces[j].length),
                              .at = at + pieces[j].begin * row,
                              .flag = flag + rank,
                              .from = exchanges[i].from,
                              .get = {},
                              .get_flag = flag + exchanges[i].from});
    }
  }
  session.behind_begin(0);
  lanes.run(0, "fused", [&] { channel.device().run_fused(session.transport, fused); });
}

}  // namespace

void run_fused_scatter(std::string_view op, OverlapChannel& channel, const ScatterGemm& problem) {
  FusedScatter fused{.gemm = problem.gemms.at(0),
                     .rows = problem.rows,
                     .at = problem.at,
                     .out = problem.out,
                     .factor = problem.factor,
                     .ranks_share_k = problem.ranks_share_k};
  check_gemm(op, fused.gemm);
  const int rank = channel.group().rank();
  const int size = channel.group().size();
  // Copies within a device need SMs, which the kernel does not leave them.
  if (!channel.shares_devices()) {
    fused.pieces =
        channel.device().scatter_pieces(channel.transport(), fused, channel.flags() / size);
  }
  std::vector<Exchange> exchanges;
  std::vector<std::vector<CheckedGemm>> products;
  if (fused.pieces > 0) {
    fused.gemm.beside_transfers = true;
    const CheckedGemm all(op, fused.gemm);
    exchanges = scatter_schedule(rank, size).exchanges;
    products = products_of_pieces(op, all, fused, exchanges);
    fused.gemm = all.rows(problem.rows.begin(rank), problem.rows.length(rank));
  }
  fused.gemm.epilogue.bias = problem.bias;
  const auto body = [&](OverlapChannel::Session& session) {
    if (fused.pieces > 0) {
      return put_sent_pieces(session, problem, fused, exchanges, products);
    }
    RECORD_USER_SCOPE("torch_overlap::fused");  // on the caller's stream: no lane is begun for it
    channel.device().run_fused(session.transport, fused);
  };
  std::optional<Begin> begin;
  if (fused.pieces > 0) begin = Begin{.rows = problem.rows.rows, .way = Way::pieces(fused.pieces)};
  // Ranks that share a device may be threads of this process, and would wait for each other's turn.
  channel.operate(
      op, body, {.begin = begin, .begins_beside = true, .fills_device = !channel.shares_devices()});
}

void run_fused_reduce(std::string_view op, OverlapChannel& channel, const DirectGemm& problem) {
  FusedReduce fused{.gemm = problem.gemm,
                    .rows = problem.rows,
                    .bytes = channel.bytes(),
                    .out = problem.out,
                    .factor = problem.factor,
                    .bias = problem.bias};
  fused.gemm.out = problem.out;
  check_gemm(op, fused.gemm);
  channel.operate(op,
                  [&](OverlapChannel::Session& session) {
                    session.lanes.run(
                        0, "fused", [&] { channel.device().run_fused(session.transport, fused); });
                  },
                  {.begin = {}, .as_one = true});
}

}  // namespace torch_overlap
