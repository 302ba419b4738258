#include "torch_overlap/ops/checks.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/movedim.h>

#include <algorithm>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/strings.h"
#include "torch_overlap/comm/registry.h"
#include "torch_overlap/comm/validate.h"

namespace torch_overlap::ops {
namespace {

// Checks that `got` has the dtype and the device of x.
void check_like_x(std::string_view op, const Argument& argument, const at::Tensor& x,
                  const at::Tensor& got) {
  TORCH_OVERLAP_CHECK(x.scalar_type() == got.scalar_type(), kType, op, ": expected ", argument,
                      " of dtype ", x.scalar_type(), " as x, got ", got.scalar_type(),
                      ". Convert one of them.");
  TORCH_OVERLAP_CHECK(x.device() == got.device(), kType, op, ": expected ", argument, " on device ",
                      x.device(), " as x, got ", got.device(), ". Move one of them.");
}

// Refuses 8-bit floats as operands of an operator that has no scales.
void check_unscaled(std::string_view op, const at::Tensor& x) {
  TORCH_OVERLAP_CHECK(
      !c10::isFloat8Type(x.scalar_type()), kType, op,
      ": expected x of numbers without scales, got ", x.scalar_type(),
      "; use scaled_all_gather_matmul, scaled_matmul_reduce_scatter, scaled_matmul_all_reduce or "
      "gemm, which take scales, or dequantize it first");
}

}  // namespace

int64_t wrap_dim(std::string_view op, const at::Tensor& x, int64_t dim, std::string_view what) {
  TORCH_OVERLAP_CHECK(x.dim() > 0, kValue, op,
                      ": expected a tensor of one or more dimensions, got a scalar. Use "
                      "x.reshape(1).");
  TORCH_OVERLAP_CHECK(dim >= -x.dim() && dim < x.dim(), kValue, op, ": expected ", what, " in [",
                      -x.dim(), ", ", x.dim() - 1, "], got ", dim, " for shape ", x.sym_sizes());
  return dim < 0 ? dim + x.dim() : dim;
}

int64_t check_row_dim(std::string_view op, const at::Tensor& x, int64_t dim,
                      std::string_view what) {
  TORCH_OVERLAP_CHECK(x.dim() >= 2, kValue, op,
                      ": expected x of two or more dimensions, got shape ", x.sym_sizes(),
                      "; use x.unsqueeze(0)");
  const int64_t wrapped = wrap_dim(op, x, dim, what);
  TORCH_OVERLAP_CHECK(wrapped + 1 < x.dim(), kValue, op, ": expected ", what,
                      " to be a dimension of rows, got ", dim, ", the features of shape ",
                      x.sym_sizes(), ". Move the features last, or use the plain collective.");
  return wrapped;
}

std::optional<at::Tensor> optional_at(const c10::List<std::optional<at::Tensor>>& tensors,
                                      size_t i) {
  if (tensors.empty()) return std::nullopt;
  std::optional<at::Tensor> tensor = tensors.get(i);
  return tensor && tensor->defined() ? tensor : std::nullopt;
}

void check_group_size(std::string_view op, int64_t group_size) {
  TORCH_OVERLAP_CHECK(group_size > 0, kValue, op, ": expected group_size > 0, got ", group_size,
                      "; pass comm.get_size()");
}

void check_rank(std::string_view op, std::string_view what, int64_t rank) {
  TORCH_OVERLAP_CHECK(rank >= 0, kValue, op, ": expected a rank >= 0 for ", what, ", got ", rank,
                      ". Ranks do not count from the end.");
}

void check_size(std::string_view op, std::string_view what, const c10::SymInt& expected,
                const c10::SymInt& got) {
  TORCH_OVERLAP_CHECK(expected.sym_eq(got).expect_true(__FILE__, __LINE__), kValue, op,
                      ": expected ", what, " ", expected, ", got ", got);
}

void check_divisible(std::string_view op, const at::Tensor& x, int64_t dim, int64_t group_size,
                     std::string_view name) {
  const auto rest = x.sym_size(dim) % group_size;
  TORCH_OVERLAP_CHECK(rest.sym_eq(0).expect_true(__FILE__, __LINE__), kValue, op,
                      ": expected dimension ", dim, " of ", name, " divisible by the group size ",
                      group_size, ", got ", x.sym_size(dim), " in shape ", x.sym_sizes(),
                      ". Pad it to a multiple of ", group_size,
                      op == "all_to_all" ? ", or use all_to_all_v." : ".");
}

void check_dtype(std::string_view op, std::string_view what, const at::Tensor& expected,
                 const at::Tensor& got) {
  TORCH_OVERLAP_CHECK(expected.scalar_type() == got.scalar_type(), kType, op, ": expected ", what,
                      " of dtype ", expected.scalar_type(), " as x, got ", got.scalar_type(),
                      "; convert one of them");
  TORCH_OVERLAP_CHECK(expected.device() == got.device(), kType, op, ": expected ", what,
                      " on device ", expected.device(), " as x, got ", got.device(),
                      "; move one of them");
}

std::ostream& operator<<(std::ostream& out, const Argument& argument) {
  if (argument.index < 0) return out << argument.name;
  return out << argument.list << '[' << argument.index << ']';
}

void check_weight_shape(std::string_view op, const at::Tensor& x, const at::Tensor& weight,
                        int64_t index, int64_t ranks) {
  const auto k = x.sym_size(-1) * ranks;
  TORCH_OVERLAP_CHECK(
      weight.dim() == 2 && k.sym_eq(weight.sym_size(1)).expect_true(__FILE__, __LINE__), kValue, op,
      ": expected ", weight_argument(index), " [out_features, in_features] with in_features ", k,
      ranks == 1 ? " as x" : " as x of all ranks", ", got shape ", weight.sym_sizes(),
      " for x of shape ", x.sym_sizes(), ". Pass weight.t() if it is [in_features, out_features].");
}

void check_bias_shape(std::string_view op, const at::Tensor& bias, const at::Tensor& weight,
                      int64_t index) {
  TORCH_OVERLAP_CHECK(
      bias.dim() == 1 &&
          weight.sym_size(0).sym_eq(bias.sym_size(0)).expect_true(__FILE__, __LINE__),
      kValue, op, ": expected ", bias_argument(index), " [out_features] of ", weight.sym_size(0),
      " elements, got shape ", bias.sym_sizes(), " for a weight of shape ", weight.sym_sizes(),
      ". Pass the bias of that weight.");
}

void check_weight(std::string_view op, const at::Tensor& x, const at::Tensor& weight, int64_t index,
                  int64_t ranks) {
  check_unscaled(op, x);
  check_weight_shape(op, x, weight, index, ranks);
  check_like_x(op, weight_argument(index), x, weight);
}

void check_bias(std::string_view op, const at::Tensor& x, const at::Tensor& bias,
                const at::Tensor& weight, int64_t index) {
  check_bias_shape(op, bias, weight, index);
  check_like_x(op, bias_argument(index), x, bias);
}

void check_weight_count(std::string_view op, size_t weights, size_t biases) {
  TORCH_OVERLAP_CHECK(weights > 0, kValue, op,
                      ": expected one or more weights, got none. Pass a list of them.");
  TORCH_OVERLAP_CHECK(biases == 0 || biases == weights, kValue, op,
                      ": expected no biases or one entry for each of the ", weights,
                      " weights, got ", biases, ". None stands for no bias.");
}

void check_choice(std::string_view op, std::string_view what, std::string_view choices,
                  std::string_view value) {
  for (std::string_view rest = choices; !rest.empty();) {
    const auto end = std::min(rest.find(' '), rest.size());
    if (rest.substr(0, end) == value) return;
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  fail(ErrorKind::kValue, op, ": expected ", what, " to be one of ", choices, ", got '", value,
       "'. Use one of them.");
}

std::shared_ptr<TorchComm> find_comm(std::string_view name) { return get_comm(std::string(name)); }

std::shared_ptr<TorchComm> find_comm(std::string_view op, std::string_view name,
                                     int64_t group_size) {
  auto comm = find_comm(name);
  TORCH_OVERLAP_CHECK(comm->size() == group_size, kValue, op, ": expected group_size ",
                      comm->size(), ", the size of communicator '", name, "', got ", group_size,
                      "; pass comm.get_size()");
  return comm;
}

ReduceOp parse_reduction(std::string_view op, const at::Tensor& x, std::string_view name,
                         const std::optional<at::Scalar>& factor) {
  const auto reduction = [&] {
    try {
      return ReduceOp::parse(name, factor ? std::optional(factor->toDouble()) : std::nullopt);
    } catch (const Error& error) {
      fail(error.kind(), op, ": ", error.what());
    }
  }();
  check_reduction(op, x.scalar_type(), reduction);
  return reduction;
}

at::Tensor result_memory(std::string_view op, std::string_view name, const at::Tensor* caller,
                         c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  if (caller == nullptr) return at::empty_symint(sizes, options);
  at::Tensor given = caller->defined() ? *caller : at::empty({0}, options);
  if (given.numel() == 0 && c10::multiply_integers(sizes) == 0) {
    return at::empty_symint(sizes, options);
  }
  TORCH_OVERLAP_CHECK(given.sym_sizes() == sizes, kValue, op, ": expected ", name, " of shape ",
                      sizes, ", got ", given.sym_sizes(), ". Allocate it so.");
  TORCH_OVERLAP_CHECK(
      given.scalar_type() == options.dtype().toScalarType() && given.device() == options.device(),
      kType, op, ": expected ", name, " of dtype ", options.dtype().toScalarType(), " on ",
      options.device(), ", got ", given.scalar_type(), " on ", given.device(), ". Allocate it so.");
  TORCH_OVERLAP_CHECK(given.is_contiguous(), kValue, op, ": expected ", name,
                      " contiguous, got strides ", given.sym_strides(), ". Allocate it so.");
  return given;
}

at::Tensor empty_if(bool is_wanted, c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  return is_wanted ? at::empty_symint(sizes, options) : at::empty({0}, options);
}

void check_no_overlap(std::string_view op, const at::Tensor& x) {
  TORCH_OVERLAP_CHECK(at::has_internal_overlap(x) != at::MemOverlap::Yes, kValue, op,
                      ": expected a tensor whose elements do not share memory, got shape ",
                      x.sym_sizes(), " with strides ", x.sym_strides(), "; clone it");
}

double gradient_scale(std::string_view op, std::string_view name, int64_t group_size,
                      const std::optional<at::Scalar>& factor) {
  if (name == "sum") return 1.0;
  if (name == "avg") return 1.0 / static_cast<double>(group_size);
  if (name == "premul_sum" && factor) return factor->toDouble();
  fail(ErrorKind::kUnsupported, op, ": expected op sum, avg or premul_sum where a gradient is ",
       "asked, got '", name, "', which has no gradient; detach the input");
}

at::Tensor dim_first(const at::Tensor& x, int64_t dim) {
  return dim == 0 ? x.contiguous() : at::movedim(x, dim, 0).contiguous();
}

bool is_outermost(const at::Tensor& x, int64_t dim) {
  const auto before = x.sizes().slice(0, dim);
  return std::all_of(before.begin(), before.end(), [](int64_t size) { return size == 1; });
}

}  // namespace torch_overlap::ops
