#pragma once

#include <optional>

#include "torch_overlap/gemm/cublaslt/key.h"
#include "torch_overlap/gemm/sm90/product.h"

namespace torch_overlap::cublaslt {

// A call as our own kernels take it, with the result in `d`; nullopt: they do not.
std::optional<sm90::Product> own_product(const LtCall& call, void* d);

}  // namespace torch_overlap::cublaslt
