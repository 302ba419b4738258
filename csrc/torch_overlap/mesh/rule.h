#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/mesh/layout.h"

namespace torch_overlap::mesh {

// What sharding one factor of an operator means.
enum class FactorKind : uint8_t {
  kParallel,  // every rank computes its part, and knows nothing of the others
  kReduced,   // in inputs only: every rank reduces its part, the outputs are pending
  kWhole      // no rank can do without any of it: not sharded
};

struct Factor {
  std::string name;
  int64_t size = 1;
  FactorKind kind = FactorKind::kParallel;
  ReduceKind reduce = ReduceKind::kSum;  // kReduced
};

// The factors of each dimension, major to minor: one for most, none for a dimension of size 1,
// several where a reshape cuts or joins dimensions.
struct Operand {
  Shape shape;
  std::vector<std::vector<int32_t>> dims;
};

// Along one axis these inputs (bit i: input i) may be pending with one of these kinds (bit k: kind
// k) while all others are replicated; the outputs are then pending in the same way.
struct PartialPattern {
  uint64_t inputs = 0;
  uint32_t kinds = 0;
};

enum class Compute : uint8_t { kNone, kBytes, kProduct };

// What one operator may do on parts of its operands: a table, no code. The functions below make the
// rules of torch's operators; einsum_rule() those of one's own.
struct TORCH_OVERLAP_API OpRule {
  std::string op;
  std::vector<Factor> factors;
  std::vector<Operand> inputs;
  std::vector<Operand> outputs;
  std::vector<PartialPattern> patterns = {};
  // Inputs that are added to what a reduced factor gives (a bias): where that makes the outputs
  // pending they are pending as well, so that they count once.
  uint64_t addends = 0;
  uint64_t no_gradient = 0;  // inputs, such as indices
  // How the time of the local operator is found: nothing, its bytes, or a product of matrices whose
  // batch, rows, columns and inner dimension are these factors.
  Compute compute = Compute::kBytes;
  std::vector<int32_t> batch = {};
  std::vector<int32_t> rows = {};
  std::vector<int32_t> columns = {};
  std::vector<int32_t> inner = {};
  double products = 1;  // how many such products
  // What a rank must do apart from running the operator on its parts, for reports; mostly nothing.
  std::string note = {};

  // "matmul: b m k, k n -> b m n"; reduced factors as k+ (its kind where it is no sum), whole as k!
  std::string str() const;
};

inline constexpr uint32_t kAllKinds = 0x1F;
inline constexpr uint32_t kLinearKinds =
    1U << static_cast<unsigned>(ReduceKind::kSum) | 1U << static_cast<unsigned>(ReduceKind::kAvg);

// "b m k, k n -> b m n": one name a dimension. A name in no output is reduced (a sum); a name with
// a trailing ! must be whole; 1 is a dimension of size 1, (a b) one of two factors, major first.
// Sizes come from the shapes; that of a factor inside brackets from another place where it is
// alone. Errors: ranks or sizes that do not fit.
TORCH_OVERLAP_API OpRule einsum_rule(std::string_view op, std::string_view equation,
                                     const std::vector<Shape>& inputs);

// How an elementwise operator treats pending inputs.
enum class Elementwise : uint8_t {
  kNonlinear,  // not at all: relu, exp, pow, where's condition, casts that round
  kLinear,     // sums pass: neg, times a number, unary
  kMove,       // every kind passes: copies, casts that widen
  kAdd,        // all inputs together, replicated ones made pending: add, sub, where's values
  kMultiply,   // one input at most: mul
  kDivide      // the first input: div
};

// Inputs are broadcast as torch does, aligned at their last dimension.
TORCH_OVERLAP_API OpRule elementwise_rule(std::string_view op, const std::vector<Shape>& inputs,
                                          Elementwise how);
// torch.matmul: vectors, batches, broadcast batches.
TORCH_OVERLAP_API OpRule matmul_rule(const Shape& a, const Shape& b);
// nn.Linear: the weight is [out, in]; a bias is added once.
TORCH_OVERLAP_API OpRule linear_rule(const Shape& x, const Shape& weight, bool has_bias);
// sum, mean, amax, amin, prod over `dims` (all of them if empty). A mean is a sum of the own part,
// divided by the global count.
TORCH_OVERLAP_API OpRule reduction_rule(std::string_view op, const Shape& x,
                                        std::vector<int64_t> dims, bool keepdim);
TORCH_OVERLAP_API OpRule reshape_rule(const Shape& from, const Shape& to);
// Output dimension d is input dimension order[d].
TORCH_OVERLAP_API OpRule transpose_rule(const Shape& x, const std::vector<int64_t>& order);
TORCH_OVERLAP_API OpRule broadcast_rule(const Shape& from, const Shape& to);
TORCH_OVERLAP_API OpRule concat_rule(const std::vector<Shape>& inputs, int64_t dim);
// [begin, end) of a dimension; one output for each pair of bounds.
TORCH_OVERLAP_API OpRule slice_rule(const Shape& x, int64_t dim, const std::vector<Extent>& parts);
// index_select, embedding: table[..., index, ...]. A table that is sharded along the indexed
// dimension is looked up by parts.
TORCH_OVERLAP_API OpRule take_rule(const Shape& table, const Shape& index, int64_t dim);
// softmax, log_softmax, cumsum, sort, flip: whole along `dims`, any other dimension parallel.
TORCH_OVERLAP_API OpRule along_rule(std::string_view op, const Shape& x, std::vector<int64_t> dims);
// layer_norm, rms_norm over the last dimensions, with so many weights of their shape (0 to 2).
TORCH_OVERLAP_API OpRule norm_rule(const Shape& x, int64_t normalized_dims, int64_t num_weights);
// conv1d, 2d, 3d: the batch, output channels and groups are parallel, input channels are summed.
TORCH_OVERLAP_API OpRule conv_rule(const Shape& x, const Shape& weight, const Shape& output,
                                   int64_t groups, bool has_bias);
// scaled_dot_product_attention of [..., heads, queries, depth] and [..., kv_heads, keys, depth].
// Queries are parallel where no mask depends on their position.
TORCH_OVERLAP_API OpRule attention_rule(const Shape& query, const Shape& key, const Shape& value,
                                        bool is_causal);
// What nobody knows: whole operands, whole results.
TORCH_OVERLAP_API OpRule opaque_rule(std::string_view op, const std::vector<Shape>& inputs,
                                     const std::vector<Shape>& outputs);

}  // namespace torch_overlap::mesh
