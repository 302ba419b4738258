#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/core/SymInt.h>

#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

#include "torch_overlap/comm/reduce_op.h"
#include "torch_overlap/comm/torch_comm.h"

// What the operators share: argument checks (all of them work on symbolic shapes) and how an
// operator finds its communicator.
namespace torch_overlap::ops {

// `dim` as a non-negative dimension of `x`.
int64_t wrap_dim(std::string_view op, const at::Tensor& x, int64_t dim, std::string_view what);
void check_group_size(std::string_view op, int64_t group_size);
// Guards on equality where the sizes are symbolic.
void check_size(std::string_view op, std::string_view what, const c10::SymInt& expected,
                const c10::SymInt& got);
// `name`: that of `x` in the operator's schema.
void check_divisible(std::string_view op, const at::Tensor& x, int64_t dim, int64_t group_size,
                     std::string_view name = "x");
// As x, `expected`, is.
void check_dtype(std::string_view op, std::string_view what, const at::Tensor& expected,
                 const at::Tensor& got);
// 8-bit floats are no operands where nobody gives their scales.
void check_unscaled(std::string_view op, const at::Tensor& x);
// An argument in a message: "a weight" of an operator that takes one, or "weights[1]".
struct Argument {
  std::string_view name;
  std::string_view list;
  int64_t index = -1;  // -1: it is in no list
};
inline Argument weight_argument(int64_t index) { return {"a weight", "weights", index}; }
inline Argument bias_argument(int64_t index) { return {"a bias", "biases", index}; }
std::ostream& operator<<(std::ostream& out, const Argument& argument);

// The operands of a linear layer on x [..., k]: weight [n, k], bias [n]. `index`: in the lists of
// an operator that takes several. `ranks`: as many share the k that the weight has.
void check_weight(std::string_view op, const at::Tensor& x, const at::Tensor& weight,
                  int64_t index = -1, int64_t ranks = 1);
void check_bias(std::string_view op, const at::Tensor& x, const at::Tensor& bias,
                const at::Tensor& weight, int64_t index = -1);
// The two checks of them that 8-bit operands share.
void check_weight_shape(std::string_view op, const at::Tensor& x, const at::Tensor& weight,
                        int64_t index = -1, int64_t ranks = 1);
void check_bias_shape(std::string_view op, const at::Tensor& bias, const at::Tensor& weight,
                      int64_t index = -1);
// As many weights as there may be biases; one or more.
void check_weight_count(std::string_view op, size_t weights, size_t biases);
// `value` is one of the space-separated `choices`.
void check_choice(std::string_view op, std::string_view what, std::string_view choices,
                  std::string_view value);

// The communicator `name`, which must have `group_size` ranks.
std::shared_ptr<TorchComm> find_comm(std::string_view op, std::string_view name,
                                     int64_t group_size);
std::shared_ptr<TorchComm> find_comm(std::string_view name);

// The reduction `name`, which must be one that x's dtype takes.
ReduceOp parse_reduction(std::string_view op, const at::Tensor& x, std::string_view name,
                         const std::optional<at::Scalar>& factor);

// No two elements of `x`, which the operator overwrites, share memory (as those of an expanded
// tensor do).
void check_no_overlap(std::string_view op, const at::Tensor& x);

// The number that the gradient of a linear reduction is multiplied with: 1 for sum, 1/group_size
// for avg, the factor for premul_sum. A kUnsupported error for the others, which have no gradient
// here.
double gradient_scale(std::string_view op, std::string_view name, int64_t group_size,
                      const std::optional<at::Scalar>& factor);

// `x` with dimension `dim` first and contiguous: what a rank's part of `x` looks like on the wire.
at::Tensor dim_first(const at::Tensor& x, int64_t dim);
// Whether slices along `dim` lie behind each other in a contiguous tensor shaped as `x`, as they do
// for dimension 0: every dimension before it is of size 1.
bool is_outermost(const at::Tensor& x, int64_t dim);

}  // namespace torch_overlap::ops
