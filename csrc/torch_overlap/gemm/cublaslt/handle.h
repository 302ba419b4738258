#pragma once

#include <cublasLt.h>

namespace torch_overlap::cublaslt {

// Returns the handle of the current device. Torch's own is a cuBLAS handle, whose stream and
// workspace torch sets at every call. Thread-safe.
cublasLtHandle_t current_handle();

}  // namespace torch_overlap::cublaslt
