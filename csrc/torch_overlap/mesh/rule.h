#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/mesh/layout.h"

namespace torch_overlap::mesh {

// The meaning of sharding one factor of an operator.
enum class FactorKind : uint8_t {
  kParallel,  // every rank computes its part independently
  kReduced,   // only in inputs: every rank reduces its part, and the outputs are partial
  kWhole      // every rank needs all of it: cannot be sharded
};

struct Factor {
  std::string name;
  int64_t size = 1;
  FactorKind kind = FactorKind::kParallel;
  ReduceKind reduce = ReduceKind::kSum;  // kReduced
};

// The factors of each dimension, major to minor: one for most dimensions, none for a dimension of
// size 1, several if a reshape splits or joins dimensions.
struct Operand {
  Shape shape;
  std::vector<std::vector<int32_t>> dims;
};

// Along one axis these inputs (bit i: input i) may be partial with one of these kinds (bit k: kind
// k) while all others are replicated. The outputs are then partial with the same kind.
struct PartialPattern {
  uint64_t inputs = 0;
  uint32_t kinds = 0;
};

enum class Compute : uint8_t { kNone, kBytes, kProduct };

// Declares how one operator can run on sharded operands: a table, without code. The functions below
// build the rules of torch's operators; einsum_rule() builds custom ones.
struct TORCH_OVERLAP_API OpRule {
  std::string op;
  std::vector<Factor> factors;
  std::vector<Operand> inputs;
  std::vector<Operand> outputs;
  std::vector<PartialPattern> patterns = {};
  // Inputs that are added to the result of a reduced factor (a bias). If that makes the outputs
  // partial, these inputs are partial as well, so that they are added once.
  uint64_t addend_inputs = 0;
  uint64_t no_gradient_inputs = 0;  // inputs without a gradient, such as indices
  // Cost of the local operator: none, its bytes, or a matrix product whose batch, rows, columns and
  // inner dimension are these factors.
  Compute compute = Compute::kBytes;
  std::vector<int32_t> batch = {};
  std::vector<int32_t> rows = {};
  std::vector<int32_t> columns = {};
  std::vector<int32_t> inner = {};
  double products = 1;  // number of such products
  // Work that a rank must do in addition to the operator on its parts, for reports. Usually empty.
  std::string note = {};

  // "matmul: b m k, k n -> b m n". Reduced factors are k+ (with the kind unless it is sum), whole
  // ones k!.
  std::string str() const;
};

inline constexpr uint32_t kAllKinds = 0x1F;
inline constexpr uint32_t kLinearKinds =
    1U << static_cast<unsigned>(ReduceKind::kSum) | 1U << static_cast<unsigned>(ReduceKind::kAvg);

// Builds a rule from "b m k, k n -> b m n": one name per dimension. A name in no output is reduced
// (a sum). A name with a trailing ! must be whole. 1 is a dimension of size 1, and (a b) a
// dimension of two factors, major first. Sizes come from the shapes; the size of a factor inside
// brackets comes from another dimension that is this factor only. Errors: ranks or sizes that do
// not match.
TORCH_OVERLAP_API OpRule einsum_rule(std::string_view op, std::string_view equation,
                                     const std::vector<Shape>& inputs);

// Treatment of partial inputs by an elementwise operator.
enum class Elementwise : uint8_t {
  kNonlinear,  // none may be partial: relu, exp, pow, where's condition, casts that round
  kLinear,     // sums pass through: neg, times a number, unary
  kMove,       // every kind passes through: copies, casts that widen
  kAdd,        // all inputs together, replicated ones made partial: add, sub, where's values
  kMultiply,   // at most one input: mul
  kDivide      // the first input only: div
};

// Inputs are broadcast as in torch, aligned at their last dimension.
TORCH_OVERLAP_API OpRule elementwise_rule(std::string_view op, const std::vector<Shape>& inputs,
                                          Elementwise how);
// torch.matmul: vectors, batches, broadcast batches.
TORCH_OVERLAP_API OpRule matmul_rule(const Shape& a, const Shape& b);
// nn.Linear: the weight is [out, in]; a bias is added once.
TORCH_OVERLAP_API OpRule linear_rule(const Shape& x, const Shape& weight, bool has_bias);
// sum, mean, amax, amin, prod over `dims` (all if empty). A mean is the sum of this rank's part
// divided by the global count.
TORCH_OVERLAP_API OpRule reduction_rule(std::string_view op, const Shape& x,
                                        std::vector<int64_t> dims, bool keepdim);
TORCH_OVERLAP_API OpRule reshape_rule(const Shape& from, const Shape& to);
// Output dimension d is input dimension order[d].
TORCH_OVERLAP_API OpRule transpose_rule(const Shape& x, const std::vector<int64_t>& order);
TORCH_OVERLAP_API OpRule broadcast_rule(const Shape& from, const Shape& to);
TORCH_OVERLAP_API OpRule concat_rule(const std::vector<Shape>& inputs, int64_t dim);
// Splits a dimension: one output [begin, end) for each extent.
TORCH_OVERLAP_API OpRule slice_rule(const Shape& x, int64_t dim, const std::vector<Extent>& parts);
// index_select, embedding: table[..., index, ...]. If the table is sharded along the indexed
// dimension, each rank looks up its part.
TORCH_OVERLAP_API OpRule take_rule(const Shape& table, const Shape& index, int64_t dim);
// softmax, log_softmax, cumsum, sort, flip: whole along `dims`, parallel along any other dimension.
// `outputs`: shapes of the results, of other sizes along `dims` (pooling, interpolation, pad);
// empty: one of x's shape.
TORCH_OVERLAP_API OpRule along_rule(std::string_view op, const Shape& x, std::vector<int64_t> dims,
                                    const std::vector<Shape>& outputs = {});
// layer_norm, rms_norm over the last dimensions, with `num_weights` weights of their shape (0 to
// 2).
TORCH_OVERLAP_API OpRule norm_rule(const Shape& x, int64_t normalized_dims, int64_t num_weights);
// conv1d, 2d, 3d: the batch, output channels and groups are parallel, input channels are summed.
TORCH_OVERLAP_API OpRule conv_rule(const Shape& x, const Shape& weight, const Shape& output,
                                   int64_t groups, bool has_bias);
// scaled_dot_product_attention of [..., heads, queries, depth] and [..., kv_heads, keys, depth].
// Queries are parallel unless a mask depends on their position.
TORCH_OVERLAP_API OpRule attention_rule(const Shape& query, const Shape& key, const Shape& value,
                                        bool is_causal);
// An operator that is not known: whole operands, whole results.
TORCH_OVERLAP_API OpRule opaque_rule(std::string_view op, const std::vector<Shape>& inputs,
                                     const std::vector<Shape>& outputs);

}  // namespace torch_overlap::mesh
