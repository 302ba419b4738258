#pragma once

#include <string>

#include "torch_overlap/overlap/cuda/transport.h"
#include "torch_overlap/overlap/fused.h"

namespace torch_overlap::cuda {

// How many tiles a chunk may have: words that a channel holds for each rank.
inline constexpr int kMostTiles = 16384;

// Why fused kernels do not take such a product; empty: they do. An operand that lies as they cannot
// read it is copied first.
std::string fused_obstacle(const FusedShape& shape);

// On the current stream, within an operation of the transport's channel.
void run_fused(CudaTransport& transport, const FusedGather& problem);
void run_fused(CudaTransport& transport, const FusedScatter& problem);

// Loads the code of all kernels onto the current device, if it can run them, before one waits for
// another.
void load_fused_kernels();

}  // namespace torch_overlap::cuda
