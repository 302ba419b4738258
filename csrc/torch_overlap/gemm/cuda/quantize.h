#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// Kernels that quantize matrices to 8-bit floats and back, for gemm/quantize.h, which defines the
// values: results are bitwise those of torch's operators, except for the sign of a NaN. x is read
// once, or twice if scales of rows or of the whole tensor must be computed first.
namespace torch_overlap::cuda {

enum class HighPrecisionType : uint8_t { kFloat, kHalf, kBFloat16 };

// Elements that share a scale.
enum class ScaleGranularity : uint8_t {
  kTensor,
  kRow,
  kRow128,    // 128 elements of a row
  kBlock128,  // 128 x 128 elements
  kRow32,     // 32 elements of a row; the scale is a power of two (E8M0)
};

// The scale_inv of group (row, column) is at [row * row_stride + column * column_stride]: fp32, or
// E8M0. E8M0 scales may be swizzled instead; the strides are then ignored.
struct ScaleLayout {
  void* at = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
  bool swizzled = false;
};

struct QuantizeParams {
  const void* x = nullptr;  // [rows, columns], contiguous
  HighPrecisionType type = HighPrecisionType::kFloat;
  int64_t rows = 0;
  int64_t columns = 0;
  ScaleGranularity group = ScaleGranularity::kTensor;
  bool e5m2 = false;  // otherwise e4m3
  bool power_of_two = false;
  uint8_t* data = nullptr;  // [rows, columns]
  ScaleLayout scales;
  uint8_t* transposed = nullptr;  // [columns, rows]; null: not requested
  ScaleLayout transposed_scales;
  // kTensor: the scale; null if it is computed from `largest`.
  const float* scale = nullptr;
  // Bits of the largest |x|, as fp32: of the tensor [1]; for kRow with `transposed`, of each row
  // and then of each column. If `scale` is given, the kernel raises it to the largest |x|.
  uint32_t* largest = nullptr;
};

// Raises `largest`, which must be 0 before, to the largest |x|: of the tensor, or of rows and
// columns.
cudaError_t launch_amax(const QuantizeParams& params, cudaStream_t stream);
cudaError_t launch_row_and_column_amax(const QuantizeParams& params, cudaStream_t stream);
// kTensor and kRow without `transposed`. launch_quantize_rows() computes the amax of rows itself.
cudaError_t launch_quantize_flat(const QuantizeParams& params, cudaStream_t stream);
cudaError_t launch_quantize_rows(const QuantizeParams& params, cudaStream_t stream);
// All other granularities, and all with `transposed`.
cudaError_t launch_quantize_tiles(const QuantizeParams& params, cudaStream_t stream);

struct DequantizeParams {
  const uint8_t* data = nullptr;  // [rows, columns], contiguous
  bool e5m2 = false;
  int64_t rows = 0;
  int64_t columns = 0;
  ScaleGranularity group = ScaleGranularity::kTensor;
  ScaleLayout scales;
  void* out = nullptr;  // [rows, columns], contiguous
  HighPrecisionType type = HighPrecisionType::kFloat;
};

cudaError_t launch_dequantize(const DequantizeParams& params, cudaStream_t stream);

struct ScaleUpdateParams {
  float* history = nullptr;  // [length, count]
  int64_t length = 0;
  float* scale = nullptr;  // [count]
  int64_t count = 0;
  float largest = 0;
  bool uses_history_max = true;
};

cudaError_t launch_update_scale(const ScaleUpdateParams& params, cudaStream_t stream);

}  // namespace torch_overlap::cuda
