#pragma once

#include <optional>
#include <vector>

#include "torch_overlap/comm/options.h"

namespace torch_overlap {

// Faults that are injected into a `local` communicator, so that tests of timeouts, aborts and order
// are deterministic. Set by hints of the communicator, which are equal on all ranks:
//
//   local::delay = "1@3:200"      rank 1 begins its operation 3 (of this communicator, counted from
//                                 0) 200 ms late
//   local::fail  = "0@5"          rank 0's operation 5 fails before it sends anything
//   local::drop  = "2@0"          rank 2 never arrives at operation 0: it waits for the timeout
//
// Commas separate several faults; `*` as the operation means every operation. A child of split has
// the hints of its parent, and counts its own operations.
struct Faults {
  struct Fault {
    enum class Kind { kDelay, kFail, kDrop };
    Kind kind;
    int rank;
    std::optional<uint64_t> index;  // unset: every operation
    Milliseconds delay{0};
  };
  std::vector<Fault> faults;

  // Removes the fault hints from `hints` and returns their faults. Throws if one does not parse.
  static Faults take(Hints& hints);
  // Returns the names of the fault hints.
  static std::vector<std::string_view> hints();
};

}  // namespace torch_overlap
