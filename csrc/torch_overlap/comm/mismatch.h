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

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/call.h"

namespace torch_overlap {

// Detects ranks that issue different operations before they run (hint check_mismatch, off by
// default).
//
// Collectives: before each one, every rank puts a description of its call into the store and waits
// for those of the other ranks: the primitive, dtype, reduction, root, and for each pair of ranks
// the number of elements that one sends ("gives") and the other receives ("takes"). If two do not
// match, every rank throws the same kValue error, which shows both sides; nothing was sent, and the
// communicator stays usable. A rank that does not arrive is a kTimeout error that names it and
// aborts the communicator, whose ranks are out of step.
//
// Sends and receives: a pair cannot wait for each other here, because a rank may issue a receive
// first and then the send that the peer waits for. Both ranks put their entry into the store and
// look for the other's. The second to arrive sees both entries; if they do not match, it throws and
// sends nothing. The first one then times out.
//
// Only the store is used, nothing of the backend, so the check works while operations are queued,
// and in a graph capture (once, at capture). Cost: one round trip to the store per rank, and the
// hosts of the ranks run in lockstep. For debugging, not for production.
//
// Threads: any. Collectives are serialized: the lock that compare() returns is held until the
// operation is issued, so that they are issued in the order in which they were compared.
class TORCH_OVERLAP_API MismatchCheck {
 public:
  // `store` is the communicator's own. A separate connection is opened at the first use.
  MismatchCheck(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  // Compares `call` with the other ranks' and returns the lock to hold until it is issued (empty
  // for sends and receives). While it waits it polls `check_aborted`, which throws to end the wait.
  std::unique_lock<std::mutex> compare(const Call& call,
                                       const std::function<void()>& check_aborted);

 private:
  void compare_collective(const Call& call, const std::function<void()>& check_aborted);
  void compare_p2p(const Call& call);
  // Deletes entries of peers from the store that were not there when this rank looked for them.
  void delete_stale_keys(c10d::Store& store);
  c10d::Store& connected(Milliseconds timeout);

  c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  std::mutex order_mutex_;  // serializes collectives
  std::mutex mutex_;        // guards connecting, num_messages_ and stale_keys_
  bool is_connected_ = false;
  // Number of messages so far, by sender, receiver and tag.
  std::map<std::tuple<int, int, int>, uint64_t> num_messages_;
  std::deque<std::string> stale_keys_;  // entries of peers to delete once they are there
  uint64_t collectives_ = 0;            // guarded by order_mutex_
};

// Returns what to add to the timeout error of a call: how to find out if its ranks issued different
// operations. Empty if they were compared, and for one-sided operations.
TORCH_OVERLAP_API std::string mismatch_hint(const Call& call);

// Returns a function for a call that timed out while it waited for `peers`. The function publishes
// the call in the store and returns the mismatch with a peer that waits in another operation or
// with other sizes: such a peer is not missing. It returns an empty string if it finds none within
// `limit`. Both ranks of a pair that does not match time out, and both call it. It keeps no tensor
// of the call.
TORCH_OVERLAP_API std::function<std::string(c10d::Store&)> make_timeout_comparison(
    const Call& call, int rank, int size, const std::set<int>& peers, Milliseconds limit);

}  // namespace torch_overlap
