#include "torch_overlap/mesh/rule.h"

#include "mesh/evaluate.h"

namespace torch_overlap::mesh {
namespace {

TEST(Rule, EquationsAreRead) {
  const OpRule rule = einsum_rule("mm", "b m k, k n -> b m n", {{2, 3, 4}, {4, 5}});
  EXPECT_EQ(rule.str(), "mm: b m k+, k+ n -> b m n");
  EXPECT_EQ(rule.outputs[0].shape, (Shape{2, 3, 5}));
  const OpRule heads = einsum_rule("heads", "s (h d), h -> h s d!", {{3, 8}, {4}});
  EXPECT_EQ(heads.str(), "heads: s (h d!), h -> h s d!");
  EXPECT_EQ(heads.outputs[0].shape, (Shape{4, 3, 2}));
  EXPECT_EQ(einsum_rule("mm", "m k, k n -> m n", {{0, 4}, {4, 5}}).outputs[0].shape, (Shape{0, 5}));
  EXPECT_ERROR(einsum_rule("x", "m k, k n", {{1, 2}, {2, 3}}), kValue, "m k, k n -> m n");
  EXPECT_ERROR(einsum_rule("x", "m k, k n -> m n", {{1, 2}}), kValue, "expected 2 inputs");
  EXPECT_ERROR(einsum_rule("x", "m k, k n -> m n", {{1, 2}, {3, 3}}), kValue,
               "expected size 2 for 'k'");
  EXPECT_ERROR(einsum_rule("x", "m -> m n", {{3}}), kValue, "expected 'n' in an input");
  EXPECT_ERROR(einsum_rule("x", "(a b) -> a b", {{6}}), kValue, "at most one unknown size");
  EXPECT_ERROR(einsum_rule("x", "(a -> a", {{6}}), kValue, "brackets in pairs");
}

TEST(Rule, ReshapesShareTheirFactors) {
  EXPECT_EQ(reshape_rule({4, 4}, {16}).str(), "reshape: a b -> (a b)");
  EXPECT_EQ(reshape_rule({16}, {4, 4}).str(), "reshape: (a b) -> a b");
  EXPECT_EQ(reshape_rule({8, 32}, {2, 4, 32}).str(), "reshape: (a b) c -> a b c");
  EXPECT_EQ(reshape_rule({2, 3, 1, 4}, {6, 4}).str(), "reshape: a b 1 c -> (a b) c");
  EXPECT_EQ(reshape_rule({6, 4}, {4, 6}).str(), "reshape: (a b!) e! -> (a c!) d!");
  EXPECT_EQ(reshape_rule({12, 2}, {8, 3}).str(), "reshape: (a b!) e! -> (a c!) d!");
  EXPECT_EQ(reshape_rule({1}, {}).str(), "reshape: 1 -> ()");
  EXPECT_EQ(reshape_rule({0, 3}, {3, 0}).str(), "reshape: a! b! -> c! d!");
  EXPECT_ERROR(reshape_rule({4}, {5}), kValue, "expected 4 elements");
}

TEST(Rule, OperatorsHaveTheirFactors) {
  EXPECT_EQ(matmul_rule({4, 8}, {8, 2}).str(), "matmul: m k+, k+ n -> m n");
  EXPECT_EQ(matmul_rule({8}, {8, 2}).str(), "matmul: k+, k+ n -> n");
  EXPECT_EQ(matmul_rule({4, 8}, {8}).str(), "matmul: m k+, k+ -> m");
  EXPECT_EQ(matmul_rule({8}, {8}).str(), "matmul: k+, k+ -> ()");
  EXPECT_EQ(matmul_rule({3, 1, 4, 8}, {5, 8, 2}).str(), "matmul: b0 1 m k+, b1 k+ n -> b0 b1 m n");
  EXPECT_EQ(linear_rule({3, 4, 8}, {2, 8}, true).str(), "linear: a b k+, n k+, n -> a b n");
  EXPECT_EQ(elementwise_rule("add", {{4, 1}, {3}}, Elementwise::kAdd).str(), "add: a 1, b -> a b");
  EXPECT_EQ(reduction_rule("amax", {4, 8}, {-1}, true).str(), "amax: a b+max -> a 1");
  EXPECT_EQ(reduction_rule("mean", {4, 8}, {}, false).str(), "mean: a+ b+ -> ()");
  EXPECT_EQ(transpose_rule({2, 3, 4}, {-1, 0, 1}).str(), "transpose: a b c -> c a b");
  EXPECT_EQ(broadcast_rule({3, 1}, {2, 3, 4}).str(), "broadcast: b 1 -> a b c");
  EXPECT_EQ(concat_rule({{2, 3}, {4, 3}}, 0).str(), "concat: a0! b, a1! b -> a! b");
  EXPECT_EQ(slice_rule({8, 3}, 0, {{0, 2}, {4, 3}}).str(), "slice: a! b -> a0! b, a1! b");
  EXPECT_EQ(slice_rule({8, 3}, 0, {{0, 8}}).str(), "slice: a b -> a b");
  EXPECT_EQ(take_rule({100, 8}, {2, 3}, 0).str(), "take: a+ b, i0 i1 -> i0 i1 b");
  EXPECT_EQ(along_rule("softmax", {4, 8}, {-1}).str(), "softmax: a b! -> a b!");
  EXPECT_EQ(along_rule("max_pool2d", {4, 3, 8, 8}, {-2, -1}, {{4, 3, 4, 1}, {4, 3, 4, 1}}).str(),
            "max_pool2d: a b c! d! -> a b c0! 1, a b c1! 1");
  EXPECT_EQ(norm_rule({4, 8, 6}, 1, 2).str(), "norm: a b c!, c!, c! -> a b c!");
  EXPECT_EQ(conv_rule({2, 6, 5, 5}, {4, 3, 3, 3}, {2, 4, 3, 3}, 2, true).str(),
            "conv: b (g i+) x0! x1!, (g o) i+ w0! w1!, (g o) -> b (g o) y0! y1!");
  EXPECT_EQ(attention_rule({2, 8, 5, 4}, {2, 4, 7, 4}, {2, 4, 7, 3}, false).str(),
            "attention: b0 (h r) s d!, b0 h t! d!, b0 h t! e -> b0 (h r) s e");
}

TEST(Rule, WrongOperandsAreRefused) {
  EXPECT_ERROR(matmul_rule({4, 8}, {7, 2}), kValue, "expected 8 rows in the second input");
  EXPECT_ERROR(matmul_rule({}, {7, 2}), kValue, "at least one dimension");
  EXPECT_ERROR(matmul_rule({2, 4, 8}, {3, 8, 2}), kValue, "shapes that broadcast");
  EXPECT_ERROR(linear_rule({4, 8}, {8, 2}, false), kValue, "a weight of [out, 8]");
  EXPECT_ERROR(elementwise_rule("add", {{4}, {3}}, Elementwise::kAdd), kValue, "that broadcast");
  EXPECT_ERROR(reduction_rule("sum", {4}, {1}, false), kValue, "from -1 to 0, got 1");
  EXPECT_ERROR(reduction_rule("sum", {4, 4}, {0, -2}, false), kValue, "every dimension once");
  EXPECT_ERROR(reduction_rule("median", {4}, {}, false), kValue, "got 'median'");
  EXPECT_ERROR(transpose_rule({4, 4}, {0, 0}), kValue, "every dimension once");
  EXPECT_ERROR(transpose_rule({4, 4}, {0}), kValue, "every dimension of");
  EXPECT_ERROR(broadcast_rule({3}, {2}), kValue, "that broadcast");
  EXPECT_ERROR(concat_rule({{2, 3}, {2, 4}}, 0), kValue, "outside dimension 0");
  EXPECT_ERROR(slice_rule({8}, 0, {{6, 3}}), kValue, "got 3 from 6");
  EXPECT_ERROR(norm_rule({4}, 2, 0), kValue, "1 to 1 normalized");
  EXPECT_ERROR(conv_rule({2, 6, 5}, {4, 6, 3}, {2, 4, 3}, 2, false), kValue, "out, in / 2");
  EXPECT_ERROR(attention_rule({2, 6, 5, 4}, {2, 4, 7, 4}, {2, 4, 7, 3}, false), kValue, "divide");
}

}  // namespace
}  // namespace torch_overlap::mesh
