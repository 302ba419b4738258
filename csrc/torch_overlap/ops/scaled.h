#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/ops/checks.h"

// Shared code of the overlapped operators on 8-bit floats: value = data * scale_inv, in a
// ScalingMode.
namespace torch_overlap::ops {

// Scaling modes of x and the weights of an operator.
struct ScaledModes {
  ScalingMode x;
  ScalingMode weight;
  bool gathers_scales() const { return !is_tensor_scaling(x); }
};
// Returns the modes of a product called with the mode of its weights: two operands with 128 x 128
// blocks cannot be multiplied.
ScaledModes modes_of_product(ScalingMode weight);
// Returns the unit of which the rows of x, and of its parts, must be a multiple.
TORCH_OVERLAP_API int64_t row_unit(const ScaledModes& modes);

// Result of the checks of everything but the weights. `dim`: the dimension of rows that is gathered
// or scattered, as a non-negative number. All checks here work on symbolic shapes.
struct ScaledInput {
  int64_t dim;
  ScaledModes modes;
};
ScaledInput check_scaled_x(std::string_view op, const at::Tensor& x, const at::Tensor& x_scale_inv,
                           int64_t group_size, int64_t dim, std::string_view what,
                           at::ScalarType out_dtype, std::string_view algorithm,
                           int64_t scaling_mode);
// Checks 8-bit values and their scales, of any number of dimensions.
void check_quantized(std::string_view op, const Argument& what, const at::Tensor& data,
                     const at::Tensor& scale_inv, ScalingMode mode);
// Checks one of the weights, and its bias.
void check_scaled_weight(std::string_view op, const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& weight_scale_inv, const std::optional<at::Tensor>& bias,
                         at::ScalarType out_dtype, const ScaledModes& modes, int64_t index = -1);

// Returns the scales of x [..., k], one row for each row of x with dimension `dim` first; MXFP8's
// as bytes. Undefined if the tensor has one scale.
at::Tensor scale_rows(const at::Tensor& x, const at::Tensor& x_scale_inv, int64_t dim,
                      const ScaledModes& modes);

// out = x weight^T. Leaves `out`, the data of x, and its scales if there is one per row, to the
// caller: they differ by step.
GemmArgs scaled_product(const at::Tensor& x_scale_inv, const at::Tensor& weight,
                        const at::Tensor& weight_scale_inv, const ScaledModes& modes,
                        bool use_split_accumulator);

// The same with all of x, dimension `dim` first.
GemmArgs scaled_product(const at::Tensor& x, const at::Tensor& x_scale_inv, int64_t dim,
                        const at::Tensor& weight, const at::Tensor& weight_scale_inv,
                        const ScaledModes& modes, bool use_split_accumulator);

}  // namespace torch_overlap::ops
