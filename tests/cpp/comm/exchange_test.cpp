// Keys that ranks write into the store to find each other; they are deleted afterwards.

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/local_ranks.h"
#include "torch_overlap/comm/bootstrap.h"
#include "torch_overlap/comm/store_bootstrap.h"

namespace torch_overlap {
namespace {

using namespace testing;  // NOLINT

constexpr milliseconds kLong{20'000};

// Runs `body(rank)` on threads, each of which first sleeps for a short random time.
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
  ExchangeCallbacks owner;
  owner.abort_reason = [begin] {
    const bool is_early = std::chrono::steady_clock::now() - begin < milliseconds(50);
    return std::string(is_early ? "" : "it was aborted");
  };
  const Error error = error_of([&] { exchange(*store, "key", 0, 2, said_by(0), kLong, owner); });
  EXPECT_EQ(error.kind(), ErrorKind::kState);
  EXPECT_TRUE(contains(error.what(), "got none of ranks [1] before the end: it was aborted"))
      << error.what();
  // A rank that is late reads the value that was published, as the last reader.
  EXPECT_EQ(exchange(*store, "key", 1, 2, said_by(1), kLong, owner)[0], said_by(0));
  EXPECT_EQ(store->getNumKeys(), 0);
}

TEST(Exchange, ARankThatHasLeftEndsTheWaitForItAndNotForOthers) {
  constexpr int kSize = 3;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ExchangeCallbacks owner;
  owner.departure_reason = [](int rank) {
    return std::string(rank == 0 ? "" : concat("rank ", rank, " has left"));
  };
  owner.on_missing = [](bool has_left) {
    return std::string(has_left ? "; all is over" : "; it is late");
  };
  // Rank 1 has published its value before.
  publish(*store, "key", 1, kSize, said_by(1));
  const Error error =
      error_of([&] { exchange(*store, "key", 0, kSize, said_by(0), kLong, owner); });
  EXPECT_EQ(error.kind(), ErrorKind::kRuntime);
  EXPECT_STREQ(error.what(), "key: expected 3 ranks, but rank 2 has left; all is over");
  EXPECT_EQ(exchange(*store, "key", 2, kSize, said_by(2), kLong)[0], said_by(0));
  EXPECT_EQ(store->getNumKeys(), 0);
}

// The value of rank 0 is deleted once a rank has seen that all exist: rank 0 has timed out.
struct GivesUp final : c10d::HashStore {
  bool check(const std::vector<std::string>& keys) override {
    const bool are_there = HashStore::check(keys);
    if (are_there && keys.size() > 1) HashStore::deleteKey(keys[0]);
    return are_there;
  }
};

TEST(Exchange, ARankThatGivesUpWhileOthersReadIsMissing) {
  const auto store = c10::make_intrusive<GivesUp>();
  store->setTimeout(milliseconds(5'000));  // limit of a read of the value
  publish(*store, "key", 0, 2, said_by(0));
  const Error error =
      error_of([&] { exchange(*store, "key", 1, 2, said_by(1), milliseconds(500)); });
  EXPECT_EQ(error.kind(), ErrorKind::kTimeout) << error.what();
  EXPECT_STREQ(error.what(), "key: expected 2 ranks within 500 ms, got none of ranks [0]");
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
    EXPECT_EQ(error_of([&] { throw_if_any_failed(bootstrap, "thing", fault); }).kind(),
              ErrorKind::kValue);
  });
  EXPECT_EQ(store->getNumKeys(), 0);
}

}  // namespace
}  // namespace torch_overlap
