#include "torch_overlap/comm/backends/nccl/primitives.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "comm/nccl/fake_nccl.h"

namespace torch_overlap {
namespace {

using testing::FakeNccl;
using Log = std::vector<std::string>;

// Rank 1 of 3, on CPU tensors: the calls of NCCL depend only on sizes and dtypes.
class NcclPrimitivesTest : public ::testing::Test {
 protected:
  void SetUp() override { FakeNccl::reset(); }
  static const Log& log() { return FakeNccl::instance().log; }

  static at::Tensor zeros(int64_t count, at::ScalarType dtype = at::kFloat) {
    return at::zeros({count}, dtype);
  }
  // Returns parts that are not contiguous with each other.
  static RankTensors apart(std::vector<int64_t> counts) {
    RankTensors blocks;
    for (const auto count : counts) blocks.parts.push_back(zeros(count));
    return blocks;
  }

  const NcclApi api_ = FakeNccl::api();
  NcclPrimitives nccl_{api_, nullptr, 1, 3, nullptr, nullptr};
};

TEST_F(NcclPrimitivesTest, EqualPartsTakeOneAllGatherWhetherFlatOrNot) {
  const Log expected{"all_gather 16"};
  nccl_.all_gather({zeros(12), {}}, zeros(4));
  EXPECT_EQ(log(), expected);
  FakeNccl::reset();
  nccl_.all_gather(apart({4, 4, 4}), zeros(4));
  EXPECT_EQ(log(), expected);
}

TEST_F(NcclPrimitivesTest, UnequalPartsTakeABroadcastForEachRankWhetherFlatOrNot) {
  const Log expected{"start", "broadcast 4 from 0", "broadcast 8 from 1", "broadcast 0 from 2",
                     "end"};
  nccl_.all_gather(apart({1, 2, 0}), zeros(2));
  EXPECT_EQ(log(), expected);
  FakeNccl::reset();
  const auto flat = zeros(3);
  nccl_.all_gather({flat, {flat.narrow(0, 0, 1), flat.narrow(0, 1, 2), flat.narrow(0, 3, 0)}},
                   zeros(2));
  EXPECT_EQ(log(), expected);
}

TEST_F(NcclPrimitivesTest, EqualPartsTakeOneReduceScatterWhetherFlatOrNot) {
  const Log expected{concat("reduce_scatter 4 type ", ncclFloat32, " op ", ncclSum)};
  nccl_.reduce_scatter(zeros(4), {zeros(12), {}}, RedOpType::SUM);
  EXPECT_EQ(log(), expected);
  FakeNccl::reset();
  nccl_.reduce_scatter(zeros(4), apart({4, 4, 4}), RedOpType::SUM);
  EXPECT_EQ(log(), expected);
}

TEST_F(NcclPrimitivesTest, AllToAllIsTheSameGroupForFlatAndListedParts) {
  const Log expected{"start",         "send 8 to 0", "recv 8 from 0", "send 8 to 1",
                     "recv 8 from 1", "send 8 to 2", "recv 8 from 2", "end"};
  nccl_.all_to_all({zeros(6), {}}, {zeros(6), {}});
  EXPECT_EQ(log(), expected);
  FakeNccl::reset();
  nccl_.all_to_all(apart({2, 2, 2}), {zeros(6), {}});
  EXPECT_EQ(log(), expected);
}

TEST_F(NcclPrimitivesTest, OnlyTheRootOfAScatterSends) {
  nccl_.scatter(zeros(2), {}, /*root=*/0);
  EXPECT_EQ(log(), (Log{"start", "recv 8 from 0", "end"}));
  FakeNccl::reset();
  nccl_.scatter(zeros(2), apart({2, 2, 2}), /*root=*/1);
  EXPECT_EQ(log(),
            (Log{"start", "send 8 to 0", "send 8 to 1", "send 8 to 2", "recv 8 from 1", "end"}));
}

TEST_F(NcclPrimitivesTest, OnlyTheRootOfAGatherReceives) {
  nccl_.gather({}, zeros(2), /*root=*/2);
  EXPECT_EQ(log(), (Log{"start", "send 8 to 2", "end"}));
  FakeNccl::reset();
  nccl_.gather({zeros(6), {}}, zeros(2), /*root=*/1);
  EXPECT_EQ(log(), (Log{"start", "send 8 to 1", "recv 8 from 0", "recv 8 from 1", "recv 8 from 2",
                        "end"}));
}

TEST_F(NcclPrimitivesTest, ABatchSendsNothingForEmptyTensors) {
  nccl_.p2p({{P2POp::Type::SEND, zeros(3, at::kByte), 0},
             {P2POp::Type::RECV, zeros(0), 0},
             {P2POp::Type::RECV, zeros(1, at::kDouble), 2}});
  EXPECT_EQ(log(), (Log{"start", "send 3 to 0", "recv 8 from 2", "end"}));
}

TEST_F(NcclPrimitivesTest, AFailureInsideAGroupClosesIt) {
  for (int fail_at = 1; fail_at < 7; ++fail_at) {
    FakeNccl::reset();
    FakeNccl::instance().fail_at = fail_at;
    EXPECT_THROW(nccl_.all_to_all({zeros(6), {}}, {zeros(6), {}}), NcclError) << fail_at;
    EXPECT_EQ(FakeNccl::instance().depth, 0) << fail_at;
    EXPECT_EQ(log().back(), "end") << fail_at;
  }
}

TEST_F(NcclPrimitivesTest, AnOperationHasBegunOnceNcclTookACallOrAWholeGroup) {
  const RankTensors parts{zeros(6), {}};
  const int calls = 8;  // start, three sends and receives, end
  for (int fail_at = 0; fail_at < calls; ++fail_at) {
    FakeNccl::reset();
    FakeNccl::instance().fail_at = fail_at;
    NcclPrimitives fresh{api_, nullptr, 1, 3, nullptr, nullptr};
    EXPECT_THROW(fresh.all_to_all(parts, parts), NcclError) << fail_at;
    EXPECT_FALSE(fresh.has_launched()) << fail_at;
  }
  FakeNccl::reset();
  EXPECT_FALSE(nccl_.has_launched());
  nccl_.all_to_all(parts, parts);
  EXPECT_TRUE(nccl_.has_launched());
}

TEST_F(NcclPrimitivesTest, AComposedOperationThatFailsInItsSecondStepHasBegun) {
  const auto large = zeros(3 << 16, at::kInt);  // all-to-all, local reduction, all-gather
  FakeNccl::instance().fail_at = 8;
  FakeNccl::instance().failure = ncclInvalidArgument;
  EXPECT_THROW(nccl_.all_reduce(large, RedOpType::BXOR), NcclError);
  EXPECT_EQ(log()[7], "end");
  EXPECT_EQ(log().size(), 9);
  EXPECT_TRUE(nccl_.has_launched());
  FakeNccl::reset();
  FakeNccl::instance().fail_at = 0;
  NcclPrimitives fresh{api_, nullptr, 1, 3, nullptr, nullptr};
  EXPECT_THROW(fresh.all_reduce(large, RedOpType::BXOR), NcclError);
  EXPECT_FALSE(fresh.has_launched());
}

TEST_F(NcclPrimitivesTest, ARefusedArgumentIsNotFatalAndAnInternalErrorIs) {
  for (const auto result : {ncclInvalidArgument, ncclInvalidUsage, ncclInternalError,
                            ncclRemoteError, ncclSystemError, ncclUnhandledCudaError}) {
    FakeNccl::reset();
    FakeNccl::instance().fail_at = 0;
    FakeNccl::instance().failure = result;
    try {
      nccl_.all_reduce(zeros(2), RedOpType::SUM);
      FAIL() << "expected an error for " << result;
    } catch (const NcclError& error) {
      EXPECT_EQ(error.is_fatal(), result != ncclInvalidArgument && result != ncclInvalidUsage);
      EXPECT_NE(std::string(error.what()).find("what NCCL said"), std::string::npos);
    }
  }
}

TEST_F(NcclPrimitivesTest, APremultipliedSumMakesItsOperatorAndDropsItAfterTheCall) {
  nccl_.all_reduce(zeros(2, at::kBFloat16), ReduceOp::premul_sum(0.5));
  EXPECT_EQ(log(), (Log{concat("premul type ", ncclBfloat16, " low bits ", 0x3f00),
                        concat("all_reduce 2 type ", ncclBfloat16, " op 100"), "drop op 100"}));
  FakeNccl::reset();
  nccl_.all_reduce(zeros(2, at::kHalf), ReduceOp::premul_sum(0.5));
  EXPECT_EQ(log().front(), concat("premul type ", ncclFloat16, " low bits ", 0x3800));
  FakeNccl::reset();
  nccl_.all_reduce(zeros(2), ReduceOp::premul_sum(zeros(1)));
  EXPECT_EQ(log().front(), concat("premul type ", ncclFloat32, " on device"));
}

TEST_F(NcclPrimitivesTest, TheOperatorIsDroppedWhenTheCallFails) {
  FakeNccl::instance().fail_at = 1;
  EXPECT_THROW(nccl_.all_reduce(zeros(2), ReduceOp::premul_sum(0.5)), NcclError);
  EXPECT_EQ(log().back(), "drop op 100");
}

TEST_F(NcclPrimitivesTest, ComplexReducesAsPairsOfReals) {
  nccl_.all_reduce(zeros(5, at::kComplexFloat), RedOpType::AVG);
  EXPECT_EQ(log(), (Log{concat("all_reduce 10 type ", ncclFloat32, " op ", ncclAvg)}));
}

// NCCL 2.28 would leave out the last elements.
TEST_F(NcclPrimitivesTest, TheMeanOfOneRankIsASum) {
  NcclPrimitives alone(api_, nullptr, 0, 1, nullptr, nullptr);
  for (const auto dtype : {at::kDouble, at::kBFloat16, at::kLong, at::kComplexFloat}) {
    FakeNccl::reset();
    const auto x = zeros(4099, dtype);
    alone.reduce_scatter(zeros(4099, dtype), {x, {x}}, RedOpType::AVG);
    ASSERT_EQ(log().size(), 1U) << dtype;
    EXPECT_NE(log()[0].find(concat(" op ", ncclSum)), std::string::npos) << log()[0];
  }
}

TEST_F(NcclPrimitivesTest, WhatNcclLacksIsComposedOfDataMovement) {
  for (const auto dtype : {at::kShort, at::kUInt16, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    FakeNccl::reset();
    const auto tensor = zeros(4, dtype);
    nccl_.all_reduce(tensor, RedOpType::SUM);
    EXPECT_EQ(log(), (Log{concat("all_gather ", tensor.nbytes())})) << dtype;
  }
  FakeNccl::reset();
  nccl_.all_reduce(zeros(4, at::kInt), RedOpType::BXOR);
  EXPECT_EQ(log(), (Log{"all_gather 16"}));
}

// NCCL may map some memory into the peer. Each message is 8 bytes, and the n-th receive of a group
// gets the data of its n-th send.
class NcclPrimitivesMappingTest : public NcclPrimitivesTest {
 protected:
  void SetUp() override {
    NcclPrimitivesTest::SetUp();
    mapped().clear();
    api_.group_end = [] {
      auto& fake = FakeNccl::instance();
      --fake.depth;
      for (size_t i = 0; i < std::min(fake.sent.size(), fake.received.size()); ++i) {
        std::memcpy(fake.received[i], fake.sent[i], kBytes);
      }
      return fake.note("end");
    };
  }
  static constexpr size_t kBytes = 8;
  static std::set<const void*>& mapped() {
    static std::set<const void*> addresses;
    return addresses;
  }
  static bool is_mapped(const void* data) { return mapped().contains(data); }
  static at::Tensor fresh(int64_t count, bool is_mapped) {
    const auto tensor = at::rand({count});
    if (is_mapped) mapped().insert(tensor.const_data_ptr());
    return tensor;
  }
  static bool is_used(const at::Tensor& tensor) {
    const auto& fake = FakeNccl::instance();
    const void* const data = tensor.const_data_ptr();
    return std::count(fake.sent.begin(), fake.sent.end(), data) +
               std::count(fake.received.begin(), fake.received.end(), data) !=
           0;
  }

  NcclApi api_ = FakeNccl::api();
  NcclPrimitives make(NcclMapping mapping) const {
    return {api_, nullptr, 1, 3, nullptr, nullptr, nullptr, {}, mapping};
  }
  NcclPrimitives captured_ = make({is_mapped, /*is_capture=*/true});
  NcclPrimitives eager_ = make({is_mapped, /*is_capture=*/false});
};

TEST_F(NcclPrimitivesMappingTest, SendsAndReceivesGoThroughMemoryThatIsNotMapped) {
  for (const bool gives : {false, true}) {
    for (const bool gets : {false, true}) {
      mapped().clear();
      const auto give = fresh(2, gives);
      const auto get = fresh(2, gets);
      const std::vector<P2POp> ops{{P2POp::Type::SEND, give, 0}, {P2POp::Type::RECV, get, 2}};
      FakeNccl::reset();
      captured_.p2p(ops);
      EXPECT_TRUE(at::equal(get, give));
      EXPECT_EQ(is_used(give), !gives);
      EXPECT_EQ(is_used(get), !gets);
      FakeNccl::reset();
      eager_.p2p(ops);
      EXPECT_TRUE(is_used(give) && is_used(get));
    }
  }
}

TEST_F(NcclPrimitivesMappingTest, OperationsOfSendsAndReceivesDoSoToo) {
  const auto in = fresh(6, true);
  const auto out = fresh(6, true);
  captured_.all_to_all({out, {}}, {in, {}});
  EXPECT_TRUE(at::equal(out, in));
  EXPECT_FALSE(is_used(in) || is_used(out));

  FakeNccl::reset();
  const std::vector<at::Tensor> parts{fresh(2, false), fresh(2, true), fresh(2, false)};
  captured_.all_to_all({{}, parts}, {in, {}});
  EXPECT_TRUE(at::equal(at::cat(parts), in));
  EXPECT_TRUE(is_used(parts[0]) && is_used(parts[2]));
  EXPECT_FALSE(is_used(in) || is_used(parts[1]));

  FakeNccl::reset();
  const auto one = fresh(2, true);
  captured_.scatter(one, {in, {}}, /*root=*/1);
  EXPECT_TRUE(at::equal(one, in.narrow(0, 0, 2)));
  EXPECT_FALSE(is_used(in) || is_used(one));

  FakeNccl::reset();
  captured_.gather({out.zero_(), {}}, one, /*root=*/1);
  EXPECT_TRUE(at::equal(out.narrow(0, 0, 2), one));
  EXPECT_FALSE(is_used(out) || is_used(one));
}

TEST_F(NcclPrimitivesMappingTest, OutsideOfCapturesAnAllToAllOfBothKindsDoesSo) {
  for (const bool gives : {false, true}) {
    for (const bool gets : {false, true}) {
      mapped().clear();
      const auto in = fresh(6, gives);
      const auto out = fresh(6, gets);
      FakeNccl::reset();
      make({is_mapped, /*is_capture=*/false}).all_to_all({out, {}}, {in, {}});
      EXPECT_TRUE(at::equal(out, in));
      EXPECT_EQ(is_used(in), !gives || gets);
      EXPECT_EQ(is_used(out), !gets || gives);
    }
  }
}

TEST_F(NcclPrimitivesMappingTest, ComposedReductionsDoSo) {
  const auto tensor = at::ones({2}, at::kInt);
  mapped().insert(tensor.const_data_ptr());
  eager_.reduce(tensor, RedOpType::BXOR, /*root=*/0);
  EXPECT_EQ(log(), (Log{"start", "send 8 to 0", "end"}));
  EXPECT_FALSE(is_used(tensor));
  FakeNccl::reset();
  make({is_mapped, /*is_capture=*/false})
      .reduce_scatter(at::zeros({2}, at::kInt), {{}, {tensor, tensor, tensor}}, RedOpType::BXOR);
  EXPECT_EQ(log().size(), 8);
  EXPECT_FALSE(is_used(tensor));
}

TEST_F(NcclPrimitivesMappingTest, WhereAllMemoryIsMappedItIsUsedAsItIs) {
  auto all = make({[](const void*) { return true; }, /*is_capture=*/true});
  const auto give = fresh(2, true);
  const auto get = fresh(2, true);
  all.p2p({{P2POp::Type::SEND, give, 0}, {P2POp::Type::RECV, get, 2}});
  EXPECT_TRUE(at::equal(get, give));
  EXPECT_TRUE(is_used(give) && is_used(get));
}

}  // namespace
}  // namespace torch_overlap
