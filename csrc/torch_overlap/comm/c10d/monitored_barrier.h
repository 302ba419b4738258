#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace torch_overlap {

// A barrier that says who did not come. It goes through the store, so it works where the
// communicator itself hangs, and leaves that untouched. `key` names this round on all ranks.
//
// Every rank reports at the store. Rank 0 waits for the reports, `timeout` at most, and publishes
// the list of those that are missing: the first one, or all with `wait_all_ranks`. Every rank that
// came, also one that comes after that, raises a TimeoutError with that list. When rank 0 itself is
// missing, the others say so. A rank whose wait a signal ends (base/interrupt.h) did not come.
void monitored_barrier(c10d::Store& store, const std::string& key, int rank, int size,
                       std::chrono::milliseconds timeout, bool wait_all_ranks);

}  // namespace torch_overlap
