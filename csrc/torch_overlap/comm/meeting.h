#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/options.h"

namespace torch_overlap {

// One who wants to be a member, and what it was in the generation before.
struct Candidate {
  std::string handle;
  uint64_t generation = 0;
  int old_rank = 0;
  int old_size = 1;
  std::string formation;  // the same text on all members of that generation, and on nobody else
};

// How the members of a communicator's next generation find each other: each says in the store,
// under the generation's uuid, who it is and whom it expects, and waits until all whom it expects
// have said the same. See TorchComm::reconfigure.
//
//   torch_overlap/<run id>/<restart>/reconfigure/<name>/<uuid>/members/<handle> = who I am, my list
//
// A uuid is a place of its own: who comes late to an old one finds nobody there. A name may have
// the same one again in another life: handles are of one life, and all keys are below them.
struct MeetingRequest {
  std::string name;
  int64_t uuid = 0;
  // What must be equal on all members besides the handles, as text.
  std::string digest;
  // Ordered: the position is the rank. Else they are sorted here.
  std::vector<std::string> handles;
  bool ordered = true;
  Candidate me;  // its handle is among them
  // For errors: what the abort of the operations under way has taken of the caller's time.
  Milliseconds aborting{0};
};

struct Meeting {
  int rank = 0;
  std::vector<std::string> handles;  // by new rank
  uint64_t generation = 0;           // the new one's number
  // By new rank: the old one. Empty unless all were together in the generation before.
  std::vector<int> old_ranks;
  c10::intrusive_ptr<c10d::Store> store;  // the new generation's alone
};

// Collective among the handles. Polls `give_up`, which throws to leave. Throws kTimeout, naming the
// handles that did not come; kValue, on every member that came, when their requests differ.
// Afterwards the uuid is used up, however it ended.
TORCH_OVERLAP_API Meeting meet(const c10::intrusive_ptr<c10d::Store>& store,
                               const MeetingRequest& request, Milliseconds timeout,
                               const std::function<void()>& give_up);

// The order of ranks for handles given as a set: members of the youngest generation first, then
// those of larger ones, each in the order of their old ranks.
TORCH_OVERLAP_API void order_candidates(std::vector<Candidate>& candidates);

// A new handle: which host and process, which rank at the time, and a random number.
TORCH_OVERLAP_API std::string make_handle(int rank);

}  // namespace torch_overlap
