#include "torch_overlap/comm/backends/nccl/one_sided.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <vector>

#include "comm/nccl/fake_nccl.h"

namespace torch_overlap {
namespace {

using testing::FakeNccl;

class OneSidedSupport : public ::testing::Test {
 protected:
  void SetUp() override {
    FakeNccl::reset();
    FakeNccl::instance().version = 22907;
    api_.comm_window_register = [](ncclComm_t, void*, size_t, ncclWindow_t*, int) {
      return ncclSuccess;
    };
    api_.put_signal = [](const void*, size_t, ncclDataType_t, int, ncclWindow_t, size_t, int, int,
                         unsigned int, ncclComm_t, cudaStream_t) { return ncclSuccess; };
    api_.is_nvls_enabled = true;
  }
  void TearDown() override {
    unsetenv("NCCL_NVLS_ENABLE");
    unsetenv("NCCL_GRAPH_REGISTER");
  }
  NcclApi api_ = FakeNccl::api();
};

TEST_F(OneSidedSupport, NeedsAnNcclThatHasTheCalls) {
  EXPECT_TRUE(OneSided::support(api_, 2).can);
  EXPECT_EQ(OneSided::support(api_, 2).why, "");
  const auto expect_too_old = [&](const std::string& version) {
    const auto support = OneSided::support(api_, 2);
    EXPECT_FALSE(support.can);
    EXPECT_EQ(support.why, concat("one-sided operations need NCCL 2.29.0 or newer, and ", version,
                                  " is loaded"));
  };
  FakeNccl::instance().version = 22809;
  expect_too_old("2.28.9");
  FakeNccl::instance().version = 22907;
  api_.put_signal = nullptr;
  expect_too_old("2.29.7");
}

TEST_F(OneSidedSupport, MakesNoMulticastObjects) {
  const auto support = OneSided::support(api_, 3);
  EXPECT_FALSE(support.can);
  EXPECT_NE(support.why.find("NCCL_NVLS_ENABLE=0"), std::string::npos) << support.why;
  EXPECT_NE(support.why.find("before the first communicator"), std::string::npos) << support.why;
  api_.is_nvls_enabled = false;
  EXPECT_TRUE(OneSided::support(api_, 3).can);
}

TEST_F(OneSidedSupport, TakesTheEnvironmentWhenNcclDoes) {
  unsetenv("NCCL_NVLS_ENABLE");
  EXPECT_TRUE(NcclApi().is_nvls_enabled);
  setenv("NCCL_NVLS_ENABLE", "1", 1);
  const NcclApi before;
  EXPECT_TRUE(before.is_nvls_enabled);
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  EXPECT_FALSE(NcclApi().is_nvls_enabled);
  EXPECT_TRUE(before.is_nvls_enabled);

  unsetenv("NCCL_GRAPH_REGISTER");
  EXPECT_TRUE(NcclApi().is_graph_register_enabled);
  setenv("NCCL_GRAPH_REGISTER", "0", 1);
  EXPECT_FALSE(NcclApi().is_graph_register_enabled);
}

TEST(NcclErrors, SayWhetherNcclRefusesOrBroke) {
  for (const auto result : {ncclInvalidArgument, ncclInvalidUsage, ncclSystemError}) {
    EXPECT_TRUE(NcclError(result, "").is_refusal()) << result;
  }
  for (const auto result : {ncclInternalError, ncclUnhandledCudaError, ncclRemoteError}) {
    EXPECT_FALSE(NcclError(result, "").is_refusal()) << result;
  }
}

TEST(RemotePieces, OfTheWindowsOwnMemoryGoAtOnce) {
  const std::vector<std::byte> memory(1000);
  const auto* begin = memory.data();
  for (const size_t at : {0, 1, 500, 900}) {
    const auto pieces = remote_pieces(begin + at, 100, 7, begin, memory.size(), 64);
    ASSERT_EQ(pieces.size(), 1U);
    EXPECT_EQ(pieces[0].from, begin + at);
    EXPECT_EQ(pieces[0].bytes, 100U);
    EXPECT_EQ(pieces[0].offset, 7U);
    EXPECT_FALSE(pieces[0].is_staged);
  }
}

TEST(RemotePieces, OfOtherMemoryAreStagedEachByteOnceInOrder) {
  std::random_device device;
  std::mt19937 random(device());
  const std::vector<std::byte> memory(4096);
  const std::byte* const begin = memory.data() + 2000;
  constexpr size_t kKnown = 96;
  for (int round = 0; round < 200; ++round) {
    const size_t bytes = random() % 1000;
    const size_t staging = 1 + random() % 300;
    const size_t offset = random() % 5000;
    // Before the memory, across its beginning, across its end, or after it.
    const std::byte* const starts[] = {begin - bytes, begin - 1, begin + kKnown - bytes / 2,
                                       begin + kKnown + 1};
    const std::byte* const from = starts[round % 4];
    const bool is_known = from >= begin && from + bytes <= begin + kKnown;
    size_t done = 0;
    for (const auto& piece : remote_pieces(from, bytes, offset, begin, kKnown, staging)) {
      EXPECT_EQ(piece.from, from + done);
      EXPECT_EQ(piece.offset, offset + done);
      EXPECT_EQ(piece.is_staged, !is_known);
      EXPECT_GT(piece.bytes, 0U);
      if (piece.is_staged) {
        EXPECT_LE(piece.bytes, staging);
      }
      done += piece.bytes;
    }
    EXPECT_EQ(done, bytes);
  }
}

TEST(RemotePieces, OfNothingAreNone) {
  EXPECT_TRUE(remote_pieces(nullptr, 0, 0, nullptr, 0, 0).empty());
}

}  // namespace
}  // namespace torch_overlap
