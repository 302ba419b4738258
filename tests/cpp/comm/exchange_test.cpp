// What ranks write into the store to find each other, and that it does not stay there.

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/local_ranks.h"
#include "torch_overlap/comm/bootstrap.h"
#include "torch_overlap/comm/store_bootstrap.h"

namespace torch_overlap {
namespace {

using namespace testing;  // NOLINT

constexpr milliseconds kLong{20'000};

// Runs `body(rank)` on threads, each of which waits a little of its own before it begins.
void on_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> ranks;
  ranks.reserve(size);
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&body, rank, wait = std::random_device()() % 4] {
      std::this_thread::sleep_for(milliseconds(wait));
      body(rank);
    });
  }
  for (auto& rank : ranks) rank.join();
}

std::string said_by(int rank) { return concat("rank ", rank, std::string(rank, '\0')); }

TEST(Exchange, EverybodyReadsEverybodyAndNoKeyStays) {
  for (const int size : {1, 2, 5}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::string> expected;
    for (int rank = 0; rank < size; ++rank) expected.push_back(said_by(rank));
    std::vector<std::vector<std::string>> got(size);
    for (int round = 0; round < 10; ++round) {
      on_ranks(size, [&](int rank) {
        got[rank] = exchange(*store, concat("round ", round), rank, size, said_by(rank), kLong);
      });
      for (int rank = 0; rank < size; ++rank) EXPECT_EQ(got[rank], expected) << rank;
      EXPECT_EQ(store->getNumKeys(), 0);
    }
  }
}

TEST(Exchange, ARankThatOnlyPublishesCountsAsOneThatHasRead) {
  constexpr int kSize = 4;
  for (int absent = 0; absent < kSize; ++absent) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    on_ranks(kSize, [&](int rank) {
      if (rank == absent) return publish(*store, "key", rank, kSize, "!");
      const auto all = exchange(*store, "key", rank, kSize, said_by(rank), kLong);
      EXPECT_EQ(all[absent], "!");
    });
    EXPECT_EQ(store->getNumKeys(), 0);
  }
}

TEST(Exchange, WhoWaitsInVainTakesItsOwnKeyAway) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  on_ranks(2, [&](int rank) {
    const Error error =
        error_of([&] { exchange(*store, "key", rank, 3, said_by(rank), milliseconds(200)); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
    EXPECT_TRUE(contains(error.what(), "got none of ranks [2]") ||
                contains(error.what(), concat("got none of ranks [", 1 - rank, ", 2]")))
        << error.what();
  });
  EXPECT_EQ(store->getNumKeys(), 0);
}

TEST(Exchange, AReasonEndsTheWaitForRanksAndNotWhatIsComplete) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto begin = std::chrono::steady_clock::now();
  const auto ended_soon = [begin]() -> std::string {
    return std::chrono::steady_clock::now() - begin < milliseconds(50) ? "" : "it was aborted";
  };
  const Error error =
      error_of([&] { exchange(*store, "key", 0, 2, said_by(0), kLong, ended_soon); });
  EXPECT_EQ(error.kind(), ErrorKind::kState);
  EXPECT_TRUE(contains(error.what(), "got none of ranks [1] before the end: it was aborted"))
      << error.what();
  // Who comes later reads what it had said, as the last one.
  EXPECT_EQ(exchange(*store, "key", 1, 2, said_by(1), kLong, ended_soon)[0], said_by(0));
  EXPECT_EQ(store->getNumKeys(), 0);
}

TEST(Exchange, AStoreThatCannotDeleteServesAllTheSame) {
  struct NoDelete final : c10d::HashStore {
    bool deleteKey(const std::string&) override { throw std::runtime_error("no"); }
  };
  const auto store = c10::make_intrusive<NoDelete>();
  on_ranks(2, [&](int rank) {
    EXPECT_EQ(exchange(*store, "key", rank, 2, said_by(rank), kLong).size(), 2U);
  });
}

TEST(Exchange, ABootstrapLeavesNoKeyAlsoWhenARankHasAFault) {
  constexpr int kSize = 3;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  on_ranks(kSize, [&](int rank) {
    StoreBootstrap bootstrap(store, "thing", rank, kSize, kLong);
    for (int step = 0; step < 5; ++step) bootstrap.barrier();
    const Fault fault{ErrorKind::kValue, rank == 1 ? "wrong" : ""};
    EXPECT_EQ(error_of([&] { agree(bootstrap, "thing", fault); }).kind(), ErrorKind::kValue);
  });
  EXPECT_EQ(store->getNumKeys(), 0);
}

}  // namespace
}  // namespace torch_overlap
