#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/collectives/select.h"

namespace torch_overlap {

using Hints = std::map<std::string, std::string>;
using Milliseconds = std::chrono::milliseconds;

// The maximum timeout; a longer one is clamped to it. Adding it to a time point never overflows.
inline constexpr Milliseconds kMaxTimeout = std::chrono::hours(365 * 24);

// Options that every operation accepts. A timeout of 0 selects the communicator's own. Hints of an
// operation: `is_high_priority_stream` (also spelled `torchcomm::ncclx::high_priority_stream`):
// true runs this async operation on the communicator's high-priority stream. `custom_collectives`:
// off, auto, always, ll, ll128, simple, two_shot, bulk or zero_copy; overrides the communicator's
// hint of that name, and must be equal on all ranks. Unknown hints are named in one warning and
// ignored.
struct OpOptions {
  Hints hints;
  Milliseconds timeout{0};
  // False for torch.distributed, whose backends do not mark tensors as written for autograd.
  bool bumps_versions = true;
};

// One class per operation, so that the options of one are not passed to another by accident.
// A tag other than 0 needs a backend with tags; see TorchComm::has_tags.
struct SendOptions : OpOptions {
  int tag = 0;
};
struct RecvOptions : OpOptions {
  int tag = 0;
};
struct BroadcastOptions : OpOptions {};
struct AllReduceOptions : OpOptions {};
struct ReduceOptions : OpOptions {};
struct AllGatherOptions : OpOptions {};
struct AllGatherSingleOptions : OpOptions {};
struct ReduceScatterOptions : OpOptions {};
struct ReduceScatterSingleOptions : OpOptions {};
struct AllToAllOptions : OpOptions {};
struct AllToAllSingleOptions : OpOptions {};
struct AllToAllvSingleOptions : OpOptions {};
struct BarrierOptions : OpOptions {};
struct ScatterOptions : OpOptions {};
struct GatherOptions : OpOptions {};
struct GatherSingleOptions : OpOptions {};
struct BatchP2POptions : OpOptions {};

// Options of a communicator. A field that is not set comes from the environment (base/env.h).
struct CommOptions {
  std::optional<bool> abort_process_on_timeout_or_error;  // false with enable_reconfigure
  std::optional<Milliseconds> timeout;
  std::optional<bool> is_high_priority_stream;
  std::optional<bool> enable_reconfigure;
  std::optional<std::string> name;
  Hints hints;
  c10::intrusive_ptr<c10d::Store> store;
};

// Options after arguments, CommOptions and the environment were merged: every field is set.
struct ResolvedOptions {
  bool abort_process_on_timeout_or_error = true;
  Milliseconds timeout{600'000};
  bool is_high_priority_stream = false;
  bool enable_reconfigure = false;
  // Hint `check_mismatch`, otherwise TORCH_OVERLAP_CHECK_MISMATCH. See mismatch.h.
  bool check_mismatch = false;
  // Hint `custom_collectives`, otherwise TORCH_OVERLAP_CUSTOM_COLLECTIVES. Equal on all ranks.
  CollectiveMode custom_collectives = CollectiveMode::automatic;
  Hints hints;  // the backend's own hints, without the ones above
};

// Returns `options` merged over the environment. Throws on a hint whose value does not parse.
TORCH_OVERLAP_API ResolvedOptions resolve_options(const CommOptions& options);

// Merges `hints` over `options`; the known ones go into their fields.
TORCH_OVERLAP_API void merge_hints(ResolvedOptions& options, const Hints& hints);

// Emits one warning for those of `hints` that had no warning yet. It names the backend that got
// them and the known hints: those in `known`, which are the backend's own, and the ones above.
TORCH_OVERLAP_API void warn_unknown_hints(const Hints& hints, std::string_view backend,
                                          std::vector<std::string_view> known = {});

// Returns the hints of operation `op`; a field is unset if the hint is absent. Warns once for each
// unknown hint.
struct OpHints {
  std::optional<bool> high_priority;
  std::optional<CollectiveMode> custom_collectives;
};
TORCH_OVERLAP_API OpHints op_hints(std::string_view op, const Hints& hints);

}  // namespace torch_overlap
