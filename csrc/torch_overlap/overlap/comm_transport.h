#pragma once

#include <map>
#include <memory>

#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/overlap/transport.h"

namespace torch_overlap {

// Transport through a communicator: sends and receives, for ranks that cannot map each other's
// memory.
class CommTransport final : public Transport {
 public:
  explicit CommTransport(const std::shared_ptr<TorchComm>& comm) : comm_(comm) {}

  std::string_view name() const override { return "send and receive"; }
  bool is_peer_mapped() const override { return false; }
  // No entry handshake is needed: a receive is posted only when its rank is ready for it, so no
  // data is overwritten.
  void begin(const EntryPayload&) override { pending_recvs_.clear(); }
  void end() override { pending_recvs_.clear(); }
  void exchange(OverlapStreams& streams, int stream, const Move& move) override;
  void wait_for_flags(OverlapStreams& streams, int stream, const std::vector<int>& flags) override;
  void post(OverlapStreams& streams, int stream, int flag) override;
  at::Tensor peer(int rank, int64_t at, c10::IntArrayRef sizes,
                  at::ScalarType dtype) const override;

 private:
  const std::weak_ptr<TorchComm> comm_;  // weak: the communicator may own the channel
  struct PendingRecv {
    OverlapStreams::Mark started;   // after the item that sets `work`
    std::shared_ptr<WorkPtr> work;  // set when the stream runs that item
  };
  std::map<int, PendingRecv> pending_recvs_;  // by flag: the exchange whose data the flag signals
};

}  // namespace torch_overlap
