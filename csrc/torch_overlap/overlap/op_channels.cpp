#include "torch_overlap/overlap/op_channels.h"

#include <c10/core/DeviceGuard.h>

#include "torch_overlap/base/rounding.h"

namespace torch_overlap {
namespace {

// Granularity of memory allocations.
constexpr int64_t kChannelGranularityBytes = 2 << 20;

constexpr std::string_view attachment_name(OperatorChannel which) {
  switch (which) {
    case OperatorChannel::gather:
      return "operators' gather channel";
    case OperatorChannel::reduce_scatter:
      return "operators' reduce-scatter channel";
    case OperatorChannel::low_latency:
      return "operators' low-latency channel";
    case OperatorChannel::fused_all_reduce:
      break;
  }
  return "operators' fused all-reduce channel";
}

constexpr StreamOptions kStreams{.num_compute_streams = 2};

constexpr int num_flags_per_rank(OperatorChannel which) {
  return which == OperatorChannel::low_latency ? 2 * kMaxLowLatencyBlocks : kOperatorFlagsPerRank;
}

}  // namespace

std::shared_ptr<OverlapChannel> existing_operator_channel(const TorchComm& comm,
                                                          OperatorChannel which) {
  return std::static_pointer_cast<OverlapChannel>(comm.attachment(attachment_name(which)));
}

std::shared_ptr<OverlapChannel> operator_channel(std::string_view op,
                                                 const std::shared_ptr<TorchComm>& comm,
                                                 OperatorChannel which, int64_t bytes) {
  auto channel = existing_operator_channel(*comm, which);
  if (channel && channel->bytes() >= bytes) return channel;
  const c10::DeviceGuard guard(comm->device());
  OverlapDevice& device = overlap_device(op, comm->device().type());
  if (device.capture() != 0) return nullptr;
  const int64_t rounded_bytes = round_up(bytes, kChannelGranularityBytes);
  const auto name = attachment_name(which);
  const int size = comm->size();
  channel = OverlapChannel::create(
      OverlapGroup::of(comm),
      {.op = op,
       .name = std::string(name),
       .digest = concat(rounded_bytes, " bytes, ", device.sm_count(comm->device()), " SMs"),
       .bytes = rounded_bytes,
       .flags = num_flags_per_rank(which) * size,
       .tiles = which == OperatorChannel::low_latency ? 0 : device.tiles(),
       .streams = kStreams,
       .use_ce = true});
  comm->attach(name, channel);
  return channel;
}

std::shared_ptr<OverlapChannel> pipeline_channel(std::string_view op,
                                                 const std::shared_ptr<TorchComm>& comm,
                                                 OperatorChannel which) {
  const std::string_view name = which == OperatorChannel::gather ? "operators' gather pipeline"
                                                                 : "operators' scatter pipeline";
  auto channel = std::static_pointer_cast<OverlapChannel>(comm->attachment(name));
  if (!channel) {
    const c10::DeviceGuard guard(comm->device());
    channel = OverlapChannel::over_communicator(op, comm, kStreams);
    comm->attach(name, channel);
  }
  return channel;
}

}  // namespace torch_overlap
