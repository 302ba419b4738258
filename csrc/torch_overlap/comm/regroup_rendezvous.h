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

// A prospective member, and its place in the previous generation.
struct Candidate {
  std::string handle;
  uint64_t generation = 0;
  int old_rank = 0;
  int old_size = 1;
  std::string formation;  // equal on all members of that generation, and on no other
};

// Rendezvous of the members of a communicator's next generation. Each member publishes its identity
// and the list of members that it expects in the store, under the generation's uuid, and waits
// until all expected members have published the same list. See TorchComm::reconfigure.
//
//   torch_overlap/<run id>/<restart>/reconfigure/<name>/<uuid>/members/<handle> = identity, list
//
// Each uuid has its own keys: a late rank finds nobody under an old one. A name may use the same
// uuid again in another life: handles belong to one life, and all keys are below the handles.
struct RegroupRendezvousRequest {
  std::string name;
  int64_t uuid = 0;
  // Text that must be equal on all members, besides the handles.
  std::string digest;
  // If `ordered`, the position is the rank. Otherwise the members are sorted by sort_candidates().
  std::vector<std::string> handles;
  bool ordered = true;
  Candidate me;  // its handle is among them
  // Share of the caller's time that the abort of the pending operations took, for errors.
  Milliseconds aborting{0};
};

struct RegroupRendezvous {
  int rank = 0;
  std::vector<std::string> handles;  // by new rank
  uint64_t generation = 0;           // number of the new generation
  // Old rank, indexed by new rank. Empty unless all were members of the same previous generation.
  std::vector<int> old_ranks;
  c10::intrusive_ptr<c10d::Store> store;  // exclusive to the new generation
};

// Collective over the handles. Polls `check_aborted`, which throws to end the wait. Throws
// kTimeout, naming the handles that did not arrive, and kValue on every member that arrived if
// their requests differ. Afterwards the uuid is used up, whatever the outcome.
TORCH_OVERLAP_API RegroupRendezvous rendezvous_members(const c10::intrusive_ptr<c10d::Store>& store,
                                                       const RegroupRendezvousRequest& request,
                                                       Milliseconds timeout,
                                                       const std::function<void()>& check_aborted);

// Sorts members whose handles were given as a set into rank order: members of the youngest
// generation first, then those of larger old groups, each in the order of their old ranks.
TORCH_OVERLAP_API void sort_candidates(std::vector<Candidate>& candidates);

// Returns a new handle: host, process, current rank and a random number.
TORCH_OVERLAP_API std::string make_handle(int rank);

}  // namespace torch_overlap
