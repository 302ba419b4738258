#include "torch_overlap/ops/scaled.h"

#include "torch_overlap/base/errors.h"
#include "torch_overlap/gemm/operand.h"
#include "torch_overlap/gemm/quantize.h"
#include "torch_overlap/ops/rows.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kScaledAlgorithms = "auto sequential pipelined p2p fused";

// Returns the modes of an operator called with `scaling_mode`. Throws kValue for NO_SCALING.
ScaledModes scaled_modes(std::string_view op, int64_t scaling_mode) {
  const auto mode = torch_overlap::scaling_mode(op, scaling_mode);
  TORCH_OVERLAP_CHECK(mode != ScalingMode::NO_SCALING, kValue, op,
                      ": expected a scaling_mode of 8-bit values, got NO_SCALING; use ",
                      op.substr(std::string_view("scaled_").size()));
  return modes_of_product(mode);
}

}  // namespace

ScaledModes modes_of_product(ScalingMode weight) {
  return {.x = weight == ScalingMode::BLOCK_2D_SCALING ? ScalingMode::BLOCK_1D_SCALING : weight,
          .weight = weight};
}

void check_quantized(std::string_view op, const Argument& what, const at::Tensor& data,
                     const at::Tensor& scale_inv, ScalingMode mode) {
  TORCH_OVERLAP_CHECK(
      data.scalar_type() == at::kFloat8_e4m3fn || data.scalar_type() == at::kFloat8_e5m2, kType, op,
      ": expected ", what, " of dtype float8_e4m3fn or float8_e5m2, got ", data.scalar_type(),
      ". Use quantize.");
  try {
    if (is_tensor_scaling(mode)) return check_scale(op, data, scale_inv);
    check_dequantizable(op, data, scale_inv, mode, at::kFloat, /*swizzled=*/false);
  } catch (const Error& error) {
    fail(error.kind(), error.what(), ", the scales of ", what,
         ". Pass what quantize gave, unswizzled (unswizzle_scales).");
  }
}

int64_t row_unit(const ScaledModes& modes) {
  return modes.x == ScalingMode::BLOCK_1D_SCALING ? kBlockScaledMultiple : 1;
}

ScaledInput check_scaled_x(std::string_view op, const at::Tensor& x, const at::Tensor& x_scale_inv,
                           int64_t group_size, int64_t dim, std::string_view what,
                           at::ScalarType out_dtype, std::string_view algorithm,
                           int64_t scaling_mode) {
  check_group_size(op, group_size);
  check_choice(op, "algorithm", kScaledAlgorithms, algorithm);
  const auto modes = scaled_modes(op, scaling_mode);
  check_quantized(op, {.name = "x"}, x, x_scale_inv, modes.x);
  TORCH_OVERLAP_CHECK(
      out_dtype == at::kFloat || out_dtype == at::kHalf || out_dtype == at::kBFloat16, kType, op,
      ": expected out_dtype float32, float16 or bfloat16, got ", out_dtype,
      ". Convert the result.");
  return {.dim = check_row_dim(op, x, dim, what), .modes = modes};
}

void check_scaled_weight(std::string_view op, const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& weight_scale_inv, const std::optional<at::Tensor>& bias,
                         at::ScalarType out_dtype, const ScaledModes& modes, int64_t index) {
  check_weight_shape(op, x, weight, index);
  check_quantized(op, weight_argument(index), weight, weight_scale_inv, modes.weight);
  TORCH_OVERLAP_CHECK(weight.device() == x.device(), kType, op, ": expected ",
                      weight_argument(index), " on device ", x.device(), " as x, got ",
                      weight.device(), ". Move one of them.");
  if (!bias) return;
  check_bias_shape(op, *bias, weight, index);
  TORCH_OVERLAP_CHECK(bias->scalar_type() == out_dtype, kType, op, ": expected ",
                      bias_argument(index), " of dtype ", out_dtype, ", that of the result, got ",
                      bias->scalar_type(), ". Convert it.");
  TORCH_OVERLAP_CHECK(bias->device() == x.device(), kType, op, ": expected ", bias_argument(index),
                      " on device ", x.device(), " as x, got ", bias->device(),
                      ". Move one of them.");
}

at::Tensor scale_rows(const at::Tensor& x, const at::Tensor& x_scale_inv, int64_t dim,
                      const ScaledModes& modes) {
  if (!modes.gathers_scales()) return {};
  const auto scales =
      modes.x == ScalingMode::MXFP8_1D_SCALING ? x_scale_inv.view(at::kByte) : x_scale_inv;
  auto sizes = x.sizes().vec();
  sizes.back() = scales.size(1);
  return to_rows(scales.reshape(sizes), dim).contiguous();
}

GemmArgs scaled_product(const at::Tensor& x_scale_inv, const at::Tensor& weight,
                        const at::Tensor& weight_scale_inv, const ScaledModes& modes,
                        bool use_split_accumulator) {
  GemmArgs args;
  args.lhs.scaling = modes.x;
  if (!modes.gathers_scales()) args.lhs.scale_inv = x_scale_inv;
  args.rhs = {.data = has_contiguous_rows(weight) ? weight : weight.contiguous(),
              .transposed = true,
              .scaling = modes.weight,
              .scale_inv = weight_scale_inv};
  args.use_split_accumulator = use_split_accumulator;
  return args;
}

GemmArgs scaled_product(const at::Tensor& x, const at::Tensor& x_scale_inv, int64_t dim,
                        const at::Tensor& weight, const at::Tensor& weight_scale_inv,
                        const ScaledModes& modes, bool use_split_accumulator) {
  GemmArgs args =
      scaled_product(x_scale_inv, weight, weight_scale_inv, modes, use_split_accumulator);
  args.lhs.data = to_rows(x, dim);
  if (modes.gathers_scales()) args.lhs.scale_inv = scale_rows(x, x_scale_inv, dim, modes);
  return args;
}

}  // namespace torch_overlap::ops
