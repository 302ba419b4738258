// Symmetric memory of ranks some of which cannot reach each other.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "symm/thread_ranks.h"
#include "torch_overlap/symm/pretend_unreachable.h"

namespace torch_overlap {
namespace {

using namespace testing;  // NOLINT

constexpr int kMemoryRanks = 4;
constexpr int kApart = 2;  // reaches no other rank

SymmetricMemory::Request partial_request(int rank) {
  auto request = request_of(symmetric_empty({4}, at::kFloat, c10::kCPU));
  request.tensor.fill_(rank);
  request.partial = true;
  request.pretend_unreachable = rank == kApart;
  return request;
}

TEST(PartialMemory, IsOfThePairsThatReachEachOther) {
  run_threads(kMemoryRanks, [](int rank, ThreadExchange& board) {
    ThreadBootstrap bootstrap(board, rank, kMemoryRanks);
    const auto request = partial_request(rank);
    const auto memory = SymmetricMemory::rendezvous(bootstrap, request);
    EXPECT_EQ(memory->unreachable_pair(),
              concat("rank 0 cannot reach the memory of rank 2: ", PretendUnreachable::kReason));
    EXPECT_EQ(memory->remote(), nullptr);
    for (int peer = 0; peer < kMemoryRanks; ++peer) {
      const bool reaches = peer == rank || (peer != kApart && rank != kApart);
      EXPECT_EQ(memory->is_reachable(peer), reaches) << rank << " to " << peer;
      EXPECT_EQ(memory->unreachable_reason(peer), reaches ? "" : PretendUnreachable::kReason);
      EXPECT_EQ(memory->pointer(peer) != nullptr, reaches);
      if (reaches) {
        EXPECT_TRUE(at::equal(memory->view(peer, {4}, at::kFloat),
                              at::full({4}, static_cast<double>(peer), at::kFloat)));
        memory->signals().to(peer)[0] = 10U + rank;
        continue;
      }
      const auto error = thrown_error([&] { (void)memory->view(peer, {4}, at::kFloat); });
      ASSERT_TRUE(error);
      EXPECT_EQ(error->kind(), ErrorKind::kUnsupported);
    }
    bootstrap.barrier();
    for (int peer = 0; peer < kMemoryRanks; ++peer) {
      EXPECT_EQ(*memory->signals().arrived(peer), memory->is_reachable(peer) ? 10U + peer : 0U);
    }
    bootstrap.barrier();
  });
}

TEST(PartialMemory, IsWholeWhereAllReachAll) {
  run_threads(kMemoryRanks, [](int rank, ThreadExchange& board) {
    ThreadBootstrap bootstrap(board, rank, kMemoryRanks);
    auto request = partial_request(rank);
    request.pretend_unreachable = false;
    const auto memory = SymmetricMemory::rendezvous(bootstrap, request);
    EXPECT_EQ(memory->unreachable_pair(), "");
    for (int peer = 0; peer < kMemoryRanks; ++peer) EXPECT_TRUE(memory->is_reachable(peer));
    bootstrap.barrier();
  });
}

TEST(PartialMemory, OneRankThatNeedsAllOfItRefusesForAll) {
  for (const std::string because : {"it is too old", ""}) {
    run_threads(kMemoryRanks, [&because](int rank, ThreadExchange& board) {
      ThreadBootstrap bootstrap(board, rank, kMemoryRanks);
      auto request = partial_request(rank);
      request.partial = rank != 1;
      if (rank == 1) request.partial_unsupported_reason = because;
      const auto error = thrown_error([&] { SymmetricMemory::rendezvous(bootstrap, request); });
      ASSERT_TRUE(error);
      EXPECT_EQ(error->kind(), ErrorKind::kUnsupported);
      EXPECT_EQ(
          error->what(),
          concat("test: expected ranks that can reach each other's memory, got rank 0, which "
                 "cannot reach that of rank 2: ",
                 PretendUnreachable::kReason,
                 because.empty() ? "" : "; and there is no other way: it is too old on rank 1"));
      request.pretend_unreachable = false;  // then no other path is needed
      EXPECT_NE(SymmetricMemory::rendezvous(bootstrap, request), nullptr);
      bootstrap.barrier();
    });
  }
}

}  // namespace
}  // namespace torch_overlap
