#pragma once

#include <c10/cuda/CUDAStream.h>

#include "torch_overlap/gemm/cublaslt/key.h"

namespace torch_overlap::cublaslt {

// The memory of a call on `stream`, which is current: the caller's, or the cached one of the
// stream. During a capture it comes from the graph's own pool, for this call: a cached one would be
// written by replays on other streams while this stream uses it.
Workspace workspace_for(const GemmArgs& args, c10::cuda::CUDAStream stream);

}  // namespace torch_overlap::cublaslt
