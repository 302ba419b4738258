#pragma once

#include <string>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/sm90/kernels.h"
#include "torch_overlap/overlap/cuda/transport.h"
#include "torch_overlap/overlap/fused.h"

namespace torch_overlap::cuda {

// Maximum number of tile flags, or of slice flags, per chunk. A channel holds this number of flags
// for each rank.
inline constexpr int kMaxTileFlags = 16384;

// Returns why fused kernels do not support this product, or an empty string if they do. An operand
// whose layout they cannot read is copied first.
std::string fused_unsupported_reason(const FusedShape& shape);

// Problem for which the tile of an all-gather + GEMM is chosen.
struct GatherShape {
  RowPartition rows;
  const std::vector<int>& order;  // Same as FusedGather::order.
  int64_t n;
  int64_t k;
};
// Returns the kernel with the shortest estimated time if rows arrive as early as possible.
// `senders` is the number of its blocks that send, or zero if copy engines send. The tile of `key`
// is ignored.
TORCH_OVERLAP_API const sm90::KernelInfo& choose_gather_kernel(const sm90::KernelKey& key,
                                                               const GatherShape& shape, int sms,
                                                               int senders);

// Returns FusedGather::senders for this problem.
TORCH_OVERLAP_API int num_gather_senders(const FusedGather& problem, int sms);

// Returns FusedReduceScatter::pieces for this problem.
TORCH_OVERLAP_API int num_reduce_scatter_pieces(const FusedReduceScatter& problem, int most,
                                                int sms);

// Implement OverlapDevice::required_fused_allreduce_bytes() and should_fuse_allreduce().
TORCH_OVERLAP_API int64_t required_fused_allreduce_bytes(const FusedShape& shape);
TORCH_OVERLAP_API bool should_fuse_allreduce(const FusedShape& shape, int sms);

// Launch the kernel on the current stream, within an operation of the transport's channel or as
// one.
void run_fused(CudaTransport& transport, const FusedGather& problem);
void run_fused(CudaTransport& transport, const FusedReduceScatter& problem);
void run_fused(CudaTransport& transport, const FusedAllReduce& problem);

// Loads the code of all fused kernels onto the current device, if it can run them. Must be called
// before one of them waits for another, because lazy loading may synchronize with running kernels.
void load_fused_kernels();
// Loads the kernels of FusedAllReduce. Called by load_fused_kernels().
void load_fused_all_reduce_kernels();

}  // namespace torch_overlap::cuda
