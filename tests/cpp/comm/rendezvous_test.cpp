// Ranks that meet under a name, give up, and try again.

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cstdio>
#include <filesystem>

#include "comm/local_ranks.h"
#include "torch_overlap/comm/bootstrap.h"

namespace torch_overlap {
namespace {

using namespace testing;  // NOLINT

using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr milliseconds kWhole{60'000};

// One rank's attempt to meet the others under the name "tp".
StorePtr come(const StorePtr& store, int rank, int size, milliseconds timeout) {
  return rendezvous(Env::read(), "tp", "the same on all", timeout, store, {rank, size});
}

// Ranks that have met share a store of their own: each one finds the keys of all others there.
void expect_one_place(const std::vector<StorePtr>& places) {
  for (size_t rank = 0; rank < places.size(); ++rank) {
    ASSERT_TRUE(places[rank]) << rank;
    places[rank]->set(concat("from ", rank), std::string("here"));
  }
  for (const auto& place : places) {
    for (size_t rank = 0; rank < places.size(); ++rank) {
      EXPECT_TRUE(place->check({concat("from ", rank)}));
    }
  }
}

std::vector<StorePtr> meet_all(const StorePtr& store, int size) {
  std::vector<StorePtr> places(size);
  std::vector<std::thread> ranks;
  ranks.reserve(size);
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] { places[rank] = come(store, rank, size, kWhole); });
  }
  for (auto& rank : ranks) rank.join();
  return places;
}

// Attempts of the ranks in `who`, which are too few.
void come_in_vain(const StorePtr& store, const std::vector<int>& who, int size) {
  std::vector<std::thread> ranks;
  ranks.reserve(who.size());
  for (const int rank : who) {
    ranks.emplace_back([&, rank] {
      const Error error = error_of([&] { come(store, rank, size, milliseconds(200)); });
      EXPECT_EQ(error.kind(), ErrorKind::kTimeout) << error.what();
      EXPECT_TRUE(contains(error.what(), concat("expected ", size, " ranks within 200 ms")))
          << error.what();
    });
  }
  for (auto& rank : ranks) rank.join();
}

TEST(Rendezvous, AfterTriesOfAnyRanksAllMeet) {
  constexpr int kSize = 3;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (const auto& who :
       std::vector<std::vector<int>>{{0}, {1, 2}, {2}, {0, 1}, {1}, {0, 2}, {1}}) {
    come_in_vain(store, who, kSize);
    expect_one_place(meet_all(store, kSize));
    come_in_vain(store, who, kSize);
  }
  expect_one_place(meet_all(store, kSize));
}

TEST(Rendezvous, ALateRankFindsNobodyThere) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int round = 0; round < 3; ++round) {
    come_in_vain(store, {0}, 2);
    come_in_vain(store, {1}, 2);
  }
  expect_one_place(meet_all(store, 2));
}

TEST(Rendezvous, ARankThatWaitsOutlastsOneThatGivesUpAndComesAgain) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  StorePtr patient;
  std::thread waits([&] { patient = come(store, 0, 3, kWhole); });
  for (int round = 0; round < 3; ++round) come_in_vain(store, {1 + round % 2}, 3);
  std::vector<StorePtr> places(3);
  std::thread one([&] { places[1] = come(store, 1, 3, kWhole); });
  places[2] = come(store, 2, 3, kWhole);
  one.join();
  waits.join();
  places[0] = patient;
  expect_one_place(places);
}

// Every rank tries until it succeeds, with a timeout that differs each time and is often too short:
// an attempt may end just as the last rank arrives. A rank succeeds only together with all others,
// and all of them get the same store.
void expect_no_lone_success(const StorePtr& store, int size) {
  for (int round = 0; round < 8; ++round) {
    std::vector<StorePtr> places(size);
    std::vector<std::thread> ranks;
    ranks.reserve(size);
    for (int rank = 0; rank < size; ++rank) {
      ranks.emplace_back([&, rank, seed = run_seed() + 131 * round + rank] {
        std::mt19937 random(seed);
        const auto end = HostClock::now() + kWhole;
        while (!places[rank] && HostClock::now() < end) {
          std::this_thread::sleep_for(milliseconds(random() % 8));
          try {
            places[rank] = come(store, rank, size, milliseconds(1 + random() % 5));
          } catch (const Error& error) {  // loaded cores may also fail to reach the store
            EXPECT_TRUE(error.kind() == ErrorKind::kTimeout ||
                        contains(error.what(), "expected the store to answer"))
                << error.what();
          }
        }
      });
    }
    for (auto& rank : ranks) rank.join();
    expect_one_place(places);
  }
}

TEST(Rendezvous, ATryThatEndsAsTheLastRankComesEndsAlikeOnAllRanks) {
  for (const int size : {1, 2, 4}) {
    expect_no_lone_success(c10::make_intrusive<c10d::HashStore>(), size);
  }
}

TEST(Rendezvous, AlsoInAFile) {
  const auto path = std::filesystem::temp_directory_path() /
                    concat("torch_overlap_rendezvous_", std::random_device()());
  const auto store = c10::make_intrusive<c10d::FileStore>(path.string(), 2);
  come_in_vain(store, {1}, 2);
  expect_one_place(meet_all(store, 2));
  std::filesystem::remove(path);
}

TEST(Rendezvous, AnotherRequestIsAnErrorOnEveryRankAndTheNextTryIsNot) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      const Error error = error_of(
          [&] { rendezvous(Env::read(), "tp", concat("of ", rank), kWhole, store, {rank, 2}); });
      EXPECT_EQ(error.kind(), ErrorKind::kValue);
      EXPECT_TRUE(contains(error.what(), "of 0") && contains(error.what(), "of 1"));
    });
  }
  for (auto& rank : ranks) rank.join();
  expect_one_place(meet_all(store, 2));
}

}  // namespace
}  // namespace torch_overlap
