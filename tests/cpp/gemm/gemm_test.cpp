#include "torch_overlap/gemm/gemm.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <limits>
#include <thread>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/gemm/checked_gemm.h"
#include "torch_overlap/gemm/grouped.h"
#include "torch_overlap/gemm/options.h"

namespace torch_overlap {
namespace {

at::Tensor poisoned(int64_t m, int64_t n) {
  return at::full({m, n}, std::numeric_limits<double>::quiet_NaN(), at::kDouble);
}

GemmArgs linear(int64_t m, int64_t n, int64_t k) {
  GemmArgs args;
  args.lhs.data = at::randn({m, k}, at::kDouble);
  args.rhs.data = at::randn({n, k}, at::kDouble);
  args.rhs.transposed = true;
  args.out = poisoned(m, n);
  return args;
}

at::Tensor expected(const GemmArgs& args) { return at::mm(args.lhs.data, args.rhs.data.t()); }

ErrorKind kind_of(const GemmArgs& args) {
  try {
    gemm("test", args);
  } catch (const Error& error) {
    return error.kind();
  }
  return ErrorKind::kRuntime;
}

TEST(Gemm, ShapesComeFromTheTransposes) {
  GemmArgs args = linear(3, 5, 7);
  const auto shape = gemm_shape(args);
  EXPECT_EQ(shape.m, 3);
  EXPECT_EQ(shape.n, 5);
  EXPECT_EQ(shape.k, 7);
  args.lhs.data = args.lhs.data.t().contiguous();
  args.lhs.transposed = true;
  EXPECT_EQ(gemm_shape(args).m, 3);
}

TEST(Gemm, RowsAndColumnsMakeTheWhole) {
  const GemmArgs args = linear(9, 12, 4);
  for (const int64_t row : {0, 4, 8}) {
    const GemmArgs rows = gemm_rows("test", args, row, std::min<int64_t>(4, 9 - row));
    for (const int64_t column : {0, 5, 10}) {
      gemm("test", gemm_columns("test", rows, column, std::min<int64_t>(5, 12 - column)));
    }
  }
  EXPECT_TRUE(at::allclose(args.out, expected(args)));
}

TEST(Gemm, WhatIsCheckedRunsAgainOnNewValues) {
  const CheckedGemm whole("test", linear(9, 12, 4));
  std::vector<CheckedGemm> pieces;
  for (const int64_t row : {0, 4, 8}) {
    pieces.emplace_back("test", whole.rows(row, std::min<int64_t>(4, 9 - row)));
  }
  for (int turn = 0; turn < 2; ++turn) {
    whole.args().lhs.data.normal_();
    for (const CheckedGemm& piece : pieces) piece.run();
    EXPECT_TRUE(at::allclose(whole.args().out, expected(whole.args())));
  }
  GemmArgs wrong = linear(4, 4, 4);
  wrong.out = poisoned(4, 5);
  EXPECT_THROW(CheckedGemm("test", wrong), Error);
}

TEST(Gemm, RefusalsHaveAKindAndComputeNothing) {
  GemmArgs args = linear(4, 4, 4);
  args.out = poisoned(4, 5);
  EXPECT_EQ(kind_of(args), ErrorKind::kValue);
  args.out = poisoned(4, 4).to(at::kFloat);
  EXPECT_EQ(kind_of(args), ErrorKind::kType);
  EXPECT_TRUE(args.out.isnan().all().item<bool>());
}

TEST(Gemm, ThreadsMultiplyAtOnce) {
  reset_gemm_statistics();
  std::vector<GemmArgs> problems;
  for (int i = 0; i < 16; ++i) problems.push_back(linear(8 + i, 8, 8));
  std::vector<std::thread> threads;
  threads.reserve(problems.size());
  for (const auto& args : problems) threads.emplace_back([&args] { gemm("test", args); });
  for (auto& thread : threads) thread.join();
  for (const auto& args : problems) EXPECT_TRUE(at::allclose(args.out, expected(args)));
  EXPECT_EQ(gemm_statistics().calls, 16);
}

TEST(GroupedGemm, EmptyProductsAreFine) {
  const std::vector<GemmArgs> group{linear(4, 4, 4), linear(0, 4, 4), linear(4, 4, 0)};
  grouped_gemm("test", group);
  for (const auto& args : group) EXPECT_TRUE(at::allclose(args.out, expected(args)));
}

TEST(ScalingMode, NumbersAreThoseOfTheNames) {
  for (int64_t value = 0; value < 7; ++value) {
    EXPECT_EQ(static_cast<int64_t>(scaling_mode("test", value)), value);
    EXPECT_NE(to_string(scaling_mode("test", value)), "unknown scaling mode");
  }
  EXPECT_THROW(scaling_mode("test", 7), Error);
  EXPECT_THROW(scaling_mode("test", -1), Error);
}

}  // namespace
}  // namespace torch_overlap
