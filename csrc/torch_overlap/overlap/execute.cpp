#include "torch_overlap/overlap/execute.h"

#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

int64_t row_bytes(const at::Tensor& tensor) {
  return tensor.size(1) * static_cast<int64_t>(tensor.element_size());
}

at::Tensor rows_of_rank(const at::Tensor& tensor, const RowShare& rows, int rank) {
  return tensor.narrow(0, rows.begin(rank), rows.length(rank));
}

Piece rows_of_step(const RowShare& rows, const ChunkStep& step) {
  const int64_t begin = rows.begin(step.first);
  return {begin, rows.begin(step.first + step.count) - begin};
}

// Of `size` flags from `first` on, those of the other ranks.
std::vector<int> flags_of_others(const OverlapGroup& group, int first) {
  std::vector<int> flags;
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer != group.rank()) flags.push_back(first + peer);
  }
  return flags;
}

// The all-gather of `own` to `gathered`, which begins where the channel's data does: from its owner
// to everybody. Flag r tells of the chunk of rank r.
void put_all_gather(OverlapChannel& channel, OverlapChannel::Session& session, int lane,
                    const RowShare& rows, const at::Tensor& own, const at::Tensor& gathered) {
  const int rank = channel.group().rank();
  for (const Exchange& exchange :
       gather_schedule(rank, channel.group().size(), GatherOrder::direct).exchanges) {
    session.exchange(lane, {.to = exchange.to,
                            .give = own,
                            .at = rows.begin(rank) * row_bytes(gathered),
                            .flag = rank,
                            .from = exchange.from,
                            .get = rows_of_rank(gathered, rows, exchange.from),
                            .get_flag = exchange.from});
  }
}

// One reduce-scatter of what lies at `at` of every rank's data: [rows, columns], contiguous.
struct ScatterPart {
  RowShare rows;
  int64_t columns;
  at::ScalarType dtype;
  int64_t at;
  int flags;    // the first of `size` flags
  SumArgs sum;  // all but the parts
};

// Directly: every rank says when its part is ready, and each sums its rows from where they lie.
// Else they are sent to who sums them; `received` is room for them.
void put_reduce_scatter(OverlapChannel& channel, OverlapChannel::Session& session, int lane,
                        const ScatterPart& part, const at::Tensor& received) {
  const int rank = channel.group().rank();
  const int size = channel.group().size();
  const int64_t length = part.rows.length(rank);
  const int64_t row = part.columns * static_cast<int64_t>(c10::elementSize(part.dtype));
  const Transport& transport = session.transport;
  SumArgs sum = part.sum;
  const auto others = flags_of_others(channel.group(), part.flags);
  if (transport.is_direct()) {
    session.post(lane, part.flags);
    session.arrived(lane, others);
    for (int peer = 0; peer < size; ++peer) {
      sum.parts.push_back(transport.peer(peer, part.at + part.rows.begin(rank) * row,
                                         {length, part.columns}, part.dtype));
    }
  } else {
    const auto mine = channel.data(part.at, {part.rows.rows, part.columns}, part.dtype);
    for (const Exchange& exchange : scatter_schedule(rank, size).exchanges) {
      session.exchange(lane, {.to = exchange.to,
                              .give = rows_of_rank(mine, part.rows, exchange.to),
                              .at = 0,
                              .flag = part.flags + rank,
                              .from = exchange.from,
                              .get = received[exchange.from],
                              .get_flag = part.flags + exchange.from});
    }
    session.arrived(lane, others);
    for (int peer = 0; peer < size; ++peer) {
      sum.parts.push_back(peer == rank ? rows_of_rank(mine, part.rows, rank) : received[peer]);
    }
  }
  if (length == 0) return;
  session.lanes.run(lane, "sum", [&device = channel.device(), sum] { device.sum(sum); });
}

// What others read directly may be written again after the operation: so it ends when all have.
void put_end_of_reads(OverlapChannel& channel, OverlapChannel::Session& session, int lane,
                      int flags) {
  if (!session.transport.is_direct()) return;
  session.post(lane, flags);
  session.arrived(lane, flags_of_others(channel.group(), flags));
}

// Room for what put_reduce_scatter() receives; undefined where it receives nothing.
at::Tensor room_for(const OverlapChannel& channel, const RowShare& rows, int64_t columns,
                    at::ScalarType dtype) {
  if (channel.transport().is_direct()) return {};
  const auto& group = channel.group();
  return at::empty({group.size(), rows.length(group.rank()), columns},
                   at::TensorOptions().dtype(dtype).device(group.device()));
}

// The largest absolute value of products that are computed one by one: each has a place of its own.
class AmaxOfParts {
 public:
  AmaxOfParts(at::Tensor whole, size_t parts) : whole_(std::move(whole)) {
    if (whole_.defined()) parts_ = at::zeros({static_cast<int64_t>(parts)}, whole_.options());
  }
  void next(GemmArgs& part) {
    if (whole_.defined()) part.out_amax = parts_.narrow(0, next_++, 1);
  }
  // On the caller's stream, after the operation.
  void finish() const {
    if (whole_.defined()) whole_.copy_(parts_.amax().view(whole_.sizes()));
  }

 private:
  at::Tensor whole_;
  at::Tensor parts_;
  int64_t next_ = 0;
};

// Copies of what is gathered, once all of it is there; the own rows from where they came.
void put_copy(Lanes& lanes, int lane, const GatherGemm& problem, int rank) {
  if (!problem.copy.defined()) return;
  const int64_t begin = problem.rows.begin(rank);
  const int64_t end = begin + problem.rows.length(rank);
  lanes.run(lane, "copy", [&problem, begin, end] {
    const int64_t rows = problem.rows.rows;
    problem.copy.narrow(0, begin, end - begin).copy_(problem.own);
    for (const auto& [first, last] : {std::pair(int64_t{0}, begin), std::pair(end, rows)}) {
      if (first == last) continue;
      problem.copy.narrow(0, first, last - first)
          .copy_(problem.gathered.narrow(0, first, last - first));
    }
  });
}

void run_fused_gather(std::string_view op, OverlapChannel& channel, const GatherGemm& problem) {
  const int rank = channel.group().rank();
  FusedGather fused{.gemm = {},
                    .rows = problem.rows,
                    .own = problem.own,
                    .gathered = problem.gathered,
                    .order = {}};
  for (const ChunkStep& step :
       gather_schedule(rank, channel.group().size(), GatherOrder::direct).steps) {
    fused.order.push_back(step.first);
  }
  for (const GemmArgs& args : problem.gemms) check_gemm(op, args);
  channel.operate(op, [&](OverlapChannel::Session& session) {
    // Before the products, which wait for it and leave no room for anything that is not a copy.
    put_all_gather(channel, session, session.lanes.comm(), problem.rows, problem.own,
                   problem.gathered);
    for (const GemmArgs& args : problem.gemms) {
      fused.gemm = args;
      session.lanes.run(0, "fused", [&] { channel.device().run_fused(session.transport, fused); });
    }
    put_copy(session.lanes, 0, problem, rank);
  });
}

void run_fused_scatter(std::string_view op, OverlapChannel& channel, const ScatterGemm& problem) {
  check_gemm(op, problem.gemms.at(0));
  const FusedScatter fused = [&] {
    FusedScatter all{.gemm = problem.gemms.at(0),
                     .rows = problem.rows,
                     .at = problem.at,
                     .out = problem.out,
                     .factor = problem.factor};
    all.gemm.epilogue.bias = problem.bias;
    return all;
  }();
  channel.operate(op, [&](OverlapChannel::Session& session) {
    session.lanes.run(0, "fused", [&] { channel.device().run_fused(session.transport, fused); });
  });
}

}  // namespace

void run_gather_gemm(std::string_view op, OverlapChannel& channel, const GatherGemm& problem) {
  if (problem.fused) return run_fused_gather(op, channel, problem);
  const int rank = channel.group().rank();
  const int size = channel.group().size();
  const RowShare& rows = problem.rows;
  const auto schedule = gather_schedule(rank, size, problem.order);
  const auto slot = rows_of_rank(problem.gathered, rows, rank);
  const bool in_place = problem.own.data_ptr() == slot.data_ptr();
  // What is forwarded, or multiplied together with a neighbour, must lie where it is gathered.
  const bool needs_slot = !in_place && problem.order == GatherOrder::pairs;
  const at::Tensor own = needs_slot ? slot : problem.own;
  std::vector<GemmArgs> gemms = problem.gemms;
  std::vector<AmaxOfParts> largest;
  for (GemmArgs& whole : gemms) {
    largest.emplace_back(std::exchange(whole.out_amax, {}), schedule.steps.size());
  }
  // By step; checked before anything is sent.
  std::vector<std::vector<GemmArgs>> products(schedule.steps.size());
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    const Piece piece = rows_of_step(rows, schedule.steps[i]);
    if (piece.length == 0) continue;
    for (size_t j = 0; j < gemms.size(); ++j) {
      GemmArgs part = gemm_rows(op, gemms[j], piece.begin, piece.length);
      if (schedule.steps[i] == ChunkStep{rank}) part.lhs.data = own;
      largest[j].next(part);
      check_gemm(op, part);
      products[i].push_back(std::move(part));
    }
  }
  channel.operate(op, [&](OverlapChannel::Session& session) {
    Lanes& lanes = session.lanes;
    const int comm = lanes.comm();
    if (needs_slot) {
      lanes.run(comm, "copy", [slot, from = problem.own] { slot.copy_(from); });
    }
    const auto copied = lanes.mark(comm);
    for (const Exchange& exchange : schedule.exchanges) {
      if (exchange.give != rank) session.arrived(comm, {exchange.give});
      session.exchange(comm, {.to = exchange.to,
                              .give = exchange.give == rank
                                          ? own
                                          : rows_of_rank(problem.gathered, rows, exchange.give),
                              .at = rows.begin(exchange.give) * row_bytes(problem.gathered),
                              .flag = exchange.give,
                              .from = exchange.from,
                              .get = rows_of_rank(problem.gathered, rows, exchange.get),
                              .get_flag = exchange.get});
    }
    for (size_t i = 0; i < schedule.steps.size(); ++i) {
      const auto [first, count] = schedule.steps[i];
      const int lane = static_cast<int>(i) % lanes.computes();
      std::vector<int> flags;
      for (int chunk = first; chunk < first + count; ++chunk) {
        if (chunk != rank) flags.push_back(chunk);
      }
      if (needs_slot && static_cast<int>(flags.size()) < count) lanes.after(lane, copied);
      if (!flags.empty()) session.arrived(lane, flags);
      for (const GemmArgs& product : products[i]) session.gemm(lane, op, product);
      const auto [begin, length] = rows_of_step(rows, schedule.steps[i]);
      if (!problem.copy.defined() || length == 0) continue;
      const bool from_own = schedule.steps[i] == ChunkStep{rank};
      lanes.run(
          lane, "copy",
          [to = problem.copy.narrow(0, begin, length),
           from = from_own ? own : problem.gathered.narrow(0, begin, length)] { to.copy_(from); });
    }
  });
  for (const auto& one : largest) one.finish();
}

void run_scatter_gemm(std::string_view op, OverlapChannel& channel, const ScatterGemm& problem) {
  if (problem.fused) return run_fused_scatter(op, channel, problem);
  const int rank = channel.group().rank();
  const int size = channel.group().size();
  const RowShare& rows = problem.rows;
  const int64_t columns = problem.partial.size(1);
  const int64_t length = rows.length(rank);
  const auto schedule = scatter_schedule(rank, size);
  const int64_t slot = rows.largest() * row_bytes(problem.partial);
  SumArgs sum{.out = problem.out,
              .parts = {},
              .scale_inv = problem.scale_inv,
              .factor = problem.factor,
              .bias = problem.bias};
  for (int peer = 0; peer < size; ++peer) {
    sum.parts.push_back(peer == rank ? rows_of_rank(problem.partial, rows, rank)
                                     : channel.data(problem.at + peer * slot, {length, columns},
                                                    problem.partial.scalar_type()));
  }
  std::vector<GemmArgs> gemms = problem.gemms;
  AmaxOfParts largest(std::exchange(gemms.at(0).out_amax, {}), schedule.steps.size());
  // By step; checked before anything is sent.
  std::vector<std::vector<GemmArgs>> products(schedule.steps.size());
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    const Piece piece = rows_of_step(rows, schedule.steps[i]);
    if (piece.length == 0) continue;
    for (size_t j = 0; j < gemms.size(); ++j) {
      GemmArgs part = gemm_rows(op, gemms[j], piece.begin, piece.length);
      part.accumulate |= j > 0;
      if (j == 0) largest.next(part);
      check_gemm(op, part);
      products[i].push_back(std::move(part));
    }
  }
  channel.operate(op, [&](OverlapChannel::Session& session) {
    Lanes& lanes = session.lanes;
    const int comm = lanes.comm();
    int lane = 0;
    std::vector<Lanes::Mark> computed;
    for (size_t i = 0; i < schedule.steps.size(); ++i) {
      const int chunk = schedule.steps[i].first;
      lane = static_cast<int>(i) % lanes.computes();
      // In this order also where lanes are branches of a graph: a product comes behind the one
      // before the last. Of the first two the second begins a moment later, behind a wait for
      // nothing; that is not sure, but usual, and makes graphs quicker.
      if (i == 1 && lanes.computes() > 1) session.arrived(lane, {});
      if (i > 1 && lanes.computes() > 2) lanes.after(lane, computed[i - 2]);
      for (const GemmArgs& product : products[i]) session.gemm(lane, op, product);
      computed.push_back(lanes.mark(lane));
      if (i >= schedule.exchanges.size()) continue;
      const Exchange& exchange = schedule.exchanges[i];
      lanes.after(comm, computed.back());
      session.exchange(comm, {.to = exchange.to,
                              .give = rows_of_rank(problem.partial, rows, chunk),
                              .at = problem.at + rank * slot,
                              .flag = rank,
                              .from = exchange.from,
                              .get = sum.parts[exchange.from],
                              .get_flag = exchange.from});
    }
    // On the lane of the own product, which is the last.
    session.arrived(lane, flags_of_others(channel.group(), 0));
    if (length > 0) {
      lanes.run(lane, "sum", [&device = channel.device(), sum] { device.sum(sum); });
    }
  });
  largest.finish();
}

BackgroundGather::BackgroundGather(std::string_view op, OverlapChannel& channel,
                                   const RowShare& rows, const at::Tensor& own,
                                   const at::Tensor& gathered)
    : flags_(flags_of_others(channel.group(), 0)) {
  operation_.emplace(op, channel);
  auto& session = operation_->session();
  const int comm = session.lanes.comm();
  try {
    put_all_gather(channel, session, comm, rows, own, gathered);
    session.lanes.run(
        comm, "copy",
        [to = rows_of_rank(gathered, rows, channel.group().rank()), own] { to.copy_(own); });
  } catch (...) {
    operation_->fail();
    throw;
  }
}

void BackgroundGather::finish() {
  auto& session = operation_->session();
  try {
    session.arrived(session.lanes.comm(), flags_);
  } catch (...) {
    operation_->fail();
    throw;
  }
  operation_->finish();
}

void run_pipelined_gemm(std::string_view op, OverlapChannel& channel,
                        const PipelinedGemm& problem) {
  const int size = channel.group().size();
  // 16 bytes in a row of a piece, for kernels that move as many at a time.
  const auto element = static_cast<int64_t>(c10::elementSize(problem.dtype));
  const auto found = pieces(problem.columns, problem.splits, 16 / std::min<int64_t>(element, 16));
  const int count = static_cast<int>(found.size());
  const auto received =
      room_for(channel, problem.rows, found.empty() ? 0 : found[0].length, problem.dtype);
  std::vector<at::Tensor> blocks;
  std::vector<GemmArgs> products;
  GemmArgs whole = problem.gemm;
  AmaxOfParts largest(std::exchange(whole.out_amax, {}), found.size());
  for (const Piece& piece : found) {
    blocks.push_back(channel.data(piece.begin * problem.rows.rows * element,
                                  {problem.rows.rows, piece.length}, problem.dtype));
    products.push_back(gemm_columns(op, whole, piece.begin, piece.length));
    products.back().out = blocks.back();
    largest.next(products.back());
    check_gemm(op, products.back());
  }
  channel.operate(op, [&](OverlapChannel::Session& session) {
    Lanes& lanes = session.lanes;
    const int comm = lanes.comm();
    std::vector<Lanes::Mark> made(count);
    for (const auto [is_product, i] : pipeline_order(count, problem.overlap_first_gemm)) {
      if (is_product) {
        const int lane = i % lanes.computes();
        session.gemm(lane, op, products[i]);
        made[i] = lanes.mark(lane);
        continue;
      }
      lanes.after(comm, made[i]);
      const Piece& piece = found[i];
      at::Tensor room;
      if (received.defined()) {
        room = received.flatten()
                   .narrow(0, 0, size * received.size(1) * piece.length)
                   .view({size, received.size(1), piece.length});
      }
      put_reduce_scatter(channel, session, comm,
                         {.rows = problem.rows,
                          .columns = piece.length,
                          .dtype = problem.dtype,
                          .at = piece.begin * problem.rows.rows * element,
                          .flags = i * size,
                          .sum = {.out = problem.out.narrow(1, piece.begin, piece.length),
                                  .parts = {},
                                  .scale_inv = problem.scale_inv,
                                  .factor = 1,
                                  .bias = problem.bias.defined()
                                              ? problem.bias.narrow(0, piece.begin, piece.length)
                                              : problem.bias,
                                  // Nothing is left to overlap with the last.
                                  .blocks = i + 1 == count ? 2 * problem.blocks : problem.blocks,
                                  .cluster = problem.cluster}},
                         room);
    }
    put_end_of_reads(channel, session, comm, count * size);
  });
  largest.finish();
}

void run_bulk_gemm(std::string_view op, OverlapChannel& channel, const BulkGemm& problem) {
  const int rank = channel.group().rank();
  const int size = channel.group().size();
  const RowShare& rows = problem.rows;
  const auto data = channel.data(0, {rows.rows, problem.columns}, problem.dtype);
  const auto received =
      problem.gathers ? at::Tensor() : room_for(channel, rows, problem.columns, problem.dtype);
  for (const GemmArgs& args : problem.gemms) check_gemm(op, args);
  channel.operate(
      op,
      [&](OverlapChannel::Session& session) {
        Lanes& lanes = session.lanes;
        const int comm = lanes.comm();
        if (problem.gathers) {
          put_all_gather(channel, session, comm, rows, rows_of_rank(data, rows, rank), data);
          if (size > 1) session.arrived(comm, flags_of_others(channel.group(), 0));
        } else {
          put_reduce_scatter(channel, session, comm,
                             {.rows = rows,
                              .columns = problem.columns,
                              .dtype = problem.dtype,
                              .at = 0,
                              .flags = 0,
                              .sum = {.out = problem.out,
                                      .parts = {},
                                      .scale_inv = problem.scale_inv,
                                      .factor = 1,
                                      .bias = {},
                                      .blocks = problem.blocks,
                                      .cluster = problem.cluster}},
                             received);
          put_end_of_reads(channel, session, comm, size);
        }
        for (size_t i = 0; i < problem.gemms.size(); ++i) {
          session.gemm(static_cast<int>(i) % lanes.computes(), op, problem.gemms[i]);
        }
      },
      problem.lender);
}

}  // namespace torch_overlap
