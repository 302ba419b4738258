// Which device a communicator takes, on devices that only count.

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/bootstrap.h"

namespace torch_overlap {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
thread_local c10::DeviceIndex current = 0;

struct CountedDevices final : c10::impl::NoOpDeviceGuardImpl<kType> {
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  void setDevice(c10::Device device) const override { current = device.index(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, CountedDevices);

Env on_node(std::optional<int> local_rank) {
  Env env;
  env.local_rank = local_rank;
  return env;
}

TEST(Device, WithoutAnIndexIsTheOneOfTheLocalRankAndIsMadeCurrent) {
  // Two nodes of two.
  for (int rank = 0; rank < 4; ++rank) {
    current = -1;
    EXPECT_EQ(resolve_device(kType, on_node(rank % 2), rank), c10::Device(kType, rank % 2));
    EXPECT_EQ(current, rank % 2);
  }
  // Three and one: by the rank on the node, not by the rank.
  EXPECT_EQ(resolve_device(kType, on_node(0), 3).index(), 0);
  // Nodes that are not told of, and more ranks than devices.
  EXPECT_EQ(resolve_device(kType, on_node(std::nullopt), 3).index(), 1);
  EXPECT_EQ(resolve_device(kType, on_node(5), 0).index(), 1);
}

TEST(Device, WithAnIndexIsItWhateverTheLocalRank) {
  EXPECT_EQ(resolve_device({kType, 1}, on_node(0), 2), c10::Device(kType, 1));
  EXPECT_EQ(current, 1);
  EXPECT_THROW(resolve_device({kType, 2}, on_node(0), 2), Error);
}

}  // namespace
}  // namespace torch_overlap
