#include <ATen/ops/empty.h>

#include "torch_overlap/gemm/quantize.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

using QuantizedTuple = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using OptionalDtype = std::optional<at::ScalarType>;

constexpr std::string_view kQuantize = "quantize";
constexpr std::string_view kQuantizeDelayed = "quantize_delayed";
constexpr std::string_view kDequantize = "dequantize";
constexpr std::string_view kSwizzleScales = "swizzle_scales";
constexpr std::string_view kUnswizzleScales = "unswizzle_scales";

QuantizeOptions quantize_options(std::string_view op, int64_t mode, OptionalDtype dtype,
                                 bool columnwise, bool swizzled, bool power_of_two) {
  return {scaling_mode(op, mode), dtype.value_or(at::kFloat8_e4m3fn), columnwise, swizzled,
          power_of_two};
}

Tensor or_empty(const Tensor& tensor, const Tensor& like) {
  return tensor.defined() ? tensor : at::empty({0}, like.options());
}

// An operator must not return the same tensor twice: a shared per-tensor scale is returned once.
QuantizedTuple as_tuple(Quantized out) {
  const bool shared = out.columnwise_scale_inv.is_same(out.scale_inv);
  auto columnwise = or_empty(out.columnwise_data, out.data);
  auto columnwise_scales = or_empty(shared ? Tensor() : out.columnwise_scale_inv, out.scale_inv);
  return {std::move(out.data), std::move(out.scale_inv), std::move(columnwise),
          std::move(columnwise_scales)};
}

QuantizedTuple quantize_kernel(const Tensor& x, int64_t mode, OptionalDtype dtype, bool columnwise,
                               bool swizzled, bool power_of_two) {
  const auto options = quantize_options(kQuantize, mode, dtype, columnwise, swizzled, power_of_two);
  return as_tuple(x.is_meta() ? empty_quantized(kQuantize, x, options)
                              : torch_overlap::quantize(kQuantize, x, options));
}

QuantizeOptions delayed_options(OptionalDtype dtype, bool columnwise) {
  return {ScalingMode::DELAYED_TENSOR_SCALING, dtype.value_or(at::kFloat8_e4m3fn), columnwise,
          false, false};
}

QuantizedTuple delayed_tuple(Quantized out, Tensor amax) {
  auto columnwise = or_empty(out.columnwise_data, out.data);
  return {std::move(out.data), std::move(out.scale_inv), std::move(columnwise), std::move(amax)};
}

QuantizedTuple quantize_delayed_kernel(const Tensor& x, const Tensor& scale, OptionalDtype dtype,
                                       bool columnwise) {
  const auto options = delayed_options(dtype, columnwise);
  if (x.is_meta()) {
    check_scale(kQuantizeDelayed, x, scale);
    auto out = empty_quantized(kQuantizeDelayed, x, options);
    auto amax = at::empty({1}, out.scale_inv.options());
    return delayed_tuple(std::move(out), std::move(amax));
  }
  auto [out, amax] = torch_overlap::quantize_delayed(kQuantizeDelayed, x, scale, options);
  return delayed_tuple(std::move(out), std::move(amax));
}

void update_scale_kernel(const Tensor& amax_history, const Tensor& scale, OptionalDtype dtype,
                         int64_t margin, std::string_view amax_compute) {
  if (amax_history.is_meta()) return;
  torch_overlap::update_scale("update_scale_", amax_history, scale,
                              dtype.value_or(at::kFloat8_e4m3fn), margin, amax_compute);
}

Tensor dequantize_kernel(const Tensor& data, const Tensor& scale_inv, int64_t mode,
                         OptionalDtype dtype, bool swizzled) {
  const auto scaling = scaling_mode(kDequantize, mode);
  const auto wide = dtype.value_or(at::kFloat);
  if (!data.is_meta()) {
    return torch_overlap::dequantize(kDequantize, data, scale_inv, scaling, wide, swizzled);
  }
  check_dequantizable(kDequantize, data, scale_inv, scaling, wide, swizzled);
  return at::empty_symint(data.sym_sizes(), data.options().dtype(wide));
}

Tensor swizzle_scales_kernel(const Tensor& scales) {
  return scales.is_meta() ? empty_swizzled(kSwizzleScales, scales)
                          : torch_overlap::swizzle_scales(kSwizzleScales, scales);
}

Tensor unswizzle_scales_kernel(const Tensor& scales, int64_t rows, int64_t blocks) {
  return torch_overlap::unswizzle_scales(kUnswizzleScales, scales, rows, blocks);
}

Tensor unswizzle_scales_meta(const Tensor& scales, c10::SymInt rows, c10::SymInt blocks) {
  return at::empty_symint({rows, blocks}, scales.options());
}

}  // namespace
}  // namespace torch_overlap::ops

TORCH_OVERLAP_SCHEMAS(
    "quantize(Tensor x, int scaling_mode, ScalarType? dtype=None, bool columnwise=False,"
    " bool swizzled=False, bool power_of_two=False) -> (Tensor data, Tensor scale_inv,"
    " Tensor columnwise_data, Tensor columnwise_scale_inv)",
    "quantize_delayed(Tensor x, Tensor scale, ScalarType? dtype=None, bool columnwise=False)"
    " -> (Tensor data, Tensor scale_inv, Tensor columnwise_data, Tensor amax)")
TORCH_OVERLAP_SCHEMAS(
    "update_scale_(Tensor(a!) amax_history, Tensor(b!) scale, ScalarType? dtype=None,"
    " int margin=0, str amax_compute=\"max\") -> ()",
    "dequantize(Tensor data, Tensor scale_inv, int scaling_mode, ScalarType? dtype=None,"
    " bool swizzled=False) -> Tensor",
    "swizzle_scales(Tensor scales) -> Tensor",
    "unswizzle_scales(Tensor scales, SymInt rows, SymInt blocks) -> Tensor")

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("quantize", torch_overlap::ops::quantize_kernel);
  m.impl("quantize_delayed", torch_overlap::ops::quantize_delayed_kernel);
  m.impl("update_scale_", torch_overlap::ops::update_scale_kernel);
  m.impl("dequantize", torch_overlap::ops::dequantize_kernel);
  m.impl("swizzle_scales", torch_overlap::ops::swizzle_scales_kernel);
  m.impl("unswizzle_scales", torch_overlap::ops::unswizzle_scales_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("unswizzle_scales", torch_overlap::ops::unswizzle_scales_meta);
}

TORCH_OVERLAP_NO_GRADIENT("quantize", "quantize_delayed", "dequantize", "swizzle_scales",
                          "unswizzle_scales", "update_scale_")

TORCH_OVERLAP_KERNELS(ADInplaceOrView, m) {
  m.impl("update_scale_", torch::autograd::autogradNotImplementedInplaceOrViewFallback());
}
