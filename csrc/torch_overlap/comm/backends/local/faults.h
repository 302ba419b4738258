#pragma once

#include <optional>
#include <string>
#include <vector>

#include "torch_overlap/comm/options.h"

namespace torch_overlap {

// What goes wrong on purpose in a `local` communicator, so that tests of timeouts, aborts and order
// need no luck. Given by hints of the communicator, equal on all ranks:
//
//   local::delay = "1@3:200"      rank 1 begins its operation 3 (of this communicator, counted from
//                                 0) 200 ms late
//   local::fail  = "0@5"          rank 0's operation 5 fails before it sends anything
//   local::drop  = "2@0"          rank 2 never arrives at operation 0: there it waits for its
//   timeout
//
// Several are separated by commas; `*` as the operation means all of them. A child of split has
// the hints of its parent, and counts for itself.
struct Faults {
  struct Fault {
    enum class Kind { kDelay, kFail, kDrop };
    Kind kind;
    int rank;
    std::optional<uint64_t> index;  // unset: every operation
    Milliseconds delay{0};
  };
  std::vector<Fault> faults;

  // Takes its hints out of `hints`. Throws on one that does not parse.
  static Faults take(Hints& hints);
  // Their names.
  static std::vector<std::string_view> hints();
};

}  // namespace torch_overlap
