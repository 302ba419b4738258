// Ranks notify each other of failures through their store.
#include "torch_overlap/comm/peer_failure.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace torch_overlap {
namespace {

using Clock = PeerFailure::Clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Polls like a watchdog, for at most `limit`.
std::optional<std::string> listen(PeerFailure& peers, milliseconds limit) {
  const auto begin = Clock::now();
  do {
    if (auto peer_error = peers.peer_error(begin, Clock::now())) return peer_error;
    std::this_thread::sleep_for(milliseconds(10));
  } while (Clock::now() - begin < limit);
  return std::nullopt;
}

struct Group {
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  c10::intrusive_ptr<c10d::Store> place(const std::string& name) const {
    return c10::make_intrusive<c10d::PrefixStore>(name, store);
  }
};

TEST(PeerFailure, OthersHearWhatARankTells) {
  const Group group;
  PeerFailure first(group.place("a"), 0, 3);
  PeerFailure second(group.place("a"), 1, 3);
  EXPECT_EQ(listen(second, 3 * second.period()), std::nullopt);
  first.publish("all_reduce #7: no end");
  EXPECT_EQ(listen(second, seconds(60)), "rank 0: all_reduce #7: no end");
  EXPECT_EQ(listen(second, milliseconds(0)), "rank 0: all_reduce #7: no end");  // already known
}

// Each rank has its own client of the same store, as ranks in processes do.
TEST(PeerFailure, OverStoresThatProcessesShare) {
  const std::string path = ::testing::TempDir() + "peer_failure_" + std::to_string(::getpid());
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = 0;
  const auto server = c10::make_intrusive<c10d::TCPStore>("localhost", options);
  for (const c10::intrusive_ptr<c10d::Store>& store :
       {c10::intrusive_ptr<c10d::Store>(server),
        c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<c10d::FileStore>(path, 2))}) {
    PeerFailure first(c10::make_intrusive<c10d::PrefixStore>("a", store), 0, 2);
    PeerFailure second(c10::make_intrusive<c10d::PrefixStore>("a", store->clone()), 1, 2);
    EXPECT_EQ(listen(second, 2 * second.period()), std::nullopt);
    first.publish("gone", seconds(60));
    EXPECT_EQ(listen(second, seconds(60)), "rank 0: gone");
  }
  std::remove(path.c_str());
}

TEST(PeerFailure, TheFirstToTellIsHeard) {
  const Group group;
  PeerFailure first(group.place("a"), 0, 3);
  PeerFailure second(group.place("a"), 1, 3);
  PeerFailure third(group.place("a"), 2, 3);
  first.publish("gone", seconds(60));
  second.publish("aborted, since rank 0 is gone", seconds(60));
  EXPECT_EQ(listen(third, seconds(60)), "rank 0: gone");
}

class CountingStore final : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    const bool found = HashStore::check(keys);
    ++asked;
    return found;
  }
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this);
  }
  // Waits until the store has been polled this number of times.
  void await(int times) const {
    const auto begin = Clock::now();
    while (asked < times && Clock::now() - begin < seconds(60)) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_EQ(asked, times);
  }
  std::atomic<int> asked{0};
};

TEST(PeerFailure, WhoWaitsForLongAsksLessOften) {
  const auto store = c10::make_intrusive<CountingStore>();
  PeerFailure first(store, 0, 2);
  PeerFailure second(store, 1, 2);
  const auto begin = Clock::now() - seconds(60);
  const auto hears_after = [&](int ms) {
    return second.peer_error(begin, begin + milliseconds(ms));
  };
  EXPECT_EQ(hears_after(10), std::nullopt);  // too early
  EXPECT_EQ(store->asked, 0);
  EXPECT_EQ(hears_after(2000), std::nullopt);
  store->await(1);
  first.publish("gone", seconds(60));  // polls too
  EXPECT_EQ(store->asked, 2);
  EXPECT_EQ(hears_after(3000), std::nullopt);
  EXPECT_EQ(hears_after(3900), std::nullopt);
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_EQ(store->asked, 2);  // not before the time that it had waited has passed again
  EXPECT_EQ(listen(second, seconds(60)), "rank 0: gone");
}

TEST(PeerFailure, AnotherCommunicatorDoesNotHear) {
  const Group group;
  PeerFailure one(group.place("a"), 0, 2);
  PeerFailure other(group.place("b"), 1, 2);
  one.publish("gone");
  EXPECT_EQ(listen(other, 3 * other.period()), std::nullopt);
}

// A store whose host has died or has been stopped.
class DeadStore final : public c10d::HashStore {
 public:
  explicit DeadStore(seconds silence) : silence_(silence) {}
  bool check(const std::vector<std::string>& keys) override { return answer(); }
  void set(const std::string& key, const std::vector<uint8_t>& value) override { (void)answer(); }
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this);
  }

 private:
  bool answer() const {
    std::this_thread::sleep_for(silence_);
    throw std::runtime_error("connection reset by peer");
  }
  const seconds silence_;
};

TEST(PeerFailure, AStoreThatDoesNotAnswerHoldsUpNobody) {
  for (const seconds silence : {seconds(0), seconds(5)}) {
    const auto store = c10::make_intrusive<DeadStore>(silence);
    PeerFailure peers(store, 0, 2);
    for (int i = 0; i < 20; ++i) {
      const auto begin = Clock::now();
      EXPECT_EQ(peers.peer_error(begin - seconds(1), begin), std::nullopt);
      peers.publish("gone");
      EXPECT_LT(Clock::now() - begin, seconds(3));
      std::this_thread::sleep_for(milliseconds(20));
    }
  }
}

TEST(PeerFailure, WithoutAStoreNothingIsSaidNorHeard) {
  PeerFailure peers(nullptr, 0, 2);
  peers.publish("gone");
  EXPECT_EQ(listen(peers, 2 * peers.period()), std::nullopt);
}

TEST(PeerFailure, LargeGroupsAskLessOften) {
  EXPECT_LT(PeerFailure(nullptr, 0, 4).period(), milliseconds(400));
  EXPECT_GE(PeerFailure(nullptr, 0, 4096).period(), milliseconds(4096));
}

}  // namespace
}  // namespace torch_overlap
