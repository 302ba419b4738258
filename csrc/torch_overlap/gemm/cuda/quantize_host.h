#pragma once

#include <optional>
#include <utility>

#include "torch_overlap/gemm/backend.h"

// The quantization of GemmBackend, by the kernels of quantize.h.
namespace torch_overlap::cuda {

std::optional<std::pair<Quantized, at::Tensor>> quantize_cuda(const QuantizeArgs& args);
std::optional<at::Tensor> dequantize_cuda(const DequantizeArgs& args);
bool update_scale_cuda(const ScaleUpdate& update);

}  // namespace torch_overlap::cuda
