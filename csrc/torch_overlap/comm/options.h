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

namespace torch_overlap {

using Hints = std::map<std::string, std::string>;
using Milliseconds = std::chrono::milliseconds;

// The longest timeout; a longer one counts as this. Adding it to a clock never overflows.
inline constexpr Milliseconds kLongestTimeout = std::chrono::hours(365 * 24);

// Who does a collective on NCCL: our kernels never, where they are the faster (see direct.h), or
// wherever they can; for tests and measurements also by one protocol wherever it can.
enum class DirectMode : uint8_t {
  off,
  automatic,
  always,
  ll,
  ll128,
  push,
  two_shot,
  bulk,
  zero_copy
};

// What every operation takes. timeout 0: the communicator's own.
// Hints of an operation: `is_high_priority_stream` (also spelled
// `torchcomm::ncclx::high_priority_stream`): true runs this async operation on the communicator's
// high-priority stream. `direct_collectives`: off, auto, always, ll, ll128, push, two_shot, bulk or
// zero_copy, over the communicator's hint of that name; equal on all ranks. A hint that is not
// known is named in one warning and ignored.
struct OpOptions {
  Hints hints;
  Milliseconds timeout{0};
};

// One class an operation, so that options of one are not taken for another's by accident.
struct SendOptions : OpOptions {};
struct RecvOptions : OpOptions {};
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

// CommOptions after arguments, options and environment were put together: nothing is open any more.
struct ResolvedOptions {
  bool abort_process_on_timeout_or_error = true;
  Milliseconds timeout{600'000};
  bool is_high_priority_stream = false;
  bool enable_reconfigure = false;
  // Hint `check_mismatch`, else TORCH_OVERLAP_CHECK_MISMATCH: see mismatch.h.
  bool check_mismatch = false;
  // Hint `direct_collectives`, else TORCH_OVERLAP_DIRECT_COLLECTIVES. Equal on all ranks.
  DirectMode direct = DirectMode::automatic;
  Hints hints;  // the backend's own; the ones above are taken out
};

// Merges `options` over the environment. Throws on a hint whose value does not parse.
TORCH_OVERLAP_API ResolvedOptions resolve_options(const CommOptions& options);

// Puts an operation's or a child's hints over `options`, the known ones into their fields.
TORCH_OVERLAP_API void merge_hints(ResolvedOptions& options, const Hints& hints);

// One warning for the hints that nobody warned of yet. It names the backend that got them, and
// those that it knows: `known`, its own, and the ones above.
TORCH_OVERLAP_API void warn_unknown_hints(const Hints& hints, std::string_view backend,
                                          std::vector<std::string_view> known = {});

// The hints of operation `op`; unset where they are not among `hints`. Warns once for each unknown
// hint.
struct OpHints {
  std::optional<bool> high_priority;
  std::optional<DirectMode> direct;
};
TORCH_OVERLAP_API OpHints op_hints(std::string_view op, const Hints& hints);

// The names of DirectMode, with "auto" for automatic. `what` names the value in the error.
TORCH_OVERLAP_API DirectMode parse_direct_mode(std::string_view text, std::string_view what);

}  // namespace torch_overlap
