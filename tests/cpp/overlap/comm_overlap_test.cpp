#include "torch_overlap/overlap/comm_overlap.h"

#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>

#include "comm/local_ranks.h"
#include "symm/thread_ranks.h"
#include "torch_overlap/overlap/registry.h"

// The classes in C++: over a communicator, and over two callbacks. Integers in fp64 are exact.

namespace torch_overlap {
namespace {

using testing::contains;
using testing::error_of;
using testing::expect_equal;
using testing::poisoned;
using testing::sample;

using Type = CommOverlapType;
using Method = CommOverlapMethod;
using Group = std::shared_ptr<OverlapGroup>;
using Buffer = std::shared_ptr<CommOverlapCore>;

constexpr int kGroup = 3;
constexpr int64_t kRows = 7;  // the ranks have 3, 3 and 1
constexpr int64_t kFeatures = 8;
constexpr int64_t kOutputs = 6;

CommOverlapConfig config_of(Type type, Method method, int64_t columns = kFeatures) {
  auto config = CommOverlapConfig::defaults(type, method, kGroup);
  config.buffer_shape = {kRows, columns};
  config.buffer_dtype = at::kDouble;
  return config;
}

// y = x w^T
GemmArgs product_of(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& out = {}) {
  GemmArgs args;
  args.lhs.data = x;
  args.rhs = {.data = weight, .transposed = true};
  args.out = out;
  return args;
}

at::Tensor doubles(int rank, int salt, at::IntArrayRef sizes) {
  return sample(rank, salt, sizes, at::kDouble);
}

at::Tensor own_rows(const Buffer& buffer, const at::Tensor& rows) {
  const auto share = buffer->rows();
  return rows.narrow(0, share.begin(buffer->rank()), share.length(buffer->rank())).contiguous();
}

at::Tensor nothing_yet(int64_t rows, int64_t columns) {
  return poisoned({rows, columns}, at::kDouble);
}

void gathers(const Group& group, bool atomic) {
  auto config = config_of(Type::AG, Method::RING_EXCHANGE);
  config.atomic_gemm = atomic;
  const auto buffer = CommOverlapCore::create(group, config);
  EXPECT_TRUE(buffer->is_p2p_overlap());
  EXPECT_EQ(buffer->is_atomic_gemm(), atomic);
  for (int turn = 0; turn < 3; ++turn) {
    const auto x = doubles(kGroup, turn, {kRows, kFeatures});
    const auto weight = doubles(group->rank(), 10 + turn, {kOutputs, kFeatures});
    const auto out = nothing_yet(kRows, kOutputs);
    const auto copy = nothing_yet(kRows, kFeatures);
    const auto args = product_of(own_rows(buffer, x), weight, out);
    atomic ? buffer->atomic_gemm_overlap_ag(args, copy) : buffer->split_overlap_ag(args, copy);
    expect_equal(out, at::mm(x, weight.t()));
    expect_equal(copy, x);
  }
}

void scatters(const Group& group, Method method, bool atomic) {
  auto config = config_of(Type::RS, method, kOutputs);
  config.atomic_gemm = atomic;
  const auto buffer = CommOverlapCore::create(group, config);
  for (int turn = 0; turn < 3; ++turn) {
    at::Tensor total = at::zeros({kRows, kOutputs}, at::kDouble);
    GemmArgs mine;
    for (int rank = 0; rank < kGroup; ++rank) {
      const auto x = doubles(rank, turn, {kRows, kFeatures});
      const auto weight = doubles(rank, 10 + turn, {kOutputs, kFeatures});
      total += at::mm(x, weight.t());
      if (rank == group->rank()) mine = product_of(x, weight);
    }
    const auto wanted = own_rows(buffer, total);
    const auto out = nothing_yet(wanted.size(0), kOutputs);
    atomic ? buffer->atomic_gemm_overlap_rs(mine, out) : buffer->split_overlap_rs(mine, out);
    expect_equal(out, wanted);
  }
}

void overlaps_in_bulk(const Group& group) {
  const auto buffer = CommOverlapCore::create(group, config_of(Type::NONE, Method::BULK));
  EXPECT_FALSE(buffer->is_p2p_overlap());
  const auto x = doubles(group->rank(), 0, {5, 4});
  const auto weight = doubles(group->rank(), 1, {3, 4});
  const auto rows = doubles(kGroup, 2, {kRows, kFeatures});
  auto out = nothing_yet(5, 3);
  buffer->copy_into_buffer(own_rows(buffer, rows), /*local_chunk=*/true);
  buffer->bulk_overlap(product_of(x, weight, out), Type::AG);
  expect_equal(out, at::mm(x, weight.t()));
  expect_equal(buffer->get_buffer(), rows);
  for (int rank = 0; rank < kGroup; ++rank) {
    const auto share = buffer->rows();
    expect_equal(buffer->get_buffer_chunk_by_id(rank),
                 rows.narrow(0, share.begin(rank), share.length(rank)));
  }

  at::Tensor total = at::zeros({kRows, kFeatures}, at::kDouble);
  for (int rank = 0; rank < kGroup; ++rank) total += doubles(rank, 3, {kRows, kFeatures});
  buffer->copy_into_buffer(doubles(group->rank(), 3, {kRows, kFeatures}));
  out = nothing_yet(5, 3);
  buffer->bulk_overlap(product_of(x, weight, out), Type::RS);
  expect_equal(out, at::mm(x, weight.t()));
  expect_equal(buffer->get_buffer(/*local_chunk=*/true), own_rows(buffer, total));

  const auto lender = CommOverlapCore::create(group, config_of(Type::AG, Method::RING_EXCHANGE));
  const auto others = doubles(kGroup, 4, {kRows, kFeatures});
  buffer->copy_into_buffer(own_rows(buffer, others), /*local_chunk=*/true);
  buffer->bulk_overlap_external_ag(*lender);
  expect_equal(buffer->get_buffer(), others);
}

void all_methods(const Group& group) {
  for (const bool atomic : {false, true}) {
    gathers(group, atomic);
    scatters(group, Method::RING_EXCHANGE, atomic);
    scatters(group, Method::PIPELINE, atomic);
  }
  overlaps_in_bulk(group);
}

TEST(CommOverlap, EveryMethodOverACommunicator) {
  run_local_ranks(kGroup, [](const auto& comm) { all_methods(OverlapGroup::of(comm)); });
}

TEST(CommOverlap, EveryMethodOverTwoCallbacks) {
  testing::ThreadExchange board(kGroup);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kGroup; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto meet = [&board, rank](const std::string& mine) {
        return board.all_gather(rank, mine, testing::milliseconds(10'000));
      };
      all_methods(OverlapGroup::of({.all_gather = meet, .barrier = [&meet] { meet(""); }}, rank,
                                   kGroup, c10::kCPU, "outside", testing::milliseconds(10'000)));
    });
  }
  for (auto& rank : ranks) rank.join();
}

// --- Operations that a class does not support ----------------------------------------------------

void expect_unsupported(const Buffer& buffer, const std::string& method, bool is_supported,
                        const std::function<void()>& call) {
  if (is_supported) return;
  const Error error = error_of(call);
  const std::string what = error.what();
  EXPECT_EQ(error.kind(), ErrorKind::kUnsupported) << what;
  EXPECT_TRUE(contains(what, method + ": Operation not supported.")) << what;
  EXPECT_TRUE(contains(what, std::string(to_string(buffer->config().method)))) << what;
}

TEST(CommOverlap, WhatAClassDoesNotHaveSaysSo) {
  run_local_ranks(kGroup, [](const auto& comm) {
    for (const auto& [type, method] :
         std::vector<std::pair<Type, Method>>{{Type::NONE, Method::BULK},
                                              {Type::AG, Method::BULK},
                                              {Type::RS, Method::BULK},
                                              {Type::RS, Method::PIPELINE},
                                              {Type::AG, Method::RING_EXCHANGE},
                                              {Type::RS, Method::RING_EXCHANGE}}) {
      const auto buffer = CommOverlapCore::create(OverlapGroup::of(comm), config_of(type, method));
      const bool is_ring = method == Method::RING_EXCHANGE;
      const bool has_ag = is_ring && type == Type::AG;
      const bool has_rs = method == Method::PIPELINE || (is_ring && type == Type::RS);
      expect_unsupported(buffer, "bulk_overlap", !is_ring,
                         [&] { buffer->bulk_overlap({}, Type::RS); });
      expect_unsupported(buffer, "bulk_overlap_external_ag",
                         method == Method::BULK && type != Type::RS,
                         [&] { buffer->bulk_overlap_external_ag(*buffer); });
      expect_unsupported(buffer, "split_overlap_ag", has_ag, [&] { buffer->split_overlap_ag({}); });
      expect_unsupported(buffer, "atomic_gemm_overlap_ag", has_ag,
                         [&] { buffer->atomic_gemm_overlap_ag({}); });
      expect_unsupported(buffer, "split_overlap_rs", has_rs,
                         [&] { buffer->split_overlap_rs({}, {}); });
      expect_unsupported(buffer, "atomic_gemm_overlap_rs", has_rs,
                         [&] { buffer->atomic_gemm_overlap_rs({}, {}); });
    }
  });
}

// --- The registry -------------------------------------------------------------------------------

TEST(CommOverlapRegistry, EqualConfigurationsAreOneBufferWithAUseCount) {
  run_local_ranks(2, [](const auto& comm) {
    auto config = CommOverlapConfig::defaults(Type::RS, Method::PIPELINE, 2);
    config.buffer_shape = {4, 8};
    const int64_t id = create_comm_overlap_buffer(comm, config);
    EXPECT_EQ(create_comm_overlap_buffer(comm, config), id);
    EXPECT_EQ(comm_overlap_buffers().at(id).holds, 2);
    EXPECT_EQ(comm_overlap_buffers().at(id).config, config);
    EXPECT_EQ(find_comm_overlap_buffer("test", id)->config(), config);
    config.buffer_shape = {4, 16};
    const int64_t wider = create_comm_overlap_buffer(comm, config);
    EXPECT_NE(wider, id);
    destroy_comm_overlap_buffer(id);
    EXPECT_EQ(comm_overlap_buffers().at(id).holds, 1);
    destroy_comm_overlap_buffer(id);
    destroy_comm_overlap_buffer(wider);
    for (const int64_t dead : {id, int64_t{0}, int64_t{-1}}) {
      const Error error = error_of([&] { destroy_comm_overlap_buffer(dead); });
      EXPECT_EQ(error.kind(), ErrorKind::kValue);
      EXPECT_TRUE(contains(error.what(), concat("got ", dead))) << error.what();
    }
  });
}

}  // namespace
}  // namespace torch_overlap
