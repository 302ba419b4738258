#pragma once

#include <nccl.h>

#include <string>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/backends/nccl/api.h"
#include "torch_overlap/comm/options.h"

namespace torch_overlap {

// What NCCL is told when it makes a communicator: ncclConfig_t, and the strings that it points to.
// NCCL keeps the pointers, so this object lives as long as the communicator.
//
// Hints, each also in snake_case (min_ctas): cgaClusterSize, minCTAs, maxCTAs, netName, splitShare,
// trafficClass, commName (default: the communicator's name), collnetEnable, CTAPolicy (a number, or
// default, efficiency, zero), shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched; and
// max_event_pool_size and graph_timeouts, which are ours. A hint younger than the loaded NCCL
// throws kUnsupported; unknown ones are named in one warning. `blocking` is not among them: see
// handle.h.
class TORCH_OVERLAP_API NcclConfig {
 public:
  NcclConfig(const NcclApi& api, const std::string& comm_name, const Hints& hints);
  NcclConfig(const NcclConfig&) = delete;
  NcclConfig& operator=(const NcclConfig&) = delete;

  ncclConfig_t* get() { return &config_; }

 private:
  ncclConfig_t config_ = NCCL_CONFIG_INITIALIZER;
  std::string comm_name_;
  std::string net_name_;
};

// The hint maxCTAs, which bounds the blocks of our own bulk copies too: where ranks differ in it,
// NCCL does all. 0: there is none.
int most_ctas(const Hints& hints);
// The hint max_event_pool_size.
size_t event_pool_size(const Hints& hints);
// The hint graph_timeouts (true or false), else the environment's: whether operations in replayed
// graphs have timeouts. See graph_monitor.h.
bool graph_timeouts(const Hints& hints);

}  // namespace torch_overlap
