#pragma once

#include <memory>
#include <string>

#include "torch_overlap/comm/backends/local/faults.h"
#include "torch_overlap/comm/host/mailbox.h"
#include "torch_overlap/comm/host/transport.h"

namespace torch_overlap {

// Transport between ranks that are threads of one process: they copy from each other's tensors.
class LocalTransport final : public HostTransport {
 public:
  LocalTransport(std::shared_ptr<Mailbox> mailbox, int rank, Faults faults)
      : mailbox_(std::move(mailbox)), rank_(rank), faults_(std::move(faults)) {}

  std::string version() const override { return "1"; }
  std::unique_ptr<Transfer> post(const Message& message, bool is_send) override {
    return mailbox_->post(rank_, is_send, message);
  }
  void before(uint64_t index, Deadline deadline) override;
  void stop(const std::string& reason, bool notify_peers) override;
  std::string departure_reason(int peer) override { return mailbox_->departure_reason(peer); }

 private:
  const std::shared_ptr<Mailbox> mailbox_;
  const int rank_;
  const Faults faults_;
};

}  // namespace torch_overlap
