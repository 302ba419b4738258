#include <ATen/record_function.h>

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
  const auto body = [&](OverlapChannel::Session& session) {
    // Before the products, which wait for it and leave no room for anything that is not a copy. The
    // flag of a chunk comes behind its scales: a lane does one thing after the other.
    const int comm = session.lanes.comm();
    if (problem.scales.all.defined()) {
      put_all_gather(channel, session, comm, problem.rows, problem.scales, size);
    }
    put_all_gather(channel, session, comm, problem.rows, problem.data, 0);
    for (const GemmArgs& args : problem.gemms) {
      fused.gemm = args;
      session.lanes.run(0, "fused", [&] { channel.device().run_fused(session.transport, fused); });
    }
    for (const GatheredRows& part : {problem.data, problem.scales}) {
      put_copy(session.lanes, 0, part, problem.rows, rank);
    }
  };
  channel.operate(op, body, {.rows = problem.rows.rows, .as_one = problem.as_one});
}

void run_fused_scatter(std::string_view op, OverlapChannel& channel, const ScatterGemm& problem) {
  FusedScatter fused{.gemm = problem.gemms.at(0),
                     .rows = problem.rows,
                     .at = problem.at,
                     .out = problem.out,
                     .factor = problem.factor};
  check_gemm(op, fused.gemm);
  fused.gemm.epilogue.bias = problem.bias;
  const auto body = [&](OverlapChannel::Session& session) {
    RECORD_USER_SCOPE("torch_overlap::fused");  // on the caller's stream: no lane is begun for it
    channel.device().run_fused(session.transport, fused);
  };
  channel.operate(op, body, {.rows = problem.rows.rows});
}

}  // namespace torch_overlap
