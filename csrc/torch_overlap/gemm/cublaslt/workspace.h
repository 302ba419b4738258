#pragma once

#include <c10/cuda/CUDAStream.h>

#include "torch_overlap/gemm/cublaslt/key.h"

namespace torch_overlap::cublaslt {

// Returns the workspace of a call on `stream`, which must be current: the caller's, or the cached
// one of the stream. During a capture it is allocated for this call from the graph's pool: replays
// on other streams would write a cached one while this stream uses it.
Workspace workspace_for(const GemmArgs& args, c10::cuda::CUDAStream stream);

}  // namespace torch_overlap::cublaslt
