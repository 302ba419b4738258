#include "torch_overlap/comm/shutdown.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <utility>

namespace torch_overlap {
namespace {

struct Counted {
  explicit Counted(int& dropped) : dropped(&dropped) {}
  ~Counted() { ++*dropped; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  int* dropped;
};

TEST(LeakedAtExit, IsDroppedBeforeTheProcessExits) {
  int dropped = 0;
  {
    const LeakedAtExit<std::shared_ptr<Counted>> object(std::make_shared<Counted>(dropped));
    EXPECT_EQ((*object)->dropped, &dropped);
  }
  EXPECT_EQ(dropped, 1);
}

// In a process of its own: the beginning of an exit cannot be undone.
TEST(LeakedAtExitDeathTest, IsLeakedOnceTheExitHasBegun) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto program = [] {
    static int dropped = 0;
    {
      const LeakedAtExit<std::shared_ptr<Counted>> object(std::make_shared<Counted>(dropped));
      begin_process_exit();
    }
    std::_Exit(dropped);
  };
  EXPECT_EXIT(program(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace torch_overlap
