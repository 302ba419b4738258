#pragma once

#include <nccl.h>

#include <string>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/backends/nccl/api.h"
#include "torch_overlap/comm/options.h"

namespace torch_overlap {

// Configuration of an NCCL communicator: ncclConfig_t, and the strings that it points to. NCCL
// keeps the pointers, so this object must live as long as the communicator.
//
// Hints, each also in snake_case (min_ctas): cgaClusterSize, minCTAs, maxCTAs, netName, splitShare,
// trafficClass, commName (default: the communicator's name), collnetEnable, CTAPolicy (a number, or
// default, efficiency, zero), shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched; and
// this project's max_event_pool_size and graph_timeouts. A hint newer than the loaded NCCL throws
// kUnsupported; one warning names all unknown hints. `blocking` is not a hint: see handle.h.
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

// Returns the hint maxCTAs; 0 if there is none. It also limits the blocks of this project's bulk
// copies. If ranks differ in it, NCCL runs all collectives.
int max_ctas_hint(const Hints& hints);
// Returns the hint max_event_pool_size, or its default.
size_t event_pool_size(const Hints& hints);
// Returns the hint graph_timeouts (true or false), otherwise the environment's value: true if
// operations in replayed graphs have timeouts. See graph_monitor.h.
bool graph_timeouts(const Hints& hints);

}  // namespace torch_overlap
