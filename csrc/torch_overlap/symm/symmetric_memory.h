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

// Returns a zeroed tensor whose memory the other ranks can map in a rendezvous. No communication.
// Several rendezvous may share the tensor, or parts of it. It is never an inference tensor.
TORCH_OVERLAP_API at::Tensor symmetric_empty(c10::IntArrayRef sizes, at::ScalarType dtype,
                                             c10::Device device);

// Memory of which every rank of a group has a part and can reach all parts, or some parts if it is
// partial: this rank's tensor, pointers to the other ranks' parts, and signal counts.
//
// Lifetime: rendezvous() creates it, collectively. The parts of other ranks stay mapped, and so
// alive, until the last reference to this object or to a view is released, without communication.
// The part of a rank that has exited stays alive for the ranks that have it mapped.
//
// The object neither accesses the memory nor orders accesses: its users do.
// Threads: any.
class TORCH_OVERLAP_API SymmetricMemory : public std::enable_shared_from_this<SymmetricMemory> {
 public:
  struct Request {
    std::string_view op;   // for errors
    std::string name;      // name of the memory, for errors
    at::Tensor tensor;     // this rank's part: contiguous, of the same size on all ranks
    std::string digest{};  // any text that must be equal on all ranks
    Fault fault{};         // reason why this rank cannot take part: then all ranks throw
    // Accepts ranks that cannot reach each other, if all ranks set it: they then need other means.
    // `partial_unsupported_reason`: why this rank does not set it, for the error.
    bool partial = false;
    std::string partial_unsupported_reason{};
    // Behaves as if this rank could not reach the others (PretendUnreachable).
    bool pretend_unreachable = false;
  };
  // Collective: every rank must call it, also one with a fault. In the first step all ranks
  // exchange descriptions of their memory. In the second each maps the memory of the others and
  // reports what it could not reach. An error of one rank is thrown on every rank. A pair of ranks
  // that cannot reach each other is an error that names both and the reason, unless all ranks ask
  // for a partial memory. Each step is bounded by the bootstrap's timeout.
  static std::shared_ptr<SymmetricMemory> rendezvous(Bootstrap& bootstrap, const Request& request);

  // Creates the memory of a group of which only this rank exists (backend fake): the others cannot
  // be reached.
  static std::shared_ptr<SymmetricMemory> create_without_peers(int rank, int size,
                                                               const Request& request);

  ~SymmetricMemory();
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(pointers_.size()); }
  const std::string& name() const { return name_; }
  // Unique in the process.
  uint64_t id() const { return id_; }
  c10::Device device() const { return device_; }
  // Bytes of each part.
  size_t bytes() const { return bytes_; }

  // Returns the part of `rank` in this process; null if it cannot be reached.
  void* pointer(int rank) const { return pointers_.at(rank); }
  bool is_reachable(int rank) const { return unreachable_reasons_.at(rank).empty(); }
  // Returns why `rank` cannot be reached; empty if it can.
  const std::string& unreachable_reason(int rank) const { return unreachable_reasons_.at(rank); }
  // Partial memory: names a pair of ranks, possibly without this one, and why one cannot reach the
  // other. The same on all ranks; empty if all reach all.
  const std::string& unreachable_pair() const { return unreachable_pair_; }
  // True if some ranks use the same device: a copy from one of them to another then uses its SMs
  // and not a link. The same on all ranks.
  bool shares_devices() const { return has_shared_devices_; }
  // True if every rank knows its connection to all others: NVLink, or a shared device. False if
  // devices are hidden (CUDA_VISIBLE_DEVICES). The same on all ranks.
  bool has_known_links() const { return has_known_links_; }
  // Writes to the parts that cannot be reached. Null if all can be reached, or if none was set.
  RemoteAccess* remote() const { return remote_.get(); }
  // Called once, by the creator, before others have the object.
  void set_remote(std::shared_ptr<RemoteAccess> remote) { remote_ = std::move(remote); }
  const SignalPad& signals() const { return signals_; }
  // Returns memory of the part of `rank` from byte `offset` on as a tensor, which keeps this object
  // alive.
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
  std::vector<std::string> unreachable_reasons_;  // by rank
  std::string unreachable_pair_;
  bool has_shared_devices_ = false;
  bool has_known_links_ = false;
  SignalPad signals_;
  std::vector<std::shared_ptr<void>> keep_alives_;  // the own parts and the mappings
  std::shared_ptr<RemoteAccess> remote_;            // destroyed first: it uses the own parts
};

}  // namespace torch_overlap
