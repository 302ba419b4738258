#pragma once

#include <memory>
#include <string_view>

#include "torch_overlap/base/export.h"
#include "torch_overlap/overlap/channel.h"

namespace torch_overlap {

// The channels of the operators, which have no buffer of their own. `gather` and `reduce_scatter`
// are separate because a gradient has both in flight together; only one operator at a time is
// issued. `low_latency` is for what is summed in place (run_low_latency_sum): its operations end
// before the other ranks have read all of it, so it is shared with no other kind of operation.
// `fused_all_reduce` is for what fused GEMM and all-reduce kernels send each other
// (run_fused_all_reduce), for the same reason.
enum class OperatorChannel { gather, reduce_scatter, low_latency, fused_all_reduce };

// Number of flags per rank of such a channel (`low_latency` has more).
inline constexpr int kOperatorFlagsPerRank = 4;

// Returns the channel of a communicator with at least `bytes` of data. The first call that needs it
// creates it, or replaces it by a larger one; that is collective: all ranks must request the same.
// Returns null if it would have to be created during a capture, in which no memory can be shared.
// The channel ends with the communicator.
TORCH_OVERLAP_API std::shared_ptr<OverlapChannel> operator_channel(
    std::string_view op, const std::shared_ptr<TorchComm>& comm, OperatorChannel which,
    int64_t bytes);

// Returns a channel of a communicator that sends and receives: for "pipelined", on ranks that need
// not map each other's memory. `which`: gather or reduce_scatter. Never null; local.
TORCH_OVERLAP_API std::shared_ptr<OverlapChannel> pipeline_channel(
    std::string_view op, const std::shared_ptr<TorchComm>& comm, OperatorChannel which);

// Returns the channel if it exists, otherwise null; for explain.
TORCH_OVERLAP_API std::shared_ptr<OverlapChannel> existing_operator_channel(const TorchComm& comm,
                                                                            OperatorChannel which);

}  // namespace torch_overlap
