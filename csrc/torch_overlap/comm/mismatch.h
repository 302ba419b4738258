#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/call.h"

namespace torch_overlap {

// Finds ranks that do different things before they do them (hint check_mismatch, off by default).
//
// Collectives: before each, every rank puts what it is about to do into the store and waits for
// what the others do: the primitive, dtype, reduction, root, and for each pair of ranks how much
// one gives and the other takes. If something does not fit, every rank throws the same kValue
// error, which shows both sides; nothing was sent, and the communicator goes on. A rank that does
// not come is a kTimeout error that names it and ends the communicator, whose ranks are out of
// step.
//
// Sends and receives: a pair cannot wait for each other here, because a rank may issue a receive
// first and then the send that the peer waits for. Both put in theirs and look; the one that comes
// second sees both and throws, and sends nothing. The first runs into its timeout.
//
// The store is used, and nothing of the backend: so it works with operations queued, and in a graph
// capture (once, when it captures). Cost: as many round trips to the store as there are ranks, and
// the ranks go in step, on the host. For finding a bug, not for production.
//
// Threads: any. Collectives take turns: the lock that compare() returns is held until the operation
// is issued, so that the order of comparing is the order of issue.
class TORCH_OVERLAP_API MismatchCheck {
 public:
  // `store`: the communicator's own; a connection of its own is opened at the first use.
  MismatchCheck(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  // Polls `give_up`, which throws to leave.
  std::unique_lock<std::mutex> compare(const Call& call, const std::function<void()>& give_up);

 private:
  void compare_collective(const Call& call, const std::function<void()>& give_up);
  void compare_p2p(const Call& call);
  // Takes halves of peers out of the store that were not there when this rank looked.
  void clean_up(c10d::Store& store);
  c10d::Store& connected(Milliseconds timeout);

  c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  std::mutex turn_;   // of collectives
  std::mutex pairs_;  // what follows, and connecting
  bool is_connected_ = false;
  // Number of halves so far, by sender, receiver and tag.
  std::map<std::tuple<int, int, int>, uint64_t> halves_;
  std::deque<std::string> unseen_;  // keys
  uint64_t collectives_ = 0;        // under turn_
};

// What to add to the timeout of a call: how to find out whether its ranks did different things.
// Empty where they were compared, and for what is not.
TORCH_OVERLAP_API std::string mismatch_hint(const Call& call);

// For a call that timed out while it waited for `peers`. The function tells the store what the call
// is, and returns what a peer told that waits in another operation or with other sizes: such a peer
// is not absent. Empty if none has within `limit`. Both ranks of a pair that do not fit time out,
// and ask. It keeps no tensor of the call.
TORCH_OVERLAP_API std::function<std::string(c10d::Store&)> late_comparison(
    const Call& call, int rank, int size, const std::set<int>& peers, Milliseconds limit);

}  // namespace torch_overlap
