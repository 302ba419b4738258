// Selection of the device of a communicator, on fake devices that only count.

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

// Sets the local rank like a launcher; without one the variables are unset.
class OnNode {
 public:
  explicit OnNode(std::optional<int> local_rank) {
    set("TORCHCOMM_RANK", local_rank ? std::optional(0) : std::nullopt);
    set("TORCHCOMM_SIZE", local_rank ? std::optional(1) : std::nullopt);
    set("LOCAL_RANK", local_rank);
  }
  ~OnNode() {
    for (const char* name : {"TORCHCOMM_RANK", "TORCHCOMM_SIZE", "LOCAL_RANK"}) unsetenv(name);
  }
  OnNode(const OnNode&) = delete;
  OnNode& operator=(const OnNode&) = delete;

  c10::Device resolve(c10::Device device, int rank) const {
    return resolve_device(device, Env::read(), rank);
  }

 private:
  static void set(const char* name, std::optional<int> value) {
    value ? setenv(name, std::to_string(*value).c_str(), /*overwrite=*/1) : unsetenv(name);
  }
};

TEST(Device, WithoutAnIndexIsTheOneOfTheLocalRankAndIsMadeCurrent) {
  // Two nodes of two ranks.
  for (int rank = 0; rank < 4; ++rank) {
    current = -1;
    EXPECT_EQ(OnNode(rank % 2).resolve(kType, rank), c10::Device(kType, rank % 2));
    EXPECT_EQ(current, rank % 2);
  }
  // Nodes of three ranks and of one: the rank on the node decides, not the rank.
  EXPECT_EQ(OnNode(0).resolve(kType, 3).index(), 0);
  // No information about nodes, and more ranks than devices.
  EXPECT_EQ(OnNode(std::nullopt).resolve(kType, 3).index(), 1);
  EXPECT_EQ(OnNode(5).resolve(kType, 0).index(), 1);
}

TEST(Device, WithAnIndexIsItWhateverTheLocalRank) {
  EXPECT_EQ(OnNode(0).resolve({kType, 1}, 2), c10::Device(kType, 1));
  EXPECT_EQ(current, 1);
  EXPECT_THROW(OnNode(0).resolve({kType, 2}, 2), Error);
}

}  // namespace
}  // namespace torch_overlap
