#include <ATen/ops/add.h>

#include <optional>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/overlap/execute.h"
#include "torch_overlap/overlap/execute_common.h"

namespace torch_overlap {
namespace {

// Gathers the sums of all parts, which every rank has stored at sums_offset.
void enqueue_gather_of_sums(OverlapChannel::Session& session, const LowLatencySum& sum) {
  for (int rank = 0; rank < sum.rows.size; ++rank) {
    const int64_t length = sum.rows.length(rank);
    if (length == 0) continue;
    const auto there = session.transport.peer(rank, sum.sums_offset, {length, sum.columns()},
                                              sum.out.scalar_type());
    session.streams.run(
        0, "copy", [to = rows_of_rank(sum.out, sum.rows, rank), there, bias = sum.bias]() mutable {
          if (bias.defined()) {
            at::add_out(to, there, bias);
          } else {
            to.copy_(there);
          }
        });
  }
}

// Fallback for devices without a kernel. After the second barrier this rank has read everything it
// needs, and the others have read what they need from it.
void enqueue_low_latency_sum(OverlapChannel& channel, OverlapChannel::Session& session,
                             const LowLatencySum& sum) {
  const int rank = channel.group().rank();
  const int size = sum.rows.size;
  const bool one_shot = sum.is_one_shot();
  const bool whole = sum.is_all_reduce && one_shot;
  const int64_t begin = whole ? 0 : sum.rows.begin(rank);
  const int64_t length = whole ? sum.rows.rows : sum.rows.length(rank);
  const auto dtype = sum.out.scalar_type();
  enqueue_barrier(channel, session, 0, 0);
  if (length > 0) {
    SumArgs args{
        .out = one_shot ? sum.out : channel.data(sum.sums_offset, {length, sum.columns()}, dtype),
        .factor = sum.factor,
        .bias = one_shot ? sum.bias : at::Tensor()};
    for (int peer = 0; peer < size; ++peer) {
      args.parts.push_back(session.transport.peer(peer, sum.at + begin * sum.row_bytes(),
                                                  {length, sum.columns()}, dtype));
    }
    session.sum(0, args);
  }
  enqueue_barrier(channel, session, 0, size);
  if (!one_shot) enqueue_gather_of_sums(session, sum);
}

}  // namespace

void run_low_latency_sum(std::string_view op, OverlapChannel& channel, const ReduceGemm& problem) {
  const int size = channel.group().size();
  const LowLatencySum sum{.rows = problem.rows,
                          .at = 0,
                          .sums_offset = low_latency_sums_offset(channel.bytes(), size),
                          .is_all_reduce = problem.is_all_reduce,
                          .out = problem.out,
                          .factor = problem.factor,
                          .bias = problem.bias};
  TORCH_OVERLAP_CHECK(sum.rows.rows * sum.row_bytes() <= sum.sums_offset, kValue, op,
                      ": expected a channel with room for ", sum.rows.rows, " rows of ",
                      sum.row_bytes(), " bytes, got one of ", channel.bytes(), " bytes");
  GemmArgs args = problem.gemm;
  args.out = channel.data(sum.at, {sum.rows.rows, sum.columns()}, problem.out.scalar_type());
  CheckedGemm product(op, std::move(args));
  OverlapDevice& device = channel.device();
  const bool has_kernel = device.has_kernel(sum);
  channel.operate(
      op,
      [&](OverlapChannel::Session& session) {
        session.gemm(0, product);
        if (has_kernel) {
          session.streams.run(0, "low_latency",
                              [&] { device.run_low_latency(session.transport, sum); });
        } else {
          enqueue_low_latency_sum(channel, session, sum);
        }
      },
      {.entry = has_kernel ? std::nullopt : std::optional(sum.entry()), .single_stream = true});
}

void run_low_latency_gather(std::string_view op, OverlapChannel& channel,
                            const GatherGemm& problem) {
  const int rank = channel.group().rank();
  const GatheredRows& data = problem.data;
  const LowLatencyGather gather{
      .rows = problem.rows, .own = data.own, .at = channel.offset_of(data.all)};
  std::vector<CheckedGemm> products;
  for (const GemmArgs& args : problem.gemms) products.emplace_back(op, args);
  OverlapDevice& device = channel.device();
  const bool has_kernel = device.has_kernel(gather);
  channel.operate(
      op,
      [&](OverlapChannel::Session& session) {
        OverlapStreams& streams = session.streams;
        if (has_kernel) {
          streams.run(0, "low_latency", [&] { device.run_low_latency(session.transport, gather); });
        } else {
          enqueue_all_gather(channel, session, 0, problem.rows, data, 0);
          streams.run(0, "copy",
                      [&] { rows_of_rank(data.all, problem.rows, rank).copy_(data.own); });
          session.wait_for_flags(0, flags_of_others(channel.group(), 0));
        }
        for (CheckedGemm& product : products) session.gemm(0, product);
        if (data.copy.defined()) streams.run(0, "copy", [&] { data.copy.copy_(data.all); });
      },
      {.entry = has_kernel ? std::nullopt : std::optional(EntryPayload{.rows = problem.rows.rows}),
       .single_stream = true});
}

}  // namespace torch_overlap
