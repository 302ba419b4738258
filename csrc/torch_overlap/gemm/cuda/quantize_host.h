#pragma once

#include <optional>
#include <utility>

#include "torch_overlap/gemm/backend.h"

// GemmBackend::quantize and dequantize by the kernels of quantize.h.
namespace torch_overlap::cuda {

std::optional<std::pair<Quantized, at::Tensor>> quantize_by_kernels(const QuantizeCall& call);
std::optional<at::Tensor> dequantize_by_kernels(const DequantizeCall& call);

}  // namespace torch_overlap::cuda
