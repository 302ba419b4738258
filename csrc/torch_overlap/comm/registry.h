#pragma once

#include <memory>
#include <string>
#include <vector>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

class TorchComm;

// Registry of live communicators by name, in which operators find theirs. A name belongs to one
// communicator of the process from new_comm or split until finalize, and is then free. Ranks that
// are threads of one process (`local`) share a name: each thread finds the communicator that it
// made, or for which it acts (ActingRankGuard). Threads: any.

// Returns the communicator named `name`. Throws kState if it was finalized (known for the latest
// 1000). Throws kValue if none of this rank has the name: the error lists the existing names, or
// reports that another thread made the communicator.
TORCH_OVERLAP_API std::shared_ptr<TorchComm> get_comm(const std::string& name);
TORCH_OVERLAP_API std::vector<std::string> comm_names();

// While it lives, get_comm() on this thread returns `comm` for its name. For runtimes that call
// operators on threads of their own: ranks that are threads of one process share a name, so a
// thread that made none of their communicators must say for which rank it acts. Guards nest; the
// innermost one of a name applies.
class TORCH_OVERLAP_API ActingRankGuard {
 public:
  explicit ActingRankGuard(std::shared_ptr<TorchComm> comm);
  ~ActingRankGuard();
  ActingRankGuard(const ActingRankGuard&) = delete;
  ActingRankGuard& operator=(const ActingRankGuard&) = delete;

  // Returns the communicator of this thread's innermost guard of the name; null if there is none.
  static std::shared_ptr<TorchComm> find(const std::string& name);

 private:
  const std::shared_ptr<TorchComm> comm_;
  const ActingRankGuard* const outer_;
};

// Returns the live communicators of every creator, including c10d process groups; if ranks are
// threads, those of every rank.
TORCH_OVERLAP_API std::vector<std::shared_ptr<TorchComm>> live_comms();

namespace detail {
// Throws if a live communicator of this rank has the name.
void require_free_name(const std::string& name);
void add_comm(const std::shared_ptr<TorchComm>& comm);
void remove_comm(const TorchComm* comm);
}  // namespace detail

}  // namespace torch_overlap
