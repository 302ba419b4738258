#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/overlap/fused.h"

// What the fused operators of 8-bit floats share: value = data * scale_inv, in a ScalingMode.
namespace torch_overlap::ops {

// How x and the weights of an operator are scaled.
struct ScaledModes {
  ScalingMode x;
  ScalingMode weight;
  bool gathers_scales() const { return !is_tensor_scaling(x); }
};
// How the product of an operator with such an x and weight is scaled; throws kValue for
// NO_SCALING.
TORCH_OVERLAP_API ScaledModes scaled_modes(std::string_view op, int64_t scaling_mode);
// What the rows of such an x, and of its parts, are a multiple of.
TORCH_OVERLAP_API int64_t row_unit(const ScaledModes& modes);

// What fused kernels are asked for. Of several weights one stands for all: whatever type each has,
// there is a kernel for all of them or for none.
FusedTypes scaled_types(const at::Tensor& x, const at::Tensor& weight, at::ScalarType out_dtype,
                        const ScaledModes& modes, bool use_split_accumulator);

// Checks of all but the weights; `dim` is the dimension of rows that is gathered or scattered,
// which comes back non-negative. Work on symbolic shapes, as all here.
struct ScaledInput {
  int64_t dim;
  ScaledModes modes;
};
ScaledInput check_scaled_x(std::string_view op, const at::Tensor& x, const at::Tensor& x_scale_inv,
                           int64_t group_size, int64_t dim, std::string_view what,
                           at::ScalarType out_dtype, std::string_view algorithm,
                           int64_t scaling_mode);
// One of the weights, and a bias.
void check_scaled_weight(std::string_view op, const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& weight_scale_inv, const std::optional<at::Tensor>& bias,
                         at::ScalarType out_dtype, const ScaledModes& modes, int64_t index = -1);

// The scales of x [..., k], a row for each of its rows once dimension `dim` is first; MXFP8's as
// bytes. Undefined where the tensor has one factor.
at::Tensor scale_rows(const at::Tensor& x, const at::Tensor& x_scale_inv, int64_t dim,
                      const ScaledModes& modes);

// out = x weight^T. Without `out`, the data of x, and its scales where there is one for each row:
// these differ by step.
GemmArgs scaled_product(const at::Tensor& x_scale_inv, const at::Tensor& weight,
                        const at::Tensor& weight_scale_inv, const ScaledModes& modes,
                        bool use_split_accumulator);

}  // namespace torch_overlap::ops
