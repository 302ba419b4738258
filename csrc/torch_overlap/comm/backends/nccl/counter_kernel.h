#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace torch_overlap {

// Adds one to *counter (device memory) and writes the sum to *shown (mapped host memory), by one
// thread on `stream`. A counter belongs to one node of one graph, whose replays run one after the
// other, so it needs no atomics.
cudaError_t increment_counter(uint32_t* counter, uint32_t* shown, cudaStream_t stream);

}  // namespace torch_overlap
