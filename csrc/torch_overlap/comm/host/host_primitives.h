#pragma once

#include <atomic>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "torch_overlap/comm/host/transport.h"
#include "torch_overlap/comm/primitives.h"

namespace torch_overlap {

// The primitives over CPU memory for one operation, on any transport. Every rank exchanges bytes
// directly with each peer that it sends to or receives from, with all of them at once. A missing
// rank is therefore named by the ranks that wait for it, and by no other.
//
// Used by the thread that runs the operation. A primitive returns when the operation is complete on
// this rank. It throws a kTimeout error that names the missing ranks if the deadline passes first.
class HostPrimitives final : public Primitives {
 public:
  // `timeout` is the duration that `deadline` was computed from; error messages show it.
  // `broken` is true once the communicator has failed. It ends waits for signals.
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
  void all_gather(const RankTensors& out, const at::Tensor& tensor) override;
  void reduce_scatter(const at::Tensor& tensor, const RankTensors& in, const ReduceOp& op) override;
  void all_to_all(const RankTensors& out, const RankTensors& in) override;
  void barrier() override;
  void scatter(const at::Tensor& tensor, const RankTensors& in, int root) override;
  void gather(const RankTensors& out, const at::Tensor& tensor, int root) override;
  void put(SymmetricMemory& window, const at::Tensor& tensor, int dst, int64_t offset) override;
  void signal(SymmetricMemory& window, int dst) override;
  void wait_signal(SymmetricMemory& window, int src, uint64_t ticket) override;

  // True once a message was posted. Until then a failure affects no other rank.
  bool has_started() const { return has_started_; }
  // Ranks that a failed wait names.
  const std::set<int>& missing() const { return missing_; }
  // Sender of the last receive from any rank.
  int source() const { return source_; }

 private:
  struct Pending {
    int peer;
    std::unique_ptr<Transfer> transfer;
  };

  void send(int peer, std::span<const std::byte> bytes);
  void recv(int peer, std::span<std::byte> bytes);
  void post(bool is_send, int peer, std::span<const std::byte> bytes, int tag = 0);
  void wait_all();

  HostTransport& transport_;
  const Deadline deadline_;
  const Milliseconds timeout_;
  const std::atomic<bool>& broken_;
  Primitive primitive_ = Primitive::p2p;
  std::vector<Pending> pending_;
  bool has_started_ = false;
  int source_ = kAnySource;
  std::set<int> missing_;
};

}  // namespace torch_overlap
