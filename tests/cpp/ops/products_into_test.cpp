// The overlapped operators into results of the caller, as the JAX front end calls them.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "comm/local_ranks.h"
#include "torch_overlap/comm/backends/local/spawn.h"
#include "torch_overlap/ops/choose.h"
#include "torch_overlap/ops/ops.h"

namespace torch_overlap::testing {
namespace {

constexpr int kSize = 2;

// The calls of one rank. x has three dimensions, of which the second is split, too.
struct Calls {
  explicit Calls(const Comm& comm, std::string_view algorithm = "auto")
      : gather{.x = sample(comm->rank(), 1, {3, 4, 5}, at::kDouble),
               .weights = {sample(comm->rank(), 2, {6, 5}, at::kDouble),
                           sample(comm->rank(), 3, {2, 5}, at::kDouble)},
               .comm = comm->name(),
               .group_size = kSize,
               .return_gathered = true,
               .algorithm = algorithm},
        scatter{.x = sample(comm->rank(), 4, {4, 2, 5}, at::kDouble),
                .weight = sample(comm->rank(), 5, {6, 5}, at::kDouble),
                .bias = sample(0, 6, {6}, at::kDouble),
                .comm = comm->name(),
                .group_size = kSize,
                .algorithm = algorithm},
        reduce{.x = scatter.x,
               .weight = scatter.weight,
               .comm = comm->name(),
               .group_size = kSize,
               .op = "avg",
               .algorithm = algorithm} {}

  ops::AllGatherMatmul gather;
  ops::MatmulReduceScatter scatter;
  ops::MatmulAllReduce reduce;
};

at::Tensor marked(const at::Tensor& like) { return at::full_like(like, 99); }

TEST(ProductsInto, WriteWhatTheOperatorsReturn) {
  for (const char* algorithm : {"auto", "sequential", "pipelined"}) {
    for (const int64_t dim : {0, 1}) {
      run_local_ranks(kSize, [&](const Comm& comm) {
        Calls calls(comm, algorithm);
        calls.gather.gather_dim = dim;
        calls.scatter.scatter_dim = dim;

        const auto [products, rows] = ops::all_gather_matmul(calls.gather);
        const ops::AllGatherMatmul::Result got{{marked(products[0]), marked(products[1])},
                                               marked(rows)};
        ops::all_gather_matmul_into(calls.gather, got);
        expect_equal(std::get<0>(got)[0], products[0], "first product");
        expect_equal(std::get<0>(got)[1], products[1], "second product");
        expect_equal(std::get<1>(got), rows, "gathered rows");

        const auto part = ops::matmul_reduce_scatter(calls.scatter);
        const auto got_part = marked(part);
        ops::matmul_reduce_scatter_into(calls.scatter, got_part);
        expect_equal(got_part, part, "reduce-scatter");

        const auto sum = ops::matmul_all_reduce(calls.reduce);
        const auto got_sum = marked(sum);
        ops::matmul_all_reduce_into(calls.reduce, got_sum);
        expect_equal(got_sum, sum, "all-reduce");
      });
    }
  }
}

TEST(ProductsInto, ComputeBelowAutograd) {
  run_local_ranks(kSize, [&](const Comm& comm) {
    Calls calls(comm);
    calls.reduce.weight.requires_grad_();
    const auto got = poisoned({4, 2, 6}, at::kDouble);
    ops::matmul_all_reduce_into(calls.reduce, got);
    EXPECT_FALSE(got.requires_grad());
  });
}

TEST(ProductsInto, RefuseResultsThatDoNotFit) {
  run_local_ranks(kSize, [&](const Comm& comm) {
    const Calls calls(comm);
    const auto message = [&](const at::Tensor& result) {
      return std::string(
          error_of([&] { ops::matmul_reduce_scatter_into(calls.scatter, result); }).what());
    };
    const std::string expected = "matmul_reduce_scatter: expected the result ";
    EXPECT_TRUE(contains(message(poisoned({4, 2, 6}, at::kDouble)),
                         expected + "of shape [2, 2, 6], got [4, 2, 6]"));
    EXPECT_TRUE(contains(message(poisoned({2, 2, 6})), expected + "of dtype"));
    EXPECT_TRUE(contains(message(poisoned({6, 2, 2}, at::kDouble).permute({1, 2, 0})),
                         expected + "contiguous, got strides"));
    const ops::AllGatherMatmul::Result no_products{std::vector<at::Tensor>(), at::Tensor()};
    EXPECT_TRUE(
        contains(error_of([&] { ops::all_gather_matmul_into(calls.gather, no_products); }).what(),
                 "all_gather_matmul: expected memory for 2 products, got it for 0"));
    EXPECT_TRUE(contains(message(at::Tensor()), expected + "of shape [2, 2, 6], got [0]"));
    const ops::AllGatherMatmul::Result short_rows{std::vector<at::Tensor>(2), poisoned({6})};
    EXPECT_TRUE(
        contains(error_of([&] { ops::all_gather_matmul_into(calls.gather, short_rows); }).what(),
                 "all_gather_matmul: expected the gathered x of shape [6, 4, 5], got [6]"));
  });
}

TEST(PrepareScope, ComputesNothing) {
  for (const char* algorithm : {"auto", "sequential", "pipelined", "bulk"}) {
    run_local_ranks(kSize, [&](const Comm& comm) {
      const Calls calls(comm, algorithm);
      const auto part = poisoned({2, 2, 6}, at::kDouble);
      const auto sum = poisoned({4, 2, 6}, at::kDouble);
      {
        const ops::PrepareScope scope;
        ops::matmul_reduce_scatter_into(calls.scatter, part);
        ops::matmul_all_reduce_into(calls.reduce, sum);
      }
      expect_equal(part, poisoned({2, 2, 6}, at::kDouble));
      expect_equal(sum, poisoned({4, 2, 6}, at::kDouble));
      ops::matmul_reduce_scatter_into(calls.scatter, part);
      expect_equal(part, ops::matmul_reduce_scatter(calls.scatter));
    });
  }
}

}  // namespace
}  // namespace torch_overlap::testing
