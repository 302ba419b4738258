#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// Kernels that quantize matrices to 8-bit floats and back, for gemm/quantize.h, which defines the
// values: each result is that of torch's operators to the bit, but for the sign of a NaN. x is read
// once, where scales of rows and of the whole tensor are to be found first, twice.
namespace torch_overlap::cuda {

enum class WideType : uint8_t { kFloat, kHalf, kBFloat16 };

// Who shares a scale.
enum class ScaleGroup : uint8_t {
  kTensor,
  kRow,
  kRow128,    // 128 elements of a row
  kBlock128,  // 128 x 128 elements
  kRow32,     // 32 elements of a row; the scale is a power of two (E8M0)
};

// scale_inv of group (row, column) lies at [row * row_stride + column * column_stride]: fp32, or
// E8M0, which may be in the order of the tensor cores instead (the strides do not count).
struct ScaleLayout {
  void* at = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
  bool swizzled = false;
};

struct QuantizeParams {
  const void* x = nullptr;  // [rows, columns], contiguous
  WideType type = WideType::kFloat;
  int64_t rows = 0;
  int64_t columns = 0;
  ScaleGroup group = ScaleGroup::kTensor;
  bool e5m2 = false;  // e4m3 otherwise
  bool power_of_two = false;
  uint8_t* data = nullptr;  // [rows, columns]
  ScaleLayout scales;
  uint8_t* transposed = nullptr;  // [columns, rows]; null: not wanted
  ScaleLayout transposed_scales;
  // kTensor: the scale, or null: it follows from `largest`.
  const float* scale = nullptr;
  // The bits of the largest |x|, fp32: of the tensor [1], of kRow with `transposed` those of the
  // rows and then of the columns. Where `scale` is given, it is raised to what x has.
  uint32_t* largest = nullptr;
};

// Raises `largest` to what x has; 0 before. The tensor's, or those of rows and columns.
cudaError_t launch_largest(const QuantizeParams& params, cudaStream_t stream);
cudaError_t launch_largest_of_lines(const QuantizeParams& params, cudaStream_t stream);
// kTensor and kRow without `transposed`. Rows find their largest themselves.
cudaError_t launch_quantize_flat(const QuantizeParams& params, cudaStream_t stream);
cudaError_t launch_quantize_rows(const QuantizeParams& params, cudaStream_t stream);
// All others, and with `transposed`.
cudaError_t launch_quantize_tiles(const QuantizeParams& params, cudaStream_t stream);

struct DequantizeParams {
  const uint8_t* data = nullptr;  // [rows, columns], contiguous
  bool e5m2 = false;
  int64_t rows = 0;
  int64_t columns = 0;
  ScaleGroup group = ScaleGroup::kTensor;
  ScaleLayout scales;
  void* out = nullptr;  // [rows, columns], contiguous
  WideType type = WideType::kFloat;
};

cudaError_t launch_dequantize(const DequantizeParams& params, cudaStream_t stream);

struct ScaleUpdateParams {
  float* history = nullptr;  // [length, count]
  int64_t length = 0;
  float* scale = nullptr;  // [count]
  int64_t count = 0;
  float largest = 0;
  bool of_all_steps = true;
};

cudaError_t launch_update_scale(const ScaleUpdateParams& params, cudaStream_t stream);

}  // namespace torch_overlap::cuda
