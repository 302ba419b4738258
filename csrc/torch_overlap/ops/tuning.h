#pragma once

#include <c10/core/ScalarType.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "torch_overlap/base/export.h"
#include "torch_overlap/ops/choose.h"

// Measured fastest algorithms: the shipped table, which is the same on all ranks, and the user's
// cache, of which the ranks of a communicator use that of rank 0. They also look up entries for the
// device of rank 0. Threads: any.
namespace torch_overlap::ops {

// Algorithms by tuning_key().
using TuningEntries = std::map<std::string, std::string>;

// Returns the key under which a measurement is stored: the operator, m, n and k to half a power of
// two, the dtype, the number of ranks, the name of the device, and whether the call is captured,
// because the host's launch time does not count in a captured call.
TORCH_OVERLAP_API std::string tuning_key(std::string_view op, int64_t m, int64_t n, int64_t k,
                                         at::ScalarType dtype, int group_size,
                                         std::string_view device, bool in_graph);

enum class TuningSource { table, cache };
// Replaces the entries, for communicators whose ranks have not exchanged their caches yet.
TORCH_OVERLAP_API void set_tuning(TuningSource source, const TuningEntries& entries);
// Number of calls of set_tuning().
uint64_t tuning_version();

struct TunedAlgorithm {
  std::string algorithm;
  std::string_view source;  // "table" or "cache"
  bool is_other_size;       // measured for sizes near the requested ones
  // The measured sizes, to half a power of two.
  int64_t m;
  int64_t n;
  int64_t k;
};
// Lets the members of a communicator agree on a cache and a device. Collective, once per
// communicator.
void share_tuning(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm);
// Returns the entry of the requested sizes, otherwise the nearest one of the same operator, dtype,
// number of ranks, device and mode. The distance is the sum over m, n and k of the half powers of
// two between them, at most four. Looks in the agreed cache, for the agreed device; before
// share_tuning() in this rank's.
std::optional<TunedAlgorithm> find_tuned(const OverlapProblem& problem,
                                         const std::shared_ptr<TorchComm>& comm, bool in_graph);

// Returns the smallest number of SMs of the communicator's members if they have exchanged it,
// otherwise this rank's. 0 on a CPU.
int min_sm_count(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm);

}  // namespace torch_overlap::ops
