#include "torch_overlap/comm/backends/nccl/config.h"

#include <limits>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "torch_overlap/base/env.h"
#include "torch_overlap/base/strings.h"
#include "torch_overlap/common/cuda/event.h"

namespace torch_overlap {
namespace {

enum class Kind { kNumber, kFlag, kPolicy };

struct Field {
  std::string_view name;  // NCCL's name
  std::string_view snake_name;
  int ncclConfig_t::* member;
  int min_version;
  Kind kind = Kind::kNumber;
};

constexpr Field kFields[] = {
    {"cgaClusterSize", "cga_cluster_size", &ncclConfig_t::cgaClusterSize, 21700},
    {"minCTAs", "min_ctas", &ncclConfig_t::minCTAs, 21700},
    {"maxCTAs", "max_ctas", &ncclConfig_t::maxCTAs, 21700},
    {"splitShare", "split_share", &ncclConfig_t::splitShare, 21800, Kind::kFlag},
    {"trafficClass", "traffic_class", &ncclConfig_t::trafficClass, 22500},
    {"collnetEnable", "collnet_enable", &ncclConfig_t::collnetEnable, 22700, Kind::kFlag},
    {"CTAPolicy", "cta_policy", &ncclConfig_t::CTAPolicy, 22700, Kind::kPolicy},
    {"shrinkShare", "shrink_share", &ncclConfig_t::shrinkShare, 22700, Kind::kFlag},
    {"nvlsCTAs", "nvls_ctas", &ncclConfig_t::nvlsCTAs, 22700},
    {"nChannelsPerNetPeer", "n_channels_per_net_peer", &ncclConfig_t::nChannelsPerNetPeer, 22800},
    {"nvlinkCentricSched", "nvlink_centric_sched", &ncclConfig_t::nvlinkCentricSched, 22800,
     Kind::kFlag},
};
constexpr int kCommNameMinVersion = 22700;
constexpr std::string_view kEventPoolHint = "max_event_pool_size";
constexpr std::string_view kGraphTimeoutsHint = "graph_timeouts";

int parse_int32(std::string_view text, std::string_view what) {
  const long long value = parse_int(text, what);
  TORCH_OVERLAP_CHECK(value >= 0 && value <= std::numeric_limits<int>::max(), kValue, what,
                      ": expected a number in [0, 2^31), got ", value);
  return static_cast<int>(value);
}

int parse_policy(const std::string& text, std::string_view what) {
  const std::string name = to_lower(text);
  if (name == "default") return NCCL_CTA_POLICY_DEFAULT;
  if (name == "efficiency") return NCCL_CTA_POLICY_EFFICIENCY;
  if (name == "zero") return NCCL_CTA_POLICY_ZERO;
  return parse_int32(text, what);
}

int parse_field(const Field& field, const std::string& text) {
  const std::string what = concat("hint ", field.name);
  switch (field.kind) {
    case Kind::kFlag:
      return parse_bool(text, what) ? 1 : 0;
    case Kind::kPolicy:
      return parse_policy(text, what);
    case Kind::kNumber:
      break;
  }
  return parse_int32(text, what);
}

// Removes one hint, in either spelling, from `hints` and returns its value.
std::optional<std::string> take(Hints& hints, std::string_view name, std::string_view snake_name) {
  std::optional<std::string> value;
  for (const auto spelling : {name, snake_name}) {
    if (auto found = hints.find(std::string(spelling)); found != hints.end()) {
      value = found->second;
      hints.erase(found);
    }
  }
  return value;
}

}  // namespace

NcclConfig::NcclConfig(const NcclApi& api, const std::string& comm_name, const Hints& hints) {
  Hints rest = hints;
  for (const Field& field : kFields) {
    const auto text = take(rest, field.name, field.snake_name);
    if (!text) continue;
    require_nccl(api, field.min_version, concat("hint ", field.name));
    config_.*field.member = parse_field(field, *text);
  }
  if (const auto text = take(rest, "netName", "net_name")) {
    net_name_ = *text;
    config_.netName = net_name_.c_str();
  }
  const auto name_hint = take(rest, "commName", "comm_name");
  if (name_hint) require_nccl(api, kCommNameMinVersion, "hint commName");
  comm_name_ = name_hint.value_or(comm_name);
  config_.commName = comm_name_.c_str();  // an older NCCL does not read this field
  config_.blocking = 1;                   // see handle.h
  take(rest, kEventPoolHint, kEventPoolHint);
  take(rest, kGraphTimeoutsHint, kGraphTimeoutsHint);
  std::vector<std::string_view> known{"netName", "commName", kEventPoolHint, kGraphTimeoutsHint};
  for (const Field& field : kFields) known.push_back(field.name);
  warn_unknown_hints(rest, "nccl", std::move(known));
}

int max_ctas_hint(const Hints& hints) {
  Hints rest = hints;
  const auto text = take(rest, "maxCTAs", "max_ctas");
  return text ? parse_int32(*text, "hint maxCTAs") : 0;
}

size_t event_pool_size(const Hints& hints) {
  const auto found = hints.find(std::string(kEventPoolHint));
  if (found == hints.end()) return cuda::kDefaultEventPoolSize;
  return static_cast<size_t>(parse_int32(found->second, kEventPoolHint));
}

bool graph_timeouts(const Hints& hints) {
  const auto found = hints.find(std::string(kGraphTimeoutsHint));
  if (found == hints.end()) return Env::graph_timeouts();
  return parse_bool(found->second, concat("hint ", kGraphTimeoutsHint));
}

}  // namespace torch_overlap
