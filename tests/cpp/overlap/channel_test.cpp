#include "torch_overlap/overlap/channel.h"

#include <gtest/gtest.h>

#include "comm/local_ranks.h"
#include "symm/thread_ranks.h"

namespace torch_overlap {
namespace {

TEST(OverlapGroup, SaysThatItsCommunicatorIsGone) {
  auto comm = TorchComm::create("fake", c10::kCPU, "short lived", {}, RankAndSize{0, 2});
  const auto timeout = comm->membership()->context.timeout();
  const auto group = OverlapGroup::of(comm);
  comm->finalize();
  comm.reset();
  EXPECT_EQ(group->comm(), nullptr);
  EXPECT_EQ(group->timeout(), timeout);
  const auto expect_gone = [](const auto& call) {
    const auto error = testing::thrown_error(call);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind(), ErrorKind::kState);
    EXPECT_STREQ(error->what(),
                 "new_buffer: expected a live communicator, got 'short lived', which is gone. Keep "
                 "it as long as its buffers are used.");
  };
  expect_gone([&] { group->require_active("new_buffer"); });
  expect_gone([&] { group->bootstrap("new_buffer", "buffer"); });
  expect_gone([&] { group->exchange("new_buffer", "buffer", "mine"); });
  expect_gone([&] {
    OverlapChannel::create(
        group, {.op = "new_buffer", .name = "buffer", .digest = "", .bytes = 8, .fault = {}});
  });
}

}  // namespace
}  // namespace torch_overlap
