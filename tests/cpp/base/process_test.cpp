// Forks of a process whose other threads hold locks.

#include "torch_overlap/base/process.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "base/in_fork.h"

namespace torch_overlap {
namespace {

using testing::in_fork;
using Clock = std::chrono::steady_clock;

TEST(ProcessStamp, TellsAForkFromItsParent) {
  const ProcessStamp stamp;
  EXPECT_TRUE(stamp.is_current());
  EXPECT_EQ(in_fork([&] { return !stamp.is_current() && ProcessStamp().is_current(); }), 0);
  EXPECT_TRUE(stamp.is_current());
}

// Threads lock two mutexes together, in either order.
TEST(ForkSafeMutex, AForkFindsItFreeAndWhatItGuardsWhole) {
  ForkSafeMutex first;
  ForkSafeMutex second;
  int changes = 0;   // written with both mutexes held
  int finished = 0;  // equal to `changes` for a holder of both mutexes
  std::atomic<bool> stop{false};
  const auto change_often = [&](ForkSafeMutex& one, ForkSafeMutex& two) {
    while (!stop) {
      {
        const std::scoped_lock both(one, two);
        ++changes;
        std::this_thread::yield();
        ++finished;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  };
  std::thread thread([&] { change_often(first, second); });
  std::thread other([&] { change_often(second, first); });
  for (int turn = 0; turn < 100; ++turn) {
    EXPECT_EQ(in_fork([&] {
                const std::scoped_lock both(first, second);
                return changes == finished;
              }),
              0);
  }
  stop = true;
  thread.join();
  other.join();
  const std::scoped_lock both(first, second);  // both are free again in the parent too
  EXPECT_EQ(changes, finished);
}

// Each fork would take two seconds if an earlier one left the mutex locked.
TEST(ForkSafeMutex, ThreadsForkOneAfterTheOther) {
  ForkSafeMutex mutex;
  const auto begin = Clock::now();
  const auto fork_often = [&] {
    for (int turn = 0; turn < 20; ++turn) {
      EXPECT_EQ(in_fork([&] { return mutex.try_lock(); }), 0);
    }
  };
  std::thread other(fork_often);
  fork_often();
  other.join();
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(30));
  EXPECT_TRUE(mutex.try_lock());
  mutex.unlock();
}

// The holder of a mutex may itself wait for a lock of the forking thread, such as Python's.
TEST(ForkSafeMutex, AForkGivesUpOnTheOneThatStaysHeldAlone) {
  ForkSafeMutex held;
  ForkSafeMutex other;
  std::atomic<bool> is_held{false};
  std::atomic<bool> forked{false};
  std::thread holder([&] {
    const std::lock_guard lock(held);
    is_held = true;
    while (!forked) std::this_thread::yield();
  });
  while (!is_held) std::this_thread::yield();
  std::atomic<bool> stop{false};
  std::thread user([&] {
    while (!stop) const std::lock_guard lock(other);
  });
  const auto begin = Clock::now();
  EXPECT_EQ(in_fork([&] {
              const std::lock_guard lock(other);
              const ForkSafeMutex another;
              return !held.try_lock();
            }),
            0);
  const auto took = Clock::now() - begin;
  EXPECT_GE(took, std::chrono::seconds(1));
  EXPECT_LT(took, std::chrono::seconds(15));
  forked = true;
  holder.join();
  stop = true;
  user.join();
  const std::scoped_lock both(held, other);
}

TEST(ForkSafeMutex, OneThatDiedIsNotTaken) {
  std::array<std::byte, sizeof(ForkSafeMutex)> place;
  std::destroy_at(new (place.data()) ForkSafeMutex);
  place.fill(std::byte{0xff});
  const auto begin = Clock::now();
  EXPECT_EQ(in_fork([] { return true; }), 0);
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(1));
  for (const std::byte byte : place) EXPECT_EQ(byte, std::byte{0xff});
}

TEST(MadeOnce, IsMadeByTheFirstAlsoWhereThatIsInAFork) {
  std::atomic<int> count{0};
  const auto value = [&count](const std::function<void()>& meanwhile) {
    return lazy_leaky_singleton([&] {
      meanwhile();
      return ++count;
    });
  };
  EXPECT_THROW(value([] { throw std::runtime_error("not yet"); }), std::runtime_error);
  std::atomic<bool> is_at_it{false};
  std::atomic<bool> forked{false};
  std::thread maker([&] {
    value([&] {
      is_at_it = true;
      while (!forked) std::this_thread::yield();
    });
  });
  while (!is_at_it) std::this_thread::yield();
  EXPECT_EQ(in_fork([&] { return value([] {}) == 1 && value([] {}) == 1; }), 0);
  forked = true;
  maker.join();
  EXPECT_EQ(value([] { ADD_FAILURE() << "made again"; }), 1);
}

struct Shared {
  int value = 3;
};

TEST(LeakySingleton, IsOneForAll) {
  Shared& shared = LeakySingleton<Shared>::get();
  EXPECT_EQ(shared.value, 3);
  shared.value = 4;
  EXPECT_EQ(LeakySingleton<Shared>::get().value, 4);
  EXPECT_EQ(&LeakySingleton<Shared>::get(), &shared);
}

}  // namespace
}  // namespace torch_overlap
