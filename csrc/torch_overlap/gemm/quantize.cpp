#include "torch_overlap/gemm/quantize.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/roll.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <c10/util/strides.h>

#include <cmath>
#include <optional>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/gemm/backend.h"
#include "torch_overlap/gemm/operand.h"

namespace torch_overlap {
namespace {

// Row strides of BLOCK_2D_SCALING scales are multiples of this.
constexpr int64_t kRowMultiple = 4;
// The largest scale: its inverse is still a normal number.
const double kMaxScale = std::ldexp(1.0, 126);

template <typename Int>
Int blocks_in(const Int& size, int64_t block) {
  return (size + (block - 1)) / block;
}

void check_high_precision(std::string_view op, std::string_view what, at::ScalarType dtype) {
  TORCH_OVERLAP_CHECK(
      dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kDouble,
      kType, op, ": expected ", what, " of dtype float32, float16, bfloat16 or float64, got ",
      dtype, ". Convert it.");
}

// Returns the rows and columns of the matrix of x's last dimension.
std::pair<c10::SymInt, c10::SymInt> matrix_sizes(const at::Tensor& x) {
  const auto sizes = x.sym_sizes();
  c10::SymInt rows = 1;
  for (const auto& size : sizes.slice(0, sizes.size() - 1)) rows *= size;
  return {rows, sizes.back()};
}

void check_mode(std::string_view op, ScalingMode scaling, bool swizzled) {
  TORCH_OVERLAP_CHECK(scaling != ScalingMode::NO_SCALING, kValue, op,
                      ": expected a scaling_mode of 8-bit values, got NO_SCALING. Use another "
                      "ScalingMode.");
  TORCH_OVERLAP_CHECK(!swizzled || scaling == ScalingMode::MXFP8_1D_SCALING, kValue, op,
                      ": expected swizzled scales for MXFP8_1D_SCALING only, got them for ",
                      to_string(scaling), "; pass swizzled=False");
}

void check_quantizable(std::string_view op, const at::Tensor& x, const QuantizeOptions& options) {
  TORCH_OVERLAP_CHECK(x.dim() >= 1, kValue, op,
                      ": expected x of one or more dimensions, got a scalar; use x.reshape(1)");
  check_high_precision(op, "x", x.scalar_type());
  max_fp8_value(op, options.dtype);
  check_mode(op, options.scaling, options.swizzled);
}

void check_mx_columns(std::string_view op, const c10::SymInt& cols) {
  TORCH_OVERLAP_CHECK((cols % kMxBlock).sym_eq(0).expect_true(__FILE__, __LINE__), kValue, op,
                      ": expected rows of a multiple of 32 elements for MXFP8_1D_SCALING, got ",
                      cols, "; pad them with zeros");
}

// Allocates scale_inv of a matrix, uninitialized.
at::Tensor empty_scales(std::string_view op, const c10::SymInt& rows, const c10::SymInt& cols,
                        const at::TensorOptions& on, const QuantizeOptions& options) {
  if (options.scaling == ScalingMode::MXFP8_1D_SCALING) {
    check_mx_columns(op, cols);
    c10::SymInt height = rows;
    c10::SymInt width = cols / kMxBlock;
    if (options.swizzled) {
      height = blocks_in(height, 128) * 128;
      width = blocks_in(width, 4) * 4;
    }
    return at::empty_symint({height, width}, on.dtype(at::kFloat8_e8m0fnu));
  }
  const auto fp32 = on.dtype(at::kFloat);
  if (options.scaling == ScalingMode::BLOCK_1D_SCALING) {
    return at::empty_symint({blocks_in(cols, kScaleBlock), rows}, fp32).t();
  }
  if (options.scaling == ScalingMode::BLOCK_2D_SCALING) {
    const auto width = blocks_in(cols, kScaleBlock);
    return at::empty_symint(
               {blocks_in(rows, kScaleBlock), blocks_in(width, kRowMultiple) * kRowMultiple}, fp32)
        .narrow_symint(1, 0, width);
  }
  if (options.scaling == ScalingMode::ROW_SCALING) return at::empty_symint({rows, 1}, fp32);
  return at::empty({1}, fp32);
}

// Returns x as a matrix of its last dimension.
at::Tensor as_matrix(const at::Tensor& x) {
  return x.reshape({c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)), x.size(-1)});
}

// Returns fp32 scales from the largest |x|.
at::Tensor scale_from_amax(const at::Tensor& amax, double largest, bool power_of_two) {
  auto scale = at::reciprocal(amax).mul_(largest).clamp_max_(kMaxScale);
  scale = at::where(at::isfinite(amax).logical_and_(amax.gt(0)), scale, at::ones_like(scale));
  if (power_of_two) scale = scale.view(at::kInt).bitwise_and(0x7F800000).view(at::kFloat);
  return scale;
}

at::Tensor saturated(const at::Tensor& x, double largest, at::ScalarType dtype) {
  return at::clamp(x, -largest, largest).to(dtype);
}

at::Tensor compute_amax(const at::Tensor& x) {
  if (x.numel() == 0) return at::zeros({1}, x.options().dtype(at::kFloat));
  return at::amax(at::abs(x)).to(at::kFloat).view(1);
}

// Returns the matrix [rows, cols] in fp32, padded with zeros to whole blocks.
at::Tensor padded_matrix(const at::Tensor& matrix, int64_t row_block, int64_t col_block) {
  const int64_t more_rows = blocks_in(matrix.size(0), row_block) * row_block - matrix.size(0);
  const int64_t more_cols = blocks_in(matrix.size(1), col_block) * col_block - matrix.size(1);
  const auto wide = matrix.to(at::kFloat);
  if (more_rows == 0 && more_cols == 0) return wide.contiguous();
  return at::constant_pad_nd(wide, {0, more_cols, 0, more_rows});
}

// Returns the smallest E8M0 bytes (scale 2^(byte - 127)) with which the largest |x| of a block does
// not saturate.
at::Tensor e8m0_from_amax(const at::Tensor& amax, at::ScalarType dtype) {
  // The largest values are 0.875 * 2^9 and 0.875 * 2^16; frexp's mantissa is in [0.5, 1).
  const int64_t exponent_of_largest = dtype == at::kFloat8_e5m2 ? 16 : 9;
  const auto [mantissa, exponent] = at::frexp(amax);
  auto byte = exponent.to(at::kInt) + mantissa.gt(0.875).to(at::kInt);
  byte = at::clamp(byte + (127 - exponent_of_largest), 0, 253);
  byte.masked_fill_(amax.eq(0), 0);
  // 2^126: times the largest 8-bit value, this is infinite in fp32.
  byte.masked_fill_(at::isinf(amax), 253);
  byte.masked_fill_(at::isnan(amax), 255);
  return byte;
}

// Returns dense rows, with the strides of at::empty() even if a dimension has one element.
at::Tensor dense(const at::Tensor& values) {
  const auto sizes = values.sizes();
  return values.contiguous().as_strided(sizes, c10::contiguous_strides(sizes));
}

struct QuantizedMatrix {
  at::Tensor data;
  at::Tensor scale_inv;
};

QuantizedMatrix quantize_mx(std::string_view op, const at::Tensor& matrix,
                            const QuantizeOptions& options) {
  check_mx_columns(op, matrix.size(1));
  const auto blocks = matrix.to(at::kFloat)
                          .contiguous()
                          .view({matrix.size(0), matrix.size(1) / kMxBlock, kMxBlock});
  const auto byte = e8m0_from_amax(at::amax(at::abs(blocks), -1), options.dtype);
  // 2^(127 - byte), composed from its bits.
  const auto scale = at::clamp(254 - byte, 1).bitwise_left_shift(23).view(at::kFloat);
  const auto data =
      saturated(blocks * scale.unsqueeze(-1), max_fp8_value(op, options.dtype), options.dtype);
  const auto scales = byte.to(at::kByte).view(at::kFloat8_e8m0fnu);
  return {dense(data.view(matrix.sizes())),
          options.swizzled ? swizzle_scales(op, scales) : dense(scales)};
}

// Returns fp32 scales of the blocks of a matrix, with the strides of the result.
at::Tensor in_layout(std::string_view op, const at::Tensor& matrix, const at::Tensor& scales,
                     const QuantizeOptions& options) {
  const auto on = at::TensorOptions().device(matrix.device());
  return empty_scales(op, matrix.size(0), matrix.size(1), on, options).copy_(scales);
}

QuantizedMatrix quantize_blocks(std::string_view op, const at::Tensor& matrix,
                                const QuantizeOptions& options) {
  const double largest = max_fp8_value(op, options.dtype);
  const int64_t row_block = options.scaling == ScalingMode::BLOCK_2D_SCALING ? kScaleBlock : 1;
  const auto padded = padded_matrix(matrix, row_block, kScaleBlock);
  const auto blocks = padded.view(
      {padded.size(0) / row_block, row_block, padded.size(1) / kScaleBlock, kScaleBlock});
  const auto scale =
      scale_from_amax(at::amax(at::abs(blocks), {1, 3}), largest, options.power_of_two);
  auto data = saturated(blocks * scale.unsqueeze(1).unsqueeze(-1), largest, options.dtype)
                  .view(padded.sizes());
  data = dense(data.narrow(0, 0, matrix.size(0)).narrow(1, 0, matrix.size(1)));
  return {std::move(data), in_layout(op, matrix, at::reciprocal(scale), options)};
}

QuantizedMatrix quantize_rows(std::string_view op, const at::Tensor& matrix,
                              const QuantizeOptions& options) {
  const double largest = max_fp8_value(op, options.dtype);
  const auto wide = matrix.to(at::kFloat);
  const auto amax = matrix.size(1) == 0 ? at::zeros({matrix.size(0), 1}, wide.options())
                                        : at::amax(at::abs(wide), {1}, /*keepdim=*/true);
  const auto scale = scale_from_amax(amax, largest, options.power_of_two);
  return {dense(saturated(wide * scale, largest, options.dtype)), dense(at::reciprocal(scale))};
}

std::optional<std::pair<Quantized, at::Tensor>> by_kernels(std::string_view op, const at::Tensor& x,
                                                           const QuantizeOptions& options,
                                                           const at::Tensor& scale = {}) {
  GemmBackend* backend = find_gemm_backend(x.device().type());
  if (backend == nullptr) return std::nullopt;
  return backend->quantize({op, x, options, scale});
}

}  // namespace

double max_fp8_value(std::string_view op, at::ScalarType dtype) {
  if (dtype == at::kFloat8_e4m3fn) return 448.0;
  TORCH_OVERLAP_CHECK(dtype == at::kFloat8_e5m2, kType, op,
                      ": expected the 8-bit dtype float8_e4m3fn or float8_e5m2, got ", dtype,
                      ". Use one of them.");
  return 57344.0;
}

Quantized empty_quantized(std::string_view op, const at::Tensor& x,
                          const QuantizeOptions& options) {
  check_quantizable(op, x, options);
  const auto [rows, cols] = matrix_sizes(x);
  const auto on = at::TensorOptions().device(x.device());
  Quantized out;
  out.data = at::empty_symint(x.sym_sizes(), on.dtype(options.dtype));
  out.scale_inv = empty_scales(op, rows, cols, on, options);
  if (!options.columnwise) return out;
  out.columnwise_data = at::empty_symint({cols, rows}, on.dtype(options.dtype));
  out.columnwise_scale_inv = is_tensor_scaling(options.scaling)
                                 ? out.scale_inv
                                 : empty_scales(op, cols, rows, on, options);
  return out;
}

Quantized quantize(std::string_view op, const at::Tensor& x, const QuantizeOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_quantizable(op, x, options);
  if (auto done = by_kernels(op, x, options)) return std::move(done->first);
  if (is_tensor_scaling(options.scaling)) {
    const double largest = max_fp8_value(op, options.dtype);
    const auto scale = scale_from_amax(compute_amax(x), largest, options.power_of_two);
    return quantize_delayed(op, x, scale, options).first;
  }
  const auto quantize_matrix = [&](const at::Tensor& matrix) {
    if (options.scaling == ScalingMode::ROW_SCALING) return quantize_rows(op, matrix, options);
    return options.scaling == ScalingMode::MXFP8_1D_SCALING ? quantize_mx(op, matrix, options)
                                                            : quantize_blocks(op, matrix, options);
  };
  const auto matrix = as_matrix(x);
  auto rowwise = quantize_matrix(matrix);
  Quantized out{rowwise.data.view(x.sizes()), std::move(rowwise.scale_inv), {}, {}};
  if (!options.columnwise) return out;
  if (options.scaling == ScalingMode::BLOCK_2D_SCALING) {
    out.columnwise_data = dense(as_matrix(out.data).t());
    out.columnwise_scale_inv = in_layout(op, out.columnwise_data, out.scale_inv.t(), options);
    return out;
  }
  auto columnwise = quantize_matrix(matrix.t());
  out.columnwise_data = std::move(columnwise.data);
  out.columnwise_scale_inv = std::move(columnwise.scale_inv);
  return out;
}

void check_scale(std::string_view op, const at::Tensor& x, const at::Tensor& scale) {
  TORCH_OVERLAP_CHECK(scale.scalar_type() == at::kFloat && scale.device() == x.device(), kType, op,
                      ": expected scale of dtype float32 on ", x.device(), ", got ",
                      scale.scalar_type(), " on ", scale.device(), ". Move or convert it.");
  TORCH_OVERLAP_CHECK(scale.sym_numel().sym_eq(1).expect_true(__FILE__, __LINE__), kValue, op,
                      ": expected a scale of one element, got shape ", scale.sym_sizes(),
                      ". Pass the factor of the whole tensor.");
}

std::pair<Quantized, at::Tensor> quantize_delayed(std::string_view op, const at::Tensor& x,
                                                  const at::Tensor& scale,
                                                  const QuantizeOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_quantizable(op, x, options);
  TORCH_OVERLAP_CHECK(is_tensor_scaling(options.scaling), kValue, op,
                      ": expected a scaling_mode with one factor, got ", to_string(options.scaling),
                      ". Use quantize.");
  check_scale(op, x, scale);
  if (auto done = by_kernels(op, x, options, scale)) return std::move(*done);
  Quantized out;
  out.data =
      dense(saturated(x.to(at::kFloat) * scale, max_fp8_value(op, options.dtype), options.dtype));
  out.scale_inv = at::reciprocal(scale).view(1);
  if (options.columnwise) {
    out.columnwise_data = dense(as_matrix(out.data).t());
    out.columnwise_scale_inv = out.scale_inv;
  }
  return {std::move(out), compute_amax(x)};
}

void update_scale(std::string_view op, const at::Tensor& amax_history, const at::Tensor& scale,
                  at::ScalarType dtype, int64_t margin, std::string_view amax_compute) {
  const double largest = max_fp8_value(op, dtype);
  TORCH_OVERLAP_CHECK(amax_history.scalar_type() == at::kFloat && scale.scalar_type() == at::kFloat,
                      kType, op, ": expected amax_history and scale of dtype float32, got ",
                      amax_history.scalar_type(), " and ", scale.scalar_type(), ". Convert them.");
  TORCH_OVERLAP_CHECK(amax_history.device() == scale.device(), kType, op,
                      ": expected amax_history and scale on one device, got ",
                      amax_history.device(), " and ", scale.device(), ". Move one of them.");
  TORCH_OVERLAP_CHECK(amax_history.dim() >= 1 && amax_history.size(0) > 0 &&
                          amax_history.numel() == amax_history.size(0) * scale.numel(),
                      kValue, op, ": expected amax_history [length] or [length, n] and scale [n], ",
                      "got shapes ", amax_history.sizes(), " and ", scale.sizes(),
                      ". Each scale has a column of the history.");
  TORCH_OVERLAP_CHECK(amax_compute == "max" || amax_compute == "most_recent", kValue, op,
                      ": expected amax_compute to be max or most_recent, got '", amax_compute,
                      "'. Use one of them.");
  const double scaled_largest = std::ldexp(largest, static_cast<int>(-margin));
  if (GemmBackend* backend = find_gemm_backend(scale.device().type())) {
    if (backend->update_scale(
            {amax_history, scale, static_cast<float>(scaled_largest), amax_compute == "max"})) {
      return;
    }
  }
  const auto amax = (amax_compute == "max" ? at::amax(amax_history, 0) : amax_history.select(0, 0))
                        .view(scale.sizes());
  const auto next = at::reciprocal(amax).mul_(scaled_largest);
  const auto usable = at::isfinite(amax).logical_and_(amax.gt(0));
  scale.copy_(at::where(usable, next.clamp_max(kMaxScale), scale));
  amax_history.copy_(at::roll(amax_history, -1, 0));
  amax_history.select(0, 0).zero_();
}

void check_dequantizable(std::string_view op, const at::Tensor& data, const at::Tensor& scale_inv,
                         ScalingMode scaling, at::ScalarType dtype, bool swizzled) {
  max_fp8_value(op, data.scalar_type());
  check_mode(op, scaling, swizzled);
  check_high_precision(op, "a result", dtype);
  TORCH_OVERLAP_CHECK(data.dim() >= 1, kValue, op,
                      ": expected data of one or more dimensions, got a scalar. Use "
                      "data.reshape(1).");
  const auto [rows, cols] = matrix_sizes(data);
  const auto expected = empty_scales(op, rows, cols, at::TensorOptions().device(at::kMeta),
                                     {.scaling = scaling, .swizzled = swizzled});
  TORCH_OVERLAP_CHECK(
      scale_inv.scalar_type() == expected.scalar_type() && scale_inv.device() == data.device(),
      kType, op, ": expected scale_inv of dtype ", expected.scalar_type(), " on ", data.device(),
      ", got ", scale_inv.scalar_type(), " on ", scale_inv.device());
  const bool one = is_tensor_scaling(scaling);
  TORCH_OVERLAP_CHECK(
      one ? scale_inv.sym_numel().sym_eq(1).expect_true(__FILE__, __LINE__)
          : scale_inv.dim() == 2 &&
                scale_inv.sym_size(0)
                    .sym_eq(expected.sym_size(0))
                    .expect_true(__FILE__, __LINE__) &&
                scale_inv.sym_size(1).sym_eq(expected.sym_size(1)).expect_true(__FILE__, __LINE__),
      kValue, op, ": expected scale_inv of shape ", expected.sym_sizes(), " for ",
      to_string(scaling), " of data ", data.sym_sizes(), ", got ", scale_inv.sym_sizes());
}

at::Tensor dequantize(std::string_view op, const at::Tensor& data, const at::Tensor& scale_inv,
                      ScalingMode scaling, at::ScalarType dtype, bool swizzled) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_dequantizable(op, data, scale_inv, scaling, dtype, swizzled);
  if (GemmBackend* backend = find_gemm_backend(data.device().type())) {
    if (auto out = backend->dequantize({data, scale_inv, scaling, swizzled, dtype})) return *out;
  }
  const auto wide = data.to(at::kFloat);
  if (is_tensor_scaling(scaling)) return (wide * scale_inv).to(dtype);
  const auto matrix = as_matrix(wide);
  if (scaling == ScalingMode::ROW_SCALING) {
    return (matrix * scale_inv).view(data.sizes()).to(dtype);
  }
  const int64_t rows = matrix.size(0);
  const int64_t cols = matrix.size(1);
  const bool mx = scaling == ScalingMode::MXFP8_1D_SCALING;
  const int64_t block = mx ? kMxBlock : kScaleBlock;
  const int64_t row_block = scaling == ScalingMode::BLOCK_2D_SCALING ? kScaleBlock : 1;
  auto scales = swizzled ? unswizzle_scales(op, scale_inv, rows, cols / block) : scale_inv;
  const int64_t height = scales.size(0);
  const int64_t width = scales.size(1);
  scales = scales.to(at::kFloat)
               .unsqueeze(1)
               .unsqueeze(-1)
               .expand({height, row_block, width, block})
               .reshape({height * row_block, width * block})
               .narrow(0, 0, rows)
               .narrow(1, 0, cols);
  return (matrix * scales).view(data.sizes()).to(dtype);
}

}  // namespace torch_overlap
