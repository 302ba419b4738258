#pragma once

#include <c10/core/ScalarType.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "torch_overlap/base/export.h"
#include "torch_overlap/ops/choose.h"

// What was measured to be the quickest algorithm: the table that is shipped, which all ranks have
// alike, and the cache of a user, of which the ranks of a communicator take that of rank 0. They
// look for the device of rank 0, too. Threads: any.
namespace torch_overlap::ops {

// Algorithms by tuning_key().
using TuningEntries = std::map<std::string, std::string>;

// What is measured once for all that have it in common: the operator, m, n and k to half a power of
// two, the dtype, the number of ranks, the name of the device, and whether it is captured: then the
// host's time for many small launches does not count.
TORCH_OVERLAP_API std::string tuning_key(std::string_view op, int64_t m, int64_t n, int64_t k,
                                         at::ScalarType dtype, int group_size,
                                         std::string_view device, bool in_graph);

enum class TuningSource { table, cache };
// Replaces them, for communicators whose ranks have not met over the cache yet.
TORCH_OVERLAP_API void set_tuning(TuningSource source, const TuningEntries& entries);
// How often that was done.
uint64_t tuning_version();

struct Tuned {
  std::string algorithm;
  std::string_view source;  // "table" or "cache"
  bool is_like;             // measured for sizes near those that were asked for
  // Those that were measured, to half a power of two.
  int64_t m;
  int64_t n;
  int64_t k;
};
// The entry of the sizes that were asked for; else the nearest one of the same operator, dtype,
// ranks, device and mode, by how many half powers of two m, n and k are apart, at most four in all.
// Collective for the first call of a communicator's members, which then agree on a cache and a
// device.
std::optional<Tuned> find_tuned(const OverlapProblem& problem,
                                const std::shared_ptr<TorchComm>& comm, bool in_graph);
// Local: with what was agreed on, else this rank's.
std::optional<Tuned> look_for_tuned(const OverlapProblem& problem,
                                    const std::shared_ptr<TorchComm>& comm, bool in_graph);

// SMs that each of a communicator's members has at least, when they have met; else of this rank. 0
// on a CPU.
int least_sm_count(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm);

}  // namespace torch_overlap::ops
