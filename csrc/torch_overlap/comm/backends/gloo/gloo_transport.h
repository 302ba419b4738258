#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "torch_overlap/comm/host/transport.h"

namespace torch_overlap {

// Bytes over the sockets of torch's ProcessGroupGloo: its send and recv only, which post at once
// without a thread, can be waited for with a deadline each, and can be aborted. Its collectives can
// do neither, and need the same order on all ranks even after a timeout.
//
// gloo ends the process when a message is larger than the buffer it meets. The size and kind of a
// message are therefore in its tag: halves that do not fit do not meet, and time out.
class GlooTransport final : public HostTransport {
 public:
  explicit GlooTransport(c10::intrusive_ptr<c10d::Backend> group);
  ~GlooTransport() override;

  std::string version() const override;
  std::unique_ptr<Transfer> send(const Message& message) override;
  std::unique_ptr<Transfer> recv(const Message& message) override;
  bool hides_mismatches() const override { return true; }
  void stop(const std::string& reason, bool tell_peers) override;

 private:
  class Posted;
  std::unique_ptr<Transfer> post(const Message& message, bool is_send);

  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> group_;  // null once the peers were told
  std::string stopped_;
  std::set<Posted*> posted_;
};

}  // namespace torch_overlap
