#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace torch_overlap {

// A barrier that reports the missing ranks. It uses the store, so it works if the communicator
// hangs, and does not touch the communicator. `key` names this round on all ranks.
//
// Every rank reports to the store. Rank 0 waits for the reports, for at most `timeout`, and
// publishes the list of missing ranks: the first one, or all with `wait_all_ranks`. Every rank that
// arrived, even after the publication, raises a TimeoutError with that list. If rank 0 itself is
// missing, the others report it. A rank whose wait was interrupted by a signal (base/interrupt.h)
// counts as missing.
void monitored_barrier(c10d::Store& store, const std::string& key, int rank, int size,
                       std::chrono::milliseconds timeout, bool wait_all_ranks);

}  // namespace torch_overlap
