#pragma once

#include <atomic>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "torch_overlap/comm/host/transport.h"
#include "torch_overlap/comm/primitives.h"

namespace torch_overlap {

// The primitives on CPU memory, for one operation, over any transport. Every rank exchanges
// its bytes directly with every other that it owes some, all at once: a rank that does not come is
// named by those that wait for it, and by no other.
//
// Threads: the one that runs the operation. Returns when the operation is done on this rank; throws
// a kTimeout error that names the missing ranks when the deadline comes first.
class HostPrimitives final : public Primitives {
 public:
  // `timeout`: what `deadline` came from, for the error.
  // `broken`: the communicator has failed, so no wait for a signal goes on.
  HostPrimitives(int rank, int size, HostTransport& transport, Deadline deadline,
                 Milliseconds timeout, const std::atomic<bool>& broken)
      : Primitives(rank, size),
        transport_(transport),
        deadline_(deadline),
        timeout_(timeout),
        broken_(broken) {}

  void p2p(const std::vector<P2POp>& ops) override;
  void broadcast(const at::Tensor& tensor, int root) override;
  void all_reduce(const at::Tensor& tensor, const ReduceOp& op) override;
  void reduce(const at::Tensor& tensor, const ReduceOp& op, int root) override;
  void all_gather(const Blocks& out, const at::Tensor& tensor) override;
  void reduce_scatter(const at::Tensor& tensor, const Blocks& in, const ReduceOp& op) override;
  void all_to_all(const Blocks& out, const Blocks& in) override;
  void barrier() override;
  void scatter(const at::Tensor& tensor, const Blocks& in, int root) override;
  void gather(const Blocks& out, const at::Tensor& tensor, int root) override;
  void put(SymmetricMemory& window, const at::Tensor& tensor, int dst, int64_t offset) override;
  void signal(SymmetricMemory& window, int dst) override;
  void wait_signal(SymmetricMemory& window, int src, uint64_t ticket) override;

  // True once a message was posted: until then a failure concerns nobody else.
  bool has_begun() const { return has_begun_; }
  // The ranks that a wait which failed names.
  const std::set<int>& missing() const { return missing_; }
  // The sender of the last receive from any rank.
  int source() const { return source_; }

 private:
  struct Pending {
    int peer;
    std::unique_ptr<Transfer> transfer;
  };

  void send(int peer, std::span<const std::byte> bytes);
  void recv(int peer, std::span<std::byte> bytes);
  void post(bool is_send, int peer, std::span<std::byte> bytes, int tag = 0);
  void wait_all();

  HostTransport& transport_;
  const Deadline deadline_;
  const Milliseconds timeout_;
  const std::atomic<bool>& broken_;
  Primitive now_ = Primitive::p2p;
  std::vector<Pending> pending_;
  bool has_begun_ = false;
  int source_ = kAnySource;
  std::set<int> missing_;
};

}  // namespace torch_overlap
