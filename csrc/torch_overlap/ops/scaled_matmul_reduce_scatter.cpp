#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include "torch_overlap/common/views.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/ops/register.h"
#include "torch_overlap/ops/scaled.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kScaledScatter = "scaled_matmul_reduce_scatter";

struct ScaledScatterOutput {
  Tensor out;
  int64_t dim;
  ScaledModes modes;
};

ScaledScatterOutput scaled_scatter_out(const Tensor& x, const Tensor& x_scale_inv,
                                       const Tensor& weight, const Tensor& weight_scale_inv,
                                       const std::optional<Tensor>& bias, int64_t group_size,
                                       int64_t scatter_dim, std::string_view op,
                                       at::ScalarType out_dtype, std::string_view algorithm,
                                       int64_t scaling_mode) {
  const auto [dim, modes] = check_scaled_x(kScaledScatter, x, x_scale_inv, group_size, scatter_dim,
                                           "scatter_dim", out_dtype, algorithm, scaling_mode);
  check_choice(kScaledScatter, "op", "sum avg", op);
  check_divisible(kScaledScatter, x, dim, group_size);
  check_scaled_weight(kScaledScatter, x, weight, weight_scale_inv, bias, out_dtype, modes);
  auto sizes = x.sym_sizes().vec();
  sizes[dim] = sizes[dim] / group_size;
  sizes.back() = weight.sym_size(0);
  return {at::empty_symint(sizes, x.options().dtype(out_dtype)), dim, modes};
}

Tensor scaled_scatter_kernel(const Tensor& x, const Tensor& x_scale_inv, const Tensor& weight,
                             const Tensor& weight_scale_inv, const std::optional<Tensor>& bias,
                             std::string_view comm, int64_t group_size, int64_t scatter_dim,
                             std::string_view op, at::ScalarType out_dtype,
                             bool use_split_accumulator, std::string_view algorithm,
                             int64_t scaling_mode) {
  const auto [out, dim, modes] =
      scaled_scatter_out(x, x_scale_inv, weight, weight_scale_inv, bias, group_size, scatter_dim,
                         op, out_dtype, algorithm, scaling_mode);
  const auto communicator = find_comm(kScaledScatter, comm, group_size);
  const auto inputs = to_rows(x, dim);
  const auto scales = scale_rows(x, x_scale_inv, dim, modes);
  const auto sums = writable_rows(out, dim);
  const int64_t rows = sums.size(0);
  const bool mean = op == "avg";
  const auto whole =
      scaled_product(x_scale_inv, weight, weight_scale_inv, modes, use_split_accumulator);
  const auto product_of = [&](int64_t begin, int64_t length, const Tensor& to) {
    GemmArgs part = whole;
    part.lhs.data = row_view(inputs, begin, length);
    if (scales.defined()) part.lhs.scale_inv = row_view(scales, begin, length);
    part.out = to;
    part.overlaps_communication = length < inputs.size(0);
    return part;
  };
  // Every algorithm checks its first product before it sends. With block scales the rows of a chunk
  // must be valid for every algorithm, so the check runs before the choice.
  const auto check = [&] { check_gemm(kScaledScatter, product_of(0, rows, sums)); };
  if (row_unit(modes) > 1) check();
  const auto chosen = choose_algorithm(
      {.op = kScaledScatter,
       .dtype = out_dtype,
       .m = inputs.size(0),
       .n = weight.size(0),
       .k = weight.size(1) * group_size,
       .chunk_rows = rows,
       .scatter_bytes = scatter_bytes(*communicator, inputs.size(0), sums.size(1), out_dtype),
       .local_n = weight.size(0),
       .local_k = weight.size(1),
       .types = scaled_types(x, weight, out_dtype, modes, use_split_accumulator)},
      algorithm, communicator, check);
  if (chosen == Algorithm::p2p || chosen == Algorithm::fused) {
    channel_scatter_gemms(kScaledScatter, communicator, {product_of(0, inputs.size(0), {})},
                          {.start = {},
                           .bias = bias.value_or(Tensor()),
                           .mean = mean,
                           .out = sums,
                           .fused = chosen == Algorithm::fused});
    copy_rows_back(sums, out, dim);
    return out;
  }
  if (chosen == Algorithm::pipelined) {
    ScatterPipeline scatter(*communicator, rows, sums.size(1), out.options());
    for (size_t step = 0; step < scatter.steps(); ++step) {
      {
        const ProfilerRange span("chunk_gemm", step);
        gemm(kScaledScatter, product_of(scatter.chunk(step) * rows, rows, scatter.partial(step)));
      }
      scatter.send(step);
    }
    scatter.reduce(sums, mean);
  } else {
    const auto partial = at::empty({inputs.size(0), sums.size(1)}, out.options());
    gemm(kScaledScatter, product_of(0, inputs.size(0), partial));
    communicator->reduce_scatter_single(sums, partial, mean ? RedOpType::AVG : RedOpType::SUM,
                                        /*async_op=*/false);
  }
  copy_rows_back(sums, out, dim);
  if (bias) out.add_(*bias);
  return out;
}

Tensor scaled_scatter_meta(const Tensor& x, const Tensor& x_scale_inv, const Tensor& weight,
                           const Tensor& weight_scale_inv, const std::optional<Tensor>& bias,
                           std::string_view, int64_t group_size, int64_t scatter_dim,
                           std::string_view op, at::ScalarType out_dtype, bool,
                           std::string_view algorithm, int64_t scaling_mode) {
  return scaled_scatter_out(x, x_scale_inv, weight, weight_scale_inv, bias, group_size, scatter_dim,
                            op, out_dtype, algorithm, scaling_mode)
      .out;
}

}  // namespace
}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "scaled_matmul_reduce_scatter(Tensor x, Tensor x_scale_inv, Tensor weight,"
      " Tensor weight_scale_inv, Tensor? bias, str comm, int group_size, int scatter_dim=0,"
      " str op=\"sum\", ScalarType out_dtype=bfloat16, bool use_split_accumulator=False,"
      " str algorithm=\"auto\", int scaling_mode=3) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("scaled_matmul_reduce_scatter", torch_overlap::ops::scaled_scatter_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("scaled_matmul_reduce_scatter", torch_overlap::ops::scaled_scatter_meta);
}

// The operator has no gradient: a backward pass raises an error.
TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("scaled_matmul_reduce_scatter", torch::autograd::autogradNotImplementedFallback());
}
