// Threads that act for ranks whose communicators other threads made.

#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/local_ranks.h"
#include "torch_overlap/comm/registry.h"

namespace torch_overlap::testing {
namespace {

// Returns the communicators of `size` ranks, each made on a thread that has ended.
std::vector<Comm> comms_of_ended_threads(const std::string& name, int size) {
  CommOptions options;
  options.store = c10::make_intrusive<c10d::HashStore>();
  options.abort_process_on_timeout_or_error = false;
  std::vector<Comm> comms(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      comms[rank] = TorchComm::create("local", c10::kCPU, name, options, RankAndSize{rank, size});
    });
  }
  for (auto& thread : threads) thread.join();
  return comms;
}

void finalize_all(const std::vector<Comm>& comms) {
  std::vector<std::thread> threads;
  for (const auto& comm : comms) threads.emplace_back([&comm] { comm->finalize(); });
  for (auto& thread : threads) thread.join();
}

TEST(ActingRank, FindsTheRankThatAThreadActsFor) {
  const auto comms = comms_of_ended_threads("acting", 3);
  std::vector<at::Tensor> results(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const ActingRankGuard guard(comms[rank]);
      results[rank] = sample(rank, 1, {5});
      get_comm("acting")->all_reduce(results[rank], RedOpType::SUM, /*async_op=*/false);
    });
  }
  for (auto& thread : threads) thread.join();
  const auto expected = sample(0, 1, {5}) + sample(1, 1, {5}) + sample(2, 1, {5});
  for (const auto& result : results) expect_equal(result, expected);
  finalize_all(comms);
}

TEST(ActingRank, GuardsNestAndEnd) {
  const auto comms = comms_of_ended_threads("nested", 2);
  {
    const ActingRankGuard outer(comms[0]);
    EXPECT_EQ(get_comm("nested"), comms[0]);
    {
      const ActingRankGuard inner(comms[1]);
      EXPECT_EQ(get_comm("nested"), comms[1]);
      std::thread([] { EXPECT_EQ(ActingRankGuard::find("nested"), nullptr); }).join();
    }
    EXPECT_EQ(get_comm("nested"), comms[0]);
    EXPECT_EQ(ActingRankGuard::find("another"), nullptr);
  }
  EXPECT_EQ(ActingRankGuard::find("nested"), nullptr);
  finalize_all(comms);
}

TEST(ActingRank, RefusesAFinalizedCommunicatorAndNone) {
  const auto comms = comms_of_ended_threads("ended", 1);
  finalize_all(comms);
  const ActingRankGuard guard(comms[0]);
  const auto error = error_of([] { get_comm("ended"); });
  EXPECT_EQ(error.kind(), ErrorKind::kState);
  EXPECT_TRUE(contains(error.what(), "which was finalized"));
  EXPECT_EQ(error_of([] { ActingRankGuard(nullptr); }).kind(), ErrorKind::kValue);
}

}  // namespace
}  // namespace torch_overlap::testing
