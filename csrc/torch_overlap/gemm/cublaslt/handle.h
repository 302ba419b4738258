#pragma once

#include <cublasLt.h>

namespace torch_overlap::cublaslt {

// Of the current device. Torch's own is one of cuBLAS, whose stream and workspace it sets at every
// call. Threads: any.
cublasLtHandle_t current_handle();

}  // namespace torch_overlap::cublaslt
