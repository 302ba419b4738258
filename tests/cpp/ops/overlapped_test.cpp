#include "torch_overlap/ops/overlapped.h"

#include <gtest/gtest.h>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::ops {
namespace {

std::shared_ptr<TorchComm> fake_comm(const std::string& name, int size) {
  return TorchComm::create("fake", c10::kCPU, name, {}, RankAndSize{0, size});
}

Algorithm chosen(std::string_view algorithm, const std::shared_ptr<TorchComm>& comm, int64_t rows) {
  return choose_algorithm("op", algorithm, comm, at::kFloat, rows, 1, 1).algorithm;
}

template <typename F>
Error choose_error(const F& choose) {
  try {
    choose();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorKind::kRuntime, "");
}

TEST(ChooseAlgorithm, TakesWhatIsAsked) {
  const auto comm = fake_comm("asked", 8);
  EXPECT_EQ(chosen("sequential", comm, 1 << 20), Algorithm::sequential);
  EXPECT_EQ(chosen("chunked", comm, 1), Algorithm::chunked);
  comm->finalize();
}

TEST(ChooseAlgorithm, AutoGoesInChunksThatOutlastTheirTransfer) {
  const auto comm = fake_comm("auto", 8);
  EXPECT_EQ(chosen("auto", comm, 1 << 20), Algorithm::chunked);
  EXPECT_EQ(chosen("auto", comm, 1), Algorithm::sequential);
  comm->finalize();
  const auto alone = fake_comm("alone", 1);
  EXPECT_EQ(chosen("auto", alone, 1 << 20), Algorithm::sequential);
  alone->finalize();
}

TEST(ChooseAlgorithm, SaysWhyAChannelCannotBeUsed) {
  const auto comm = fake_comm("peerless", 2);
  for (const auto* algorithm : {"ring", "bulk"}) {
    const auto error = choose_error([&] { chosen(algorithm, comm, 1 << 20); });
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_EQ(std::string(error.what()), concat("op: expected what algorithm '", algorithm,
                                                "' needs, got: the communicator has no peers"));
  }
  const auto error =
      choose_error([&] { choose_algorithm("op", "ring", comm, at::kLong, 1 << 20, 1, 1); });
  EXPECT_STREQ(error.what(),
               "op: expected what algorithm 'ring' needs, got: products of Long are torch's");
  comm->finalize();
}

TEST(ChooseAlgorithm, ListsTheChoices) {
  const auto comm = fake_comm("listed", 2);
  const auto error = choose_error([&] { chosen("tree", comm, 1); });
  EXPECT_EQ(error.kind(), ErrorKind::kValue);
  EXPECT_STREQ(error.what(),
               "op: expected algorithm to be one of auto, sequential, chunked, ring, bulk, got "
               "'tree'");
  comm->finalize();
}

}  // namespace
}  // namespace torch_overlap::ops
