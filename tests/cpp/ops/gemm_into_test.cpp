// gemm() into results of the caller.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "comm/local_ranks.h"
#include "torch_overlap/comm/backends/local/spawn.h"
#include "torch_overlap/ops/gemm_op.h"
#include "torch_overlap/overlap/registry.h"

namespace torch_overlap::testing {
namespace {

ops::GemmOp call_of(const at::Tensor& lhs, const at::Tensor& rhs) {
  ops::GemmOp call;
  call.lhs = lhs;
  call.rhs = rhs;
  return call;
}

ops::GemmResults poisoned_like(const ops::GemmResults& results) {
  const auto like = [](const at::Tensor& one) { return at::full_like(one, 99); };
  return {like(std::get<0>(results)), like(std::get<1>(results)), like(std::get<2>(results)),
          like(std::get<3>(results))};
}

void expect_same(const ops::GemmResults& got, const ops::GemmResults& expected) {
  expect_equal(std::get<0>(got), std::get<0>(expected), "output");
  expect_equal(std::get<1>(got), std::get<1>(expected), "bias_grad");
  expect_equal(std::get<2>(got), std::get<2>(expected), "pre_gelu_out");
  expect_equal(std::get<3>(got), std::get<3>(expected), "aux_out");
}

TEST(GemmInto, WritesWhatGemmReturns) {
  auto call = call_of(sample(0, 1, {2, 3, 4}, at::kDouble), sample(0, 2, {4, 5}, at::kDouble));
  call.bias = sample(0, 3, {5}, at::kDouble);
  call.fuse_bias = true;
  call.fuse_gelu = true;
  const auto expected = ops::gemm(call);
  const auto got = poisoned_like(expected);
  ops::gemm_into(call, got);
  expect_same(got, expected);

  auto grad = call_of(sample(0, 4, {6, 4}, at::kDouble), sample(0, 5, {4, 5}, at::kDouble));
  grad.gelu_input = sample(0, 6, {6, 5}, at::kDouble);
  grad.fuse_bias = true;
  grad.fuse_gelu = true;
  grad.grad = true;
  const auto expected_grad = ops::gemm(grad);
  const auto got_grad = poisoned_like(expected_grad);
  ops::gemm_into(grad, got_grad);
  expect_same(got_grad, expected_grad);
}

TEST(GemmInto, ComputesBelowAutograd) {
  const auto lhs = sample(0, 1, {3, 4}).requires_grad_();
  const auto rhs = sample(0, 2, {4, 5});
  const ops::GemmResults results{poisoned({3, 5}), {}, {}, {}};
  ops::gemm_into(call_of(lhs, rhs), results);
  EXPECT_FALSE(std::get<0>(results).requires_grad());
  expect_equal(std::get<0>(results), lhs.detach().matmul(rhs));
}

TEST(GemmInto, RefusesResultsThatDoNotFit) {
  const auto call = call_of(sample(0, 1, {3, 4}), sample(0, 2, {4, 5}));
  const auto message = [&](const at::Tensor& output) {
    return std::string(error_of([&] { ops::gemm_into(call, {output, {}, {}, {}}); }).what());
  };
  EXPECT_TRUE(contains(message(poisoned({3, 4})), "gemm: expected output of shape [3, 5], got"));
  EXPECT_TRUE(contains(message(at::Tensor()), "gemm: expected output of shape [3, 5], got"));
  EXPECT_TRUE(contains(message(poisoned({3, 5}, at::kDouble)), "expected output of dtype"));
  EXPECT_TRUE(contains(message(poisoned({5, 3}).t()), "expected output contiguous, got strides"));
}

// All methods of buffers: the results of gemm() itself are the reference.
TEST(GemmInto, WritesResultsOfBuffers) {
  struct Mode {
    CommOverlapType type;
    CommOverlapMethod method;
  };
  const std::vector<Mode> modes{{CommOverlapType::AG, CommOverlapMethod::BULK},
                                {CommOverlapType::RS, CommOverlapMethod::BULK},
                                {CommOverlapType::RS, CommOverlapMethod::PIPELINE},
                                {CommOverlapType::RS, CommOverlapMethod::RING_EXCHANGE},
                                {CommOverlapType::AG, CommOverlapMethod::RING_EXCHANGE}};
  for (const Mode& mode : modes) {
    run_local_ranks(2, [&](const Comm& comm) {
      auto config = CommOverlapConfig::defaults(mode.type, mode.method, 2);
      config.buffer_shape = {6, 4};
      config.buffer_dtype = at::kDouble;
      auto call = call_of(sample(comm->rank(), 1, {3, 4}, at::kDouble),
                          sample(comm->rank(), 2, {4, 4}, at::kDouble));
      call.comm_type = static_cast<int64_t>(mode.type);
      call.comm_overlap_method = static_cast<int64_t>(mode.method);
      call.comm_overlap_id = create_comm_overlap_buffer(comm, config);
      if (mode.method == CommOverlapMethod::BULK) {
        const bool gathers = mode.type == CommOverlapType::AG;
        call.aux_in = sample(comm->rank(), 3, {gathers ? 3 : 6, 4}, at::kDouble);
      } else if (mode.type == CommOverlapType::RS) {
        call.lhs = sample(comm->rank(), 1, {5, 4}, at::kDouble);  // shared as 3 and 2 rows
      }
      const auto expected = ops::gemm(call);
      const auto got = poisoned_like(expected);
      ops::gemm_into(call, got);
      expect_same(got, expected);
      destroy_comm_overlap_buffer(call.comm_overlap_id);
    });
  }
}

}  // namespace
}  // namespace torch_overlap::testing
