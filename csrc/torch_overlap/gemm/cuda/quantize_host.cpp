#include "torch_overlap/gemm/cuda/quantize_host.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "torch_overlap/gemm/cuda/quantize.h"

namespace torch_overlap::cuda {
namespace {

std::optional<WideType> wide_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return WideType::kFloat;
    case at::kHalf:
      return WideType::kHalf;
    case at::kBFloat16:
      return WideType::kBFloat16;
    default:
      return std::nullopt;
  }
}

ScaleGroup scale_group(ScalingMode mode) {
  switch (mode) {
    case ScalingMode::MXFP8_1D_SCALING:
      return ScaleGroup::kRow32;
    case ScalingMode::BLOCK_1D_SCALING:
      return ScaleGroup::kRow128;
    case ScalingMode::BLOCK_2D_SCALING:
      return ScaleGroup::kBlock128;
    case ScalingMode::ROW_SCALING:
      return ScaleGroup::kRow;
    default:
      return ScaleGroup::kTensor;
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

std::optional<std::pair<Quantized, at::Tensor>> quantize_by_kernels(const QuantizeCall& call) {
  const auto type = wide_type(call.x.scalar_type());
  if (!type || call.x.numel() == 0) return std::nullopt;
  const c10::cuda::CUDAGuard guard(call.x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const auto x = call.x.contiguous();
  auto out = empty_quantized(call.op, x, call.options);
  QuantizeParams p;
  p.x = x.data_ptr();
  p.type = *type;
  p.rows = rows_of(x);
  p.columns = x.size(-1);
  p.group = scale_group(call.options.scaling);
  p.e5m2 = call.options.dtype == at::kFloat8_e5m2;
  p.power_of_two = call.options.power_of_two;
  p.data = static_cast<uint8_t*>(out.data.data_ptr());
  p.scales = layout_of(out.scale_inv, call.options.swizzled);
  const bool turns = call.options.columnwise;
  if (turns) {
    p.transposed = static_cast<uint8_t*>(out.columnwise_data.data_ptr());
    p.transposed_scales = layout_of(out.columnwise_scale_inv, call.options.swizzled);
  }
  const bool of_tensor = p.group == ScaleGroup::kTensor;
  const bool of_lines = p.group == ScaleGroup::kRow && turns;
  at::Tensor largest;
  if (of_tensor || of_lines) {
    largest = zeroed_magnitudes(x, of_tensor ? 1 : p.rows + p.columns, stream);
    p.largest = static_cast<uint32_t*>(largest.data_ptr());
  }
  if (call.scale.defined()) {
    p.scale = call.scale.const_data_ptr<float>();
  } else if (of_tensor) {
    C10_CUDA_CHECK(launch_largest(p, stream));
  } else if (of_lines) {
    C10_CUDA_CHECK(launch_largest_of_lines(p, stream));
  }
  if (of_tensor && !turns) {
    C10_CUDA_CHECK(launch_quantize_flat(p, stream));
  } else if (p.group == ScaleGroup::kRow && !turns) {
    C10_CUDA_CHECK(launch_quantize_rows(p, stream));
  } else {
    C10_CUDA_CHECK(launch_quantize_tiles(p, stream));
  }
  return std::make_pair(std::move(out), std::move(largest));
}

std::optional<at::Tensor> dequantize_by_kernels(const DequantizeCall& call) {
  const auto type = wide_type(call.dtype);
  if (!type || call.data.numel() == 0) return std::nullopt;
  const c10::cuda::CUDAGuard guard(call.data.device());
  const auto data = call.data.contiguous();
  const auto scales = call.swizzled ? call.scale_inv.contiguous() : call.scale_inv;
  auto out = at::empty(data.sizes(), data.options().dtype(call.dtype));
  DequantizeParams p;
  p.data = static_cast<const uint8_t*>(data.const_data_ptr());
  p.e5m2 = data.scalar_type() == at::kFloat8_e5m2;
  p.rows = rows_of(data);
  p.columns = data.size(-1);
  p.group = scale_group(call.scaling);
  p.scales = layout_of(scales, call.swizzled);
  p.out = out.data_ptr();
  p.type = *type;
  C10_CUDA_CHECK(launch_dequantize(p, c10::cuda::getCurrentCUDAStream()));
  return out;
}

bool update_scale_by_kernels(const ScaleUpdate& update) {
  const auto& history = update.amax_history;
  if (!history.is_contiguous() || !update.scale.is_contiguous()) return false;
  const c10::cuda::CUDAGuard guard(history.device());
  const ScaleUpdateParams p{.history = history.data_ptr<float>(),
                            .length = history.size(0),
                            .scale = update.scale.data_ptr<float>(),
                            .count = update.scale.numel(),
                            .largest = update.largest,
                            .of_all_steps = update.of_all_steps};
  C10_CUDA_CHECK(launch_update_scale(p, c10::cuda::getCurrentCUDAStream()));
  return true;
}

}  // namespace torch_overlap::cuda
