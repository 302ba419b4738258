#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "torch_overlap/comm/host/transport.h"

namespace torch_overlap {

// Moves bytes over the sockets of torch's ProcessGroupGloo. Only its send and recv are used: they
// post at once without a thread, each can be waited for with a deadline, and they can be aborted.
// Its collectives can do neither, and need the same order on all ranks even after a timeout.
//
// gloo ends the process if a message is larger than the buffer that it matches. A message's tag
// therefore contains its size and kind: halves that do not fit do not match, and time out.
class GlooTransport final : public HostTransport {
 public:
  explicit GlooTransport(c10::intrusive_ptr<c10d::Backend> group);
  ~GlooTransport() override;

  std::string version() const override;
  std::unique_ptr<Transfer> post(const Message& message, bool is_send) override;
  bool hides_mismatches() const override { return true; }
  void stop(const std::string& reason, bool notify_peers) override;

 private:
  class Posted;

  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> group_;  // null once the peers were notified
  std::string stopped_;
  std::set<Posted*> posted_;
};

}  // namespace torch_overlap
