#pragma once

#include <optional>
#include <utility>

#include "torch_overlap/gemm/backend.h"

// What GemmBackend has of quantization, by the kernels of quantize.h.
namespace torch_overlap::cuda {

std::optional<std::pair<Quantized, at::Tensor>> quantize_by_kernels(const QuantizeCall& call);
std::optional<at::Tensor> dequantize_by_kernels(const DequantizeCall& call);
bool update_scale_by_kernels(const ScaleUpdate& update);

}  // namespace torch_overlap::cuda
