#include "torch_overlap/gemm/cuda/quantize_host.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "torch_overlap/gemm/cuda/quantize.h"

namespace torch_overlap::cuda {
namespace {

std::optional<HighPrecisionType> high_precision_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return HighPrecisionType::kFloat;
    case at::kHalf:
      return HighPrecisionType::kHalf;
    case at::kBFloat16:
      return HighPrecisionType::kBFloat16;
    default:
      return std::nullopt;
  }
}

ScaleGranularity scale_granularity(ScalingMode mode) {
  switch (mode) {
    case ScalingMode::MXFP8_1D_SCALING:
      return ScaleGranularity::kRow32;
    case ScalingMode::BLOCK_1D_SCALING:
      return ScaleGranularity::kRow128;
    case ScalingMode::BLOCK_2D_SCALING:
      return ScaleGranularity::kBlock128;
    case ScalingMode::ROW_SCALING:
      return ScaleGranularity::kRow;
    default:
      return ScaleGranularity::kTensor;
  }
}

ScaleLayout layout_of(const at::Tensor& scales, bool swizzled) {
  if (scales.dim() < 2) return {scales.data_ptr(), 0, 0, false};
  return {scales.data_ptr(), scales.stride(0), scales.stride(1), swizzled};
}

int64_t rows_of(const at::Tensor& x) {
  return c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
}

at::Tensor zeroed_magnitudes(const at::Tensor& x, int64_t count, cudaStream_t stream) {
  auto largest = at::empty({count}, x.options().dtype(at::kFloat));
  C10_CUDA_CHECK(cudaMemsetAsync(largest.data_ptr(), 0, largest.nbytes(), stream));
  return largest;
}

}  // namespace

std::optional<std::pair<Quantized, at::Tensor>> quantize_cuda(const QuantizeArgs& args) {
  const auto type = high_precision_type(args.x.scalar_type());
  if (!type || args.x.numel() == 0) return std::nullopt;
  const c10::cuda::CUDAGuard guard(args.x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const auto x = args.x.contiguous();
  auto out = empty_quantized(args.op, x, args.options);
  QuantizeParams p;
  p.x = x.data_ptr();
  p.type = *type;
  p.rows = rows_of(x);
  p.columns = x.size(-1);
  p.group = scale_granularity(args.options.scaling);
  p.e5m2 = args.options.dtype == at::kFloat8_e5m2;
  p.power_of_two = args.options.power_of_two;
  p.data = static_cast<uint8_t*>(out.data.data_ptr());
  p.scales = layout_of(out.scale_inv, args.options.swizzled);
  const bool has_columnwise = args.options.columnwise;
  if (has_columnwise) {
    p.transposed = static_cast<uint8_t*>(out.columnwise_data.data_ptr());
    p.transposed_scales = layout_of(out.columnwise_scale_inv, args.options.swizzled);
  }
  const bool is_per_tensor = p.group == ScaleGranularity::kTensor;
  const bool needs_row_and_column_amax = p.group == ScaleGranularity::kRow && has_columnwise;
  at::Tensor largest;
  if (is_per_tensor || needs_row_and_column_amax) {
    largest = zeroed_magnitudes(x, is_per_tensor ? 1 : p.rows + p.columns, stream);
    p.largest = static_cast<uint32_t*>(largest.data_ptr());
  }
  if (args.scale.defined()) {
    p.scale = args.scale.const_data_ptr<float>();
  } else if (is_per_tensor) {
    C10_CUDA_CHECK(launch_amax(p, stream));
  } else if (needs_row_and_column_amax) {
    C10_CUDA_CHECK(launch_row_and_column_amax(p, stream));
  }
  if (is_per_tensor && !has_columnwise) {
    C10_CUDA_CHECK(launch_quantize_flat(p, stream));
  } else if (p.group == ScaleGranularity::kRow && !has_columnwise) {
    C10_CUDA_CHECK(launch_quantize_rows(p, stream));
  } else {
    C10_CUDA_CHECK(launch_quantize_tiles(p, stream));
  }
  return std::make_pair(std::move(out), std::move(largest));
}

std::optional<at::Tensor> dequantize_cuda(const DequantizeArgs& args) {
  const auto type = high_precision_type(args.dtype);
  if (!type || args.data.numel() == 0) return std::nullopt;
  const c10::cuda::CUDAGuard guard(args.data.device());
  const auto data = args.data.contiguous();
  const auto scales = args.swizzled ? args.scale_inv.contiguous() : args.scale_inv;
  auto out = at::empty(data.sizes(), data.options().dtype(args.dtype));
  DequantizeParams p;
  p.data = static_cast<const uint8_t*>(data.const_data_ptr());
  p.e5m2 = data.scalar_type() == at::kFloat8_e5m2;
  p.rows = rows_of(data);
  p.columns = data.size(-1);
  p.group = scale_granularity(args.scaling);
  p.scales = layout_of(scales, args.swizzled);
  p.out = out.data_ptr();
  p.type = *type;
  C10_CUDA_CHECK(launch_dequantize(p, c10::cuda::getCurrentCUDAStream()));
  return out;
}

bool update_scale_cuda(const ScaleUpdate& update) {
  const auto& history = update.amax_history;
  if (!history.is_contiguous() || !update.scale.is_contiguous()) return false;
  const c10::cuda::CUDAGuard guard(history.device());
  const ScaleUpdateParams p{.history = history.data_ptr<float>(),
                            .length = history.size(0),
                            .scale = update.scale.data_ptr<float>(),
                            .count = update.scale.numel(),
                            .largest = update.largest,
                            .uses_history_max = update.uses_history_max};
  C10_CUDA_CHECK(launch_update_scale(p, c10::cuda::getCurrentCUDAStream()));
  return true;
}

}  // namespace torch_overlap::cuda
