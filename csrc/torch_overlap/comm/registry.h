#pragma once

#include <memory>
#include <string>
#include <vector>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

class TorchComm;

// Live communicators by name: how operators find theirs. A name belongs to one communicator of the
// process from new_comm or split until finalize, and is then free. Ranks that are threads of one
// process (`local`) share a name: each thread finds the communicator that it made. Threads: any.

// The communicator named `name`. A kState error says that it was finalized (known of the latest
// 1000); a kValue error lists the names that exist.
TORCH_OVERLAP_API std::shared_ptr<TorchComm> get_comm(const std::string& name);
TORCH_OVERLAP_API std::vector<std::string> comm_names();
// Whoever made them, a c10d process group too; of ranks that are threads, each one's.
TORCH_OVERLAP_API std::vector<std::shared_ptr<TorchComm>> live_comms();

namespace detail {
// Throws if a live communicator of this rank has the name.
void require_free_name(const std::string& name);
void add_comm(const std::shared_ptr<TorchComm>& comm);
void remove_comm(const TorchComm* comm);
}  // namespace detail

}  // namespace torch_overlap
