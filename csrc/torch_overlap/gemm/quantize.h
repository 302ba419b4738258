#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string_view>
#include <utility>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/scaling.h"

// Quantization to 8-bit floats: by torch's operators on any device, and by kernels of this project
// on CUDA (gemm/cuda/quantize.h; not for float64). Runs on the current stream without blocking the
// host; capture-safe; below autograd. Arithmetic is fp32.
//
// x [..., cols] is treated as the matrix [rows, cols] of its last dimension, and quantized along
// its rows: value = data * scale_inv.
//
//   mode               scale_inv of [rows, cols]
//   *_TENSOR_SCALING   fp32 [1]
//   MXFP8_1D_SCALING   E8M0 [rows, cols / 32], contiguous; cols is a multiple of 32
//     swizzled         E8M0 [rows up to a multiple of 128, cols / 32 up to one of 4], contiguous
//   BLOCK_1D_SCALING   fp32 [rows, ceil(cols / 128)], strides (1, rows), as tensor cores read it
//   BLOCK_2D_SCALING   fp32 [ceil(rows / 128), ceil(cols / 128)], contiguous
//   ROW_SCALING        fp32 [rows, 1], contiguous
//
// Special values: values beyond the range of the 8-bit type, infinity included, saturate; NaN stays
// NaN. If the largest |x| is 0, infinite or NaN, the fp32 scale is 1. In MXFP8 a block with a NaN
// gets the scale NaN, and a block with an infinity gets a scale with which it dequantizes to
// infinity.
namespace torch_overlap {

struct QuantizeOptions {
  ScalingMode scaling = ScalingMode::CURRENT_TENSOR_SCALING;
  at::ScalarType dtype = at::kFloat8_e4m3fn;  // or e5m2
  // Also returns the transposed matrix, quantized along its rows.
  bool columnwise = false;
  // MXFP8: returns scales in the swizzled order that the tensor cores read.
  bool swizzled = false;
  // Rounds fp32 scales down to powers of two. MXFP8 scales always are powers of two.
  bool power_of_two = false;
};

struct Quantized {
  at::Tensor data;       // shape of x, contiguous
  at::Tensor scale_inv;  // see above
  // Undefined unless requested. [cols, rows], contiguous, and its scales; with tensor scaling, the
  // same tensor as scale_inv.
  at::Tensor columnwise_data;
  at::Tensor columnwise_scale_inv;
};

// Returns the largest finite value of an 8-bit type. Throws kType for other dtypes.
TORCH_OVERLAP_API double max_fp8_value(std::string_view op, at::ScalarType dtype);

// Makes the checks of quantize(), and allocates the result. Supports symbolic shapes and Meta
// tensors.
TORCH_OVERLAP_API Quantized empty_quantized(std::string_view op, const at::Tensor& x,
                                            const QuantizeOptions& options);

// Quantizes with scales computed from x. Tensor scaling: scale = largest value of the type /
// largest |x|.
TORCH_OVERLAP_API Quantized quantize(std::string_view op, const at::Tensor& x,
                                     const QuantizeOptions& options);

// Delayed scaling: data = x * scale (fp32 [1]). Also returns the largest |x| (fp32 [1]), for the
// amax history.
TORCH_OVERLAP_API std::pair<Quantized, at::Tensor> quantize_delayed(std::string_view op,
                                                                    const at::Tensor& x,
                                                                    const at::Tensor& scale,
                                                                    const QuantizeOptions& options);

// Throws unless `scale` is fp32, of one element, and on the device of x.
TORCH_OVERLAP_API void check_scale(std::string_view op, const at::Tensor& x,
                                   const at::Tensor& scale);

// Computes the scale of the next step, in place. amax_history (fp32 [length], or [length, n] for
// scale [n]) is a ring whose entry 0 belongs to the current step; it is rotated by one, and entry 0
// is set to 0.
//   amax  = the largest of the history ("max") or entry 0 ("most_recent")
//   scale = largest value / amax / 2^margin; unchanged if amax is 0, infinite or NaN
TORCH_OVERLAP_API void update_scale(std::string_view op, const at::Tensor& amax_history,
                                    const at::Tensor& scale, at::ScalarType dtype, int64_t margin,
                                    std::string_view amax_compute);

// Throws unless `data` and `scale_inv` match. Supports symbolic shapes and Meta tensors.
TORCH_OVERLAP_API void check_dequantizable(std::string_view op, const at::Tensor& data,
                                           const at::Tensor& scale_inv, ScalingMode scaling,
                                           at::ScalarType dtype, bool swizzled);
// Returns data * scale_inv in `dtype`, rounded once from fp32.
TORCH_OVERLAP_API at::Tensor dequantize(std::string_view op, const at::Tensor& data,
                                        const at::Tensor& scale_inv, ScalingMode scaling,
                                        at::ScalarType dtype, bool swizzled = false);

// Returns MXFP8 scales [rows, blocks] in the order of the tensor cores: tiles of 128 rows x 4
// scales, in which rows i, i + 32, i + 64 and i + 96 are adjacent. Padded with zeros to whole
// tiles; the rows [128 a, 128 b) become the rows [128 a, 128 b) of the result.
TORCH_OVERLAP_API at::Tensor swizzle_scales(std::string_view op, const at::Tensor& scales);
// Allocates the result of swizzle_scales(), uninitialized. Supports symbolic shapes and Meta
// tensors.
TORCH_OVERLAP_API at::Tensor empty_swizzled(std::string_view op, const at::Tensor& scales);
// Inverse of swizzle_scales(), without the padding.
TORCH_OVERLAP_API at::Tensor unswizzle_scales(std::string_view op, const at::Tensor& scales,
                                              int64_t rows, int64_t blocks);

}  // namespace torch_overlap
