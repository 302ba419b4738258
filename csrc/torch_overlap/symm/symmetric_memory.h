#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/symm/bootstrap.h"
#include "torch_overlap/symm/remote_access.h"
#include "torch_overlap/symm/signal_pad.h"

namespace torch_overlap {

// A tensor without communication: its memory is such that the other ranks can map it in a
// rendezvous. Filled with zeros. Several rendezvous may share it, and parts of it. Never an
// inference tensor.
TORCH_OVERLAP_API at::Tensor symmetric_empty(c10::IntArrayRef sizes, at::ScalarType dtype,
                                             c10::Device device);

// Memory that every rank of a group has a part of and can reach all parts of, or some of a partial
// one: this rank's tensor, the others' as pointers, and counts to signal on.
//
// Life: rendezvous() makes it, collectively. The parts of others stay mapped, and so alive, until
// the last reference to this object or to a view is gone; nobody is asked then. A rank that has
// gone leaves its part behind for those that have it mapped.
//
// The object does nothing to the memory and orders nothing: that is for those who use it.
// Threads: any.
class TORCH_OVERLAP_API SymmetricMemory : public std::enable_shared_from_this<SymmetricMemory> {
 public:
  struct Request {
    std::string_view op;  // for errors
    std::string name;     // of the memory, for errors
    at::Tensor tensor;    // this rank's part: contiguous, of the same size on all ranks
    std::string digest;   // any text that must be equal on all ranks
    Fault fault;          // why this rank cannot: then no rank can, and all throw
    // Ranks that cannot reach each other are taken as they are if all ranks ask for that: they have
    // another way. `whole_because`: why this one does not, for the error.
    bool partial = false;
    std::string whole_because{};
    // As if this rank and the others could not (PretendUnreachable).
    bool apart = false;
  };
  // Collective: every rank must call it, also one with a fault. Two steps: all ranks tell each
  // other what they have; then each maps what it can and tells what it could not. An error of one
  // rank is thrown on every rank; a pair that cannot reach each other is one that names both and
  // why, unless all ask for a partial memory. Bounded by the bootstrap's timeout for each step.
  static std::shared_ptr<SymmetricMemory> rendezvous(Bootstrap& bootstrap, const Request& request);

  // A group of which only this rank is there (backend fake): the others cannot be reached.
  static std::shared_ptr<SymmetricMemory> alone(int rank, int size, const Request& request);

  ~SymmetricMemory();
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(pointers_.size()); }
  const std::string& name() const { return name_; }
  // Unique in the process.
  uint64_t id() const { return id_; }
  c10::Device device() const { return device_; }
  // Of each part.
  size_t bytes() const { return bytes_; }

  // The part of `rank` in this process; null if it cannot be reached.
  void* pointer(int rank) const { return pointers_.at(rank); }
  bool is_reachable(int rank) const { return obstacles_.at(rank).empty(); }
  // Why not; empty if it can.
  const std::string& obstacle(int rank) const { return obstacles_.at(rank); }
  // Of a partial memory: a pair of ranks, maybe others than this one, and why one cannot reach the
  // other. The same on all ranks; empty if all reach all.
  const std::string& unreachable_pair() const { return unreachable_pair_; }
  // Whether some of the ranks have the same device: what one of them copies to another takes its
  // SMs then, not a link. The same on all ranks.
  bool shares_devices() const { return shares_devices_; }
  // Whether every rank sees what lies between it and all others: NVLink, or that they share a
  // device. False where devices are hidden (CUDA_VISIBLE_DEVICES). The same on all ranks.
  bool has_known_links() const { return has_known_links_; }
  // How to write to what cannot be reached. Null where nothing is missing, or nobody set it.
  RemoteAccess* remote() const { return remote_.get(); }
  // Once, by who made it, before others have it.
  void set_remote(std::shared_ptr<RemoteAccess> remote) { remote_ = std::move(remote); }
  const SignalPad& signals() const { return signals_; }
  // Memory of the part of `rank` from byte `offset` on as a tensor, which keeps this object alive.
  at::Tensor view(int rank, c10::IntArrayRef sizes, at::ScalarType dtype, int64_t offset = 0);

 private:
  friend class Rendezvous;
  SymmetricMemory(int rank, int size, const Request& request);

  const int rank_;
  const uint64_t id_;
  const std::string name_;
  const c10::Device device_;
  const size_t bytes_;
  std::vector<void*> pointers_;
  std::vector<std::string> obstacles_;  // by rank
  std::string unreachable_pair_;
  bool shares_devices_ = false;
  bool has_known_links_ = false;
  SignalPad signals_;
  std::vector<std::shared_ptr<void>> keepers_;  // of the own parts, and of the mappings
  std::shared_ptr<RemoteAccess> remote_;        // goes first: it uses the own parts
};

}  // namespace torch_overlap
