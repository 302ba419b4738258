#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include "torch_overlap/common/views.h"
#include "torch_overlap/ops/checks.h"
#include "torch_overlap/ops/gemm_all_reduce.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/ops/register.h"
#include "torch_overlap/ops/scaled.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kScaledAllReduce = "scaled_matmul_all_reduce";

ScaledModes check_scaled_all_reduce(const Tensor& x, const Tensor& x_scale_inv,
                                    const Tensor& weight, const Tensor& weight_scale_inv,
                                    const std::optional<Tensor>& bias, int64_t group_size,
                                    std::string_view op, at::ScalarType out_dtype,
                                    std::string_view algorithm, int64_t scaling_mode) {
  const auto modes = check_scaled_x(kScaledAllReduce, x, x_scale_inv, group_size, /*dim=*/0, "rows",
                                    out_dtype, algorithm, scaling_mode)
                         .modes;
  check_choice(kScaledAllReduce, "op", "sum avg", op);
  check_scaled_weight(kScaledAllReduce, x, weight, weight_scale_inv, bias, out_dtype, modes);
  return modes;
}

Tensor scaled_all_reduce_out(const Tensor& x, const Tensor& weight, at::ScalarType out_dtype) {
  auto sizes = x.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, x.options().dtype(out_dtype));
}

Tensor scaled_all_reduce_kernel(const Tensor& x, const Tensor& x_scale_inv, const Tensor& weight,
                                const Tensor& weight_scale_inv, const std::optional<Tensor>& bias,
                                std::string_view comm, int64_t group_size, std::string_view op,
                                at::ScalarType out_dtype, bool use_split_accumulator,
                                std::string_view algorithm, int64_t scaling_mode) {
  const auto modes = check_scaled_all_reduce(x, x_scale_inv, weight, weight_scale_inv, bias,
                                             group_size, op, out_dtype, algorithm, scaling_mode);
  auto out = scaled_all_reduce_out(x, weight, out_dtype);
  const auto communicator = find_comm(kScaledAllReduce, comm, group_size);
  const auto inputs = to_rows(x, 0);
  const auto scales = scale_rows(x, x_scale_inv, 0, modes);
  const auto whole =
      scaled_product(x_scale_inv, weight, weight_scale_inv, modes, use_split_accumulator);
  const auto arguments = [&](const RowRange& rows) {
    GemmArgs part = whole;
    part.lhs.data = row_view(inputs, rows.begin, rows.length);
    if (scales.defined()) part.lhs.scale_inv = row_view(scales, rows.begin, rows.length);
    return part;
  };
  const auto multiply_args = [&](const RowRange& rows, const Tensor& to) {
    GemmArgs part = arguments(rows);
    part.out = to;
    part.overlaps_communication = rows.length < inputs.size(0);
    return part;
  };
  const GemmAllReduce product{
      .op = kScaledAllReduce,
      .comm = communicator,
      .out = as_rows(out),
      .bias = bias.value_or(Tensor()),
      .mean = op == "avg",
      .row_unit = row_unit(modes),
      .multiply = [&](const RowRange& rows,
                      const Tensor& to) { gemm(kScaledAllReduce, multiply_args(rows, to)); },
      .arguments = arguments};
  auto problem =
      gemm_all_reduce_problem(kScaledAllReduce, *communicator, inputs.size(0), weight.size(0),
                              weight.size(1), out_dtype, product.row_unit);
  problem.types = scaled_types(x, weight, out_dtype, modes, use_split_accumulator);
  // Every algorithm checks its first product before it sends.
  run_gemm_all_reduce(product, choose_algorithm(problem, algorithm, communicator, [&] {
                        check_gemm(kScaledAllReduce,
                                   multiply_args({0, product.out.size(0)}, product.out));
                      }));
  return out;
}

Tensor scaled_all_reduce_meta(const Tensor& x, const Tensor& x_scale_inv, const Tensor& weight,
                              const Tensor& weight_scale_inv, const std::optional<Tensor>& bias,
                              std::string_view, int64_t group_size, std::string_view op,
                              at::ScalarType out_dtype, bool, std::string_view algorithm,
                              int64_t scaling_mode) {
  check_scaled_all_reduce(x, x_scale_inv, weight, weight_scale_inv, bias, group_size, op, out_dtype,
                          algorithm, scaling_mode);
  return scaled_all_reduce_out(x, weight, out_dtype);
}

}  // namespace
}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "scaled_matmul_all_reduce(Tensor x, Tensor x_scale_inv, Tensor weight,"
      " Tensor weight_scale_inv, Tensor? bias, str comm, int group_size, str op=\"sum\","
      " ScalarType out_dtype=bfloat16, bool use_split_accumulator=False, str algorithm=\"auto\","
      " int scaling_mode=3) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("scaled_matmul_all_reduce", torch_overlap::ops::scaled_all_reduce_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("scaled_matmul_all_reduce", torch_overlap::ops::scaled_all_reduce_meta);
}

// The operator has no gradient: a backward pass raises an error.
TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("scaled_matmul_all_reduce", torch::autograd::autogradNotImplementedFallback());
}
