// The registry of backends, `fake`, `gloo` without Python, and the small value types of calls.

#include "comm/local_ranks.h"
#include "torch_overlap/comm/call.h"
#include "torch_overlap/comm/composed.h"
#include "torch_overlap/comm/registry.h"

namespace torch_overlap {
namespace {

using namespace testing;  // NOLINT

Comm fake(int size, int rank, const char* name) {
  return TorchComm::create("fake", c10::kCPU, name, {}, RankAndSize{rank, size});
}

TEST(Backends, TheOnesOfACpuBuildAreThere) {
  for (const char* name : {"fake", "gloo", "local"}) EXPECT_TRUE(find_backend(name)) << name;
  const Error error =
      error_of([] { TorchComm::create("smoke", c10::kCPU, "a", {}, RankAndSize{0, 1}); });
  EXPECT_TRUE(contains(error.what(), "expected a backend among [")) << error.what();
}

TEST(Backends, GlooWithoutPythonSaysWhatToUse) {
  BackendContext context;
  context.name = "g";
  const Error error = error_of([&] { find_backend("gloo")->make(context); });
  EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
  EXPECT_TRUE(contains(error.what(), "backend 'local'")) << error.what();
}

TEST(Backends, LocalRefusesADeviceThatIsNotTheCpu) {
  EXPECT_EQ(
      error_of([] { TorchComm::create("local", c10::kMeta, "a", {}, RankAndSize{0, 1}); }).kind(),
      ErrorKind::kType);
}

TEST(Fake, ResultsAreThoseOfEqualRanks) {
  const Comm comm = fake(5, 2, "fake_results");
  const auto reduced = [&](const ReduceOp& op, const at::Tensor& x) {
    const at::Tensor y = x.clone();
    EXPECT_TRUE(comm->all_reduce(y, op, true)->is_completed());
    return y;
  };
  const at::Tensor x = sample(0, 1, {7});
  expect_equal(reduced(RedOpType::SUM, x), x * 5);
  expect_equal(reduced(RedOpType::AVG, x), x);
  expect_equal(reduced(RedOpType::MAX, x), x);
  expect_equal(reduced(RedOpType::PRODUCT, at::full({2}, 2)), at::full({2}, 32));
  expect_equal(reduced(ReduceOp::premul_sum(0.5), x), x * 2.5);
  expect_equal(reduced(RedOpType::BXOR, at::full({2}, 6, at::kInt)), at::full({2}, 6, at::kInt));
  expect_equal(reduced(RedOpType::SUM, at::full({3}, 3).to(at::kBFloat16)),
               at::full({3}, 15).to(at::kBFloat16));

  const at::Tensor gathered = poisoned({35});
  comm->all_gather_single(gathered, x, false);
  expect_equal(gathered, x.repeat({5}));
  const at::Tensor wide = sample(0, 2, {10});
  const at::Tensor part = poisoned({2});
  comm->reduce_scatter_single(part, wide, RedOpType::SUM, false);
  expect_equal(part, wide.narrow(0, 4, 2) * 5);
  const at::Tensor exchanged = poisoned({10});
  comm->all_to_all_single(exchanged, wide, false);
  expect_equal(exchanged, wide.narrow(0, 4, 2).repeat({5}));
  const at::Tensor received = poisoned({3});
  comm->recv(received, 0, false);
  expect_equal(received, at::zeros({3}));
  comm->barrier(true)->wait();

  const Comm child = comm->split({4, 2});
  EXPECT_EQ(child->rank(), 1);
  EXPECT_EQ(child->size(), 2);
  child->finalize();
  comm->finalize();
}

TEST(Fake, AWorldOfThousandsCostsNothing) {
  const Comm comm = fake(4096, 4095, "fake_large");
  const at::Tensor x = at::ones({16}, at::kLong);
  comm->all_reduce(x, RedOpType::SUM, false);
  expect_equal(x, at::full({16}, 4096, at::kLong));
  comm->finalize();
}

TEST(RankTensors, PartsComeFromTheListOrFromTheFlatTensor) {
  const at::Tensor flat = at::arange(12).view({4, 3});
  const RankTensors uniform{flat, {}};
  EXPECT_TRUE(uniform.is_uniform_flat());
  expect_equal(uniform.part(1, 4), at::arange(3, 6));
  EXPECT_EQ(uniform.all(4).size(), 4U);
  EXPECT_EQ(uniform.part(3, 4).data_ptr(), flat[3].data_ptr());
  const RankTensors listed{at::Tensor(), {flat[2], flat[0]}};
  EXPECT_FALSE(listed.is_uniform_flat());
  expect_equal(listed.part(0, 2), flat[2]);
  EXPECT_TRUE(RankTensors{}.empty());
}

TEST(Call, KeepsEveryTensorAndNamesItself) {
  Call call;
  call.name = OpName::all_gather_v;
  call.sequence = 12;
  call.comm = "tp";
  call.tensor = at::ones({1});
  call.in.flat = at::ones({2});
  call.out.parts = {at::ones({3}), at::ones({4})};
  call.p2p.push_back({P2POp::Type::SEND, at::ones({5}), 0});
  call.reduce_op = ReduceOp::premul_sum(at::ones({1}));
  EXPECT_EQ(call.tensors().size(), 6U);
  EXPECT_EQ(call.describe(), "all_gather_v #12 on 'tp'");
}

TEST(ReduceParts, TheOutputMayBeAnyPart) {
  for (int out = 0; out < 3; ++out) {
    std::vector<at::Tensor> parts;
    at::Tensor expected = at::zeros({9});
    for (int r = 0; r < 3; ++r) {
      parts.push_back(sample(r, 3, {9}));
      expected += parts.back();
    }
    reduce_parts(parts[out], parts, RedOpType::SUM, {});
    expect_equal(parts[out], expected);
  }
}

TEST(Registry, NamesFindTheirCommunicatorUntilFinalize) {
  const Comm comm = fake(1, 0, "fake_named");
  EXPECT_EQ(get_comm("fake_named"), comm);
  EXPECT_EQ(error_of([] { fake(1, 0, "fake_named"); }).kind(), ErrorKind::kValue);
  comm->finalize();
  const Error error = error_of([] { get_comm("fake_named"); });
  EXPECT_EQ(error.kind(), ErrorKind::kState);
  const Comm again = fake(1, 0, "fake_named");
  again->finalize();
}

TEST(Registry, RanksThatAreThreadsFindTheirOwn) {
  run_local_ranks(3, [](const Comm& comm) {
    EXPECT_EQ(get_comm(comm->name()), comm);
    comm->barrier(false);
  });
}

}  // namespace
}  // namespace torch_overlap
