#include "torch_overlap/comm/backends/nccl/deferred_deleter.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <thread>

#include "torch_overlap/comm/shutdown.h"

namespace torch_overlap {
namespace {

struct Fate {
  std::atomic<bool> can_delete{false};
  std::atomic<int> asked{0};
  std::atomic<bool> gone{false};
  std::thread::id gone_on;
};

class Probe final : public PendingDelete {
 public:
  explicit Probe(Fate& fate) : PendingDelete(-1), fate_(fate) {}
  ~Probe() override {
    fate_.gone_on = std::this_thread::get_id();
    fate_.gone = true;
  }
  bool can_delete() noexcept override {
    ++fate_.asked;
    return fate_.can_delete;
  }

 private:
  Fate& fate_;
};

void wait_for(const std::function<bool()>& what) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!what() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ASSERT_TRUE(what());
}

TEST(DeferredDeleter, ABodyIsKeptUntilItMayGoAndThenDeletedOnAnotherThread) {
  Fate held;
  Fate free;
  free.can_delete = true;
  defer(new Probe(held));
  wait_for([&] { return held.asked >= 2; });
  defer(new Probe(free));  // overtakes the one that is not ready
  wait_for([&] { return free.gone.load(); });
  EXPECT_FALSE(held.gone);
  held.can_delete = true;
  wait_for([&] { return held.gone.load(); });
  EXPECT_NE(held.gone_on, std::this_thread::get_id());
  EXPECT_EQ(held.gone_on, free.gone_on);
}

// In a process of its own: the beginning of an exit cannot be undone.
TEST(DeferredDeleterDeathTest, FromTheBeginningOfTheEndNothingIsDropped) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto program = [] {
    static Fate waiting;
    static Fate late;
    defer(new Probe(waiting));
    wait_for([&] { return waiting.asked > 0; });
    begin_process_exit();
    const int asked = waiting.asked;
    waiting.can_delete = true;
    late.can_delete = true;
    defer(new Probe(late));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const bool untouched = !waiting.gone && !late.gone && waiting.asked == asked && late.asked == 0;
    std::exit(untouched && !Permit() ? 0 : 1);
  };
  EXPECT_EXIT(program(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace torch_overlap
