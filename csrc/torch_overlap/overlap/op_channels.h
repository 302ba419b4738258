#pragma once

#include <memory>
#include <string_view>

#include "torch_overlap/base/export.h"
#include "torch_overlap/overlap/channel.h"

namespace torch_overlap {

// The channels that operators use, which have no buffer of their own. One for what is gathered, and
// one for what is scattered, which a gradient has under way together; one operator at a time is
// issued. And one for what is summed where it lies (run_direct_sum), whose operations end before
// the other ranks have read all of it, and so share it with no others; and one for what kernels
// that multiply and sum send each other (run_fused_reduce), for which the same holds.
enum class OperatorChannel { gather, scatter, sum, reduce };

// Flags that such a channel has for each rank.
inline constexpr int kOperatorFlags = 4;

// The channel of a communicator with room for `bytes`: made, or made anew with more room, by the
// first call that needs it. Collective then: all ranks ask for the same. Null where it would have
// to be made during a capture, where no memory can be shared. It ends with the communicator.
TORCH_OVERLAP_API std::shared_ptr<OverlapChannel> operator_channel(
    std::string_view op, const std::shared_ptr<TorchComm>& comm, OperatorChannel which,
    int64_t bytes);

// Whether one is there, and what it is: for explain.
TORCH_OVERLAP_API std::shared_ptr<OverlapChannel> existing_operator_channel(const TorchComm& comm,
                                                                            OperatorChannel which);

}  // namespace torch_overlap
