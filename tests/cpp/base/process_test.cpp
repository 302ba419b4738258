// Forks of a process whose other threads hold locks.

#include "torch_overlap/base/process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>

namespace torch_overlap {
namespace {

using Clock = std::chrono::steady_clock;

// The exit status of a fork that runs `body`; it ends by SIGALRM if the body does not end.
int in_fork(const std::function<bool()>& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(20);
    _exit(body() ? 0 : 1);
  }
  EXPECT_GT(pid, 0) << std::strerror(errno);
  int status = -1;
  if (pid > 0) EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return status;
}

TEST(ProcessStamp, TellsAForkFromItsParent) {
  const ProcessStamp stamp;
  EXPECT_TRUE(stamp.is_current());
  EXPECT_EQ(in_fork([&] { return !stamp.is_current() && ProcessStamp().is_current(); }), 0);
  EXPECT_TRUE(stamp.is_current());
}

// Two that threads take in either order, each time while they hold the other one.
TEST(ForkSafeMutex, AForkFindsItFreeAndWhatItGuardsWhole) {
  ForkSafeMutex first;
  ForkSafeMutex second;
  int changes = 0;   // by who holds both
  int finished = 0;  // equal to it for who holds both
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
  const std::scoped_lock both(first, second);  // the parent's are free again too
  EXPECT_EQ(changes, finished);
}

TEST(ForkSafeMutex, ForksOfSeveralThreadsDoNotWaitForEachOther) {
  ForkSafeMutex mutex;
  const auto fork_often = [&] {
    for (int turn = 0; turn < 50; ++turn) {
      EXPECT_EQ(in_fork([&] { return mutex.try_lock(); }), 0);
    }
  };
  std::thread other(fork_often);
  fork_often();
  other.join();
  EXPECT_TRUE(mutex.try_lock());
  mutex.unlock();
}

// Its holder may itself wait for what the forking thread has, as Python's lock.
TEST(ForkSafeMutex, AForkDoesNotWaitWithoutEndForOneThatIsHeld) {
  ForkSafeMutex held;
  ForkSafeMutex free;
  std::atomic<bool> is_held{false};
  std::atomic<bool> forked{false};
  std::thread holder([&] {
    const std::lock_guard lock(held);
    is_held = true;
    while (!forked) std::this_thread::yield();
  });
  while (!is_held) std::this_thread::yield();
  const auto begin = Clock::now();
  EXPECT_EQ(in_fork([&] { return free.try_lock(); }), 0);
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(15));
  forked = true;
  holder.join();
  EXPECT_TRUE(free.try_lock());
  free.unlock();
}

TEST(ForkSafeMutex, OneThatDiedIsNotTaken) {
  {
    const ForkSafeMutex gone;
  }
  ForkSafeMutex mutex;
  EXPECT_EQ(in_fork([&] {
              const std::lock_guard lock(mutex);
              return true;
            }),
            0);
}

}  // namespace
}  // namespace torch_overlap
