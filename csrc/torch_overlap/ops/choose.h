#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/overlap/fused.h"

// Which way a fused operator goes.
namespace torch_overlap::ops {

enum class Algorithm { sequential, chunked, ring, bulk, fused, direct };
TORCH_OVERLAP_API std::string_view to_string(Algorithm algorithm);
// All but "auto".
TORCH_OVERLAP_API std::vector<std::string> algorithm_names();
// Throws a kValue error that lists the choices for an unknown one.
void check_algorithm(std::string_view op, std::string_view algorithm);

// What a choice depends on.
struct OverlapProblem {
  std::string_view op;   // lives as long as the process
  at::ScalarType dtype;  // of what is sent or summed; of 8-bit operators that of the result
  // [m, k] x [k, n] of the whole layer, all ranks' rows and features together. 0: is not measured.
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t chunk_rows = 0;  // of one rank's chunk, or of a piece
  // What channels must have room for; 0: none is used.
  int64_t gather_bytes = 0;
  int64_t scatter_bytes = 0;
  // Of this rank's product, where the operator has fused kernels; 0: it has none. local_m: rows of
  // one kernel; 0: a chunk of each rank. types: where they are not all `dtype`.
  int64_t local_n = 0;
  int64_t local_k = 0;
  int64_t local_m = 0;
  std::optional<FusedTypes> types = std::nullopt;
  // What the channel of sums must have room for, by "direct"; 0: it uses that of what is gathered.
  // Not there: it has no such way.
  std::optional<int64_t> direct_bytes = std::nullopt;
  // Whether its sums are everybody's: of few rows the device may have one kernel that multiplies
  // and sums (OverlapDevice::reduce_room()), which is "fused" then, over a channel of its own.
  bool reduces = false;
  // Whether "auto" takes channels where nothing was measured.
  bool prefers_channels = true;

  bool operator==(const OverlapProblem&) const = default;

  // Its fused kernel may wait for what copies bring.
  bool waits_for_copies() const { return gather_bytes > 0 && scatter_bytes == 0; }
};

struct Choice {
  Algorithm algorithm;
  std::string why;
  // Who has chosen: "caller", "table" (shipped), "cache" (of `python -m torch_overlap tune`), or
  // "rule".
  std::string_view decided_by;
};

// `algorithm` as it was asked for, or what "auto" finds: in the table, else in the cache, else for
// like sizes in either, else by the number of rows and what the ranks can do. The same on all
// ranks, and collective where channels are used that are not there yet, or where the ranks have not
// met over the cache. kUnsupported where what was asked for cannot be. The communicator keeps it
// for the next call, until set_tuning() or a change of what its channels can do. `check` is called
// before anything is sent, if it is: what it throws is thrown.
TORCH_OVERLAP_API Algorithm choose_algorithm(const OverlapProblem& problem,
                                             std::string_view algorithm,
                                             const std::shared_ptr<TorchComm>& comm,
                                             const std::function<void()>& check = {});
// The same, and why, without communication: on the assumption that ranks reach each other's memory
// and have a GPU each where nobody has tried yet (they tell their devices when they share memory,
// not before), and that all have this rank's cache.
TORCH_OVERLAP_API Choice explain_algorithm(const OverlapProblem& problem,
                                           std::string_view algorithm,
                                           const std::shared_ptr<TorchComm>& comm);

// What `algorithm` means for a forward pass: "bulk" hides only the communication of gradients.
inline std::string_view forward_algorithm(std::string_view algorithm) {
  return algorithm == "bulk" ? "sequential" : algorithm;
}

// Whether products over channels take it, and channels sum it.
bool is_channel_dtype(at::ScalarType dtype);

// Whether a chunk of so many rows outlasts what its transfer costs to start.
bool is_worth_chunks(int64_t rows);

}  // namespace torch_overlap::ops
