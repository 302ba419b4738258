#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/core/SymInt.h>

#include <memory>
#include <optional>
#include <ostream>
#include <string_view>

#include "torch_overlap/comm/reduce_op.h"
#include "torch_overlap/comm/torch_comm.h"

// Shared code of the operators: argument checks, all of which work on symbolic shapes, and the
// lookup of an operator's communicator.
namespace torch_overlap::ops {

// Returns `dim` as a non-negative dimension of `x`.
int64_t wrap_dim(std::string_view op, const at::Tensor& x, int64_t dim, std::string_view what);
// Returns `dim`, the argument `what`, as a non-negative dimension of the rows of x [..., features].
int64_t check_row_dim(std::string_view op, const at::Tensor& x, int64_t dim, std::string_view what);
void check_group_size(std::string_view op, int64_t group_size);
// Checks that `rank`, the argument `what`, is not negative.
void check_rank(std::string_view op, std::string_view what, int64_t rank);
// Guards on equality if the sizes are symbolic.
void check_size(std::string_view op, std::string_view what, const c10::SymInt& expected,
                const c10::SymInt& got);
// `name`: name of `x` in the operator's schema.
void check_divisible(std::string_view op, const at::Tensor& x, int64_t dim, int64_t group_size,
                     std::string_view name = "x");
// Checks that the dtype of `got` is that of `expected`, which is x.
void check_dtype(std::string_view op, std::string_view what, const at::Tensor& expected,
                 const at::Tensor& got);
// An argument in an error message: "a weight" of an operator that has one, or "weights[1]".
struct Argument {
  std::string_view name;
  std::string_view list{};
  int64_t index = -1;  // -1: not in a list
};
inline Argument weight_argument(int64_t index) { return {"a weight", "weights", index}; }
inline Argument bias_argument(int64_t index) { return {"a bias", "biases", index}; }
std::ostream& operator<<(std::ostream& out, const Argument& argument);

// Checks the operands of a linear layer on x [..., k]: weight [n, k], bias [n]. `index`: position
// in the lists of an operator with several weights. `ranks`: number of ranks among which the k of
// the weight is split.
void check_weight(std::string_view op, const at::Tensor& x, const at::Tensor& weight,
                  int64_t index = -1, int64_t ranks = 1);
void check_bias(std::string_view op, const at::Tensor& x, const at::Tensor& bias,
                const at::Tensor& weight, int64_t index = -1);
// The shape checks that 8-bit operands share.
void check_weight_shape(std::string_view op, const at::Tensor& x, const at::Tensor& weight,
                        int64_t index = -1, int64_t ranks = 1);
void check_bias_shape(std::string_view op, const at::Tensor& bias, const at::Tensor& weight,
                      int64_t index = -1);
// Checks that there is at least one weight, and one bias per weight if there are biases.
void check_weight_count(std::string_view op, size_t weights, size_t biases);
// Checks that `value` is one of the space-separated `choices`.
void check_choice(std::string_view op, std::string_view what, std::string_view choices,
                  std::string_view value);

// Returns element i of a list of optional tensors; empty if there is none, or the list is empty.
std::optional<at::Tensor> optional_at(const c10::List<std::optional<at::Tensor>>& tensors,
                                      size_t i);

// Returns the communicator `name`, which must have `group_size` ranks.
std::shared_ptr<TorchComm> find_comm(std::string_view op, std::string_view name,
                                     int64_t group_size);
std::shared_ptr<TorchComm> find_comm(std::string_view name);

// Returns the reduction `name`, which must support x's dtype.
ReduceOp parse_reduction(std::string_view op, const at::Tensor& x, std::string_view name,
                         const std::optional<at::Scalar>& factor);

// Returns memory for a result: `*caller`, or a new tensor if it is null. Throws, naming
// it `name`, unless the caller's is contiguous and has these sizes and options. One without
// elements may be undefined.
at::Tensor result_memory(std::string_view op, std::string_view name, const at::Tensor* caller,
                         c10::SymIntArrayRef sizes, const at::TensorOptions& options);

// Returns memory for a result that is wanted, otherwise a tensor of shape [0].
at::Tensor empty_if(bool is_wanted, c10::SymIntArrayRef sizes, const at::TensorOptions& options);

// Checks that no two elements of `x`, which the operator overwrites, share memory (as those of an
// expanded tensor do).
void check_no_overlap(std::string_view op, const at::Tensor& x);

// Returns the factor by which the gradient of a linear reduction is scaled: 1 for sum, 1/group_size
// for avg, the factor for premul_sum. Throws a kUnsupported error for the other reductions, which
// have no gradient.
double gradient_scale(std::string_view op, std::string_view name, int64_t group_size,
                      const std::optional<at::Scalar>& factor);

// Returns `x` with dimension `dim` first, contiguous: the layout in which a rank's part of `x` is
// sent.
at::Tensor dim_first(const at::Tensor& x, int64_t dim);
// True if slices along `dim` are consecutive in a contiguous tensor of x's shape, as they are for
// dimension 0: every dimension before `dim` has size 1.
bool is_outermost(const at::Tensor& x, int64_t dim);

}  // namespace torch_overlap::ops
