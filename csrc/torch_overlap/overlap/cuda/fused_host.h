#pragma once

#include <string>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/sm90/kernels.h"
#include "torch_overlap/overlap/cuda/transport.h"
#include "torch_overlap/overlap/fused.h"

namespace torch_overlap::cuda {

// How many tiles a chunk may have, or words of its slices: what a channel holds for each rank.
inline constexpr int kMostTiles = 16384;

// Why fused kernels do not take such a product; empty: they do. An operand that lies as they cannot
// read it is copied first.
std::string fused_obstacle(const FusedShape& shape);

// What the tile of an all-gather and product depends on.
struct GatherShape {
  RowShare rows;
  const std::vector<int>& order;  // FusedGather's
  int64_t n;
  int64_t k;
};
// The kernel that takes the least time where rows arrive as soon as they can: sent by so many
// blocks of its own, or, 0, by copy engines. The tile of `key` is not looked at.
TORCH_OVERLAP_API const sm90::KernelInfo& choose_gather_kernel(const sm90::KernelKey& key,
                                                               const GatherShape& shape, int sms,
                                                               int senders);

// FusedGather::senders of such a gather.
TORCH_OVERLAP_API int gather_senders(const FusedGather& problem, int sms);

// FusedScatter::pieces of such a scatter.
TORCH_OVERLAP_API int scatter_pieces(const FusedScatter& problem, int most, int sms);

// OverlapDevice::reduce_room() and reduce_pays().
TORCH_OVERLAP_API int64_t reduce_room(const FusedShape& shape);
TORCH_OVERLAP_API bool reduce_pays(const FusedShape& shape, int sms);

// On the current stream, within an operation of the transport's channel.
void run_fused(CudaTransport& transport, const FusedGather& problem);
void run_fused(CudaTransport& transport, const FusedScatter& problem);
void run_fused(CudaTransport& transport, const FusedReduce& problem);

// Loads the code of all kernels onto the current device, if it can run them, before one waits for
// another.
void load_fused_kernels();
// Those of FusedReduce, which it calls.
void load_fused_reduce_kernels();

}  // namespace torch_overlap::cuda
