#include "torch_overlap/comm/backends/local/local_transport.h"

#include <algorithm>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {

void LocalTransport::before(uint64_t index, Deadline deadline) {
  using Kind = Faults::Fault::Kind;
  for (const auto& fault : faults_.faults) {
    if (fault.rank != rank_ || fault.index.value_or(index) != index) continue;
    switch (fault.kind) {
      case Kind::kDelay:
        mailbox_->sleep(rank_, std::min(deadline, HostClock::now() + fault.delay));
        break;
      case Kind::kFail:
        fail(ErrorKind::kRuntime, "injected fault: rank ", rank_, " fails at operation ", index);
      case Kind::kDrop:
        mailbox_->sleep(rank_, deadline);
        fail(ErrorKind::kTimeout, "injected fault: rank ", rank_, " did not come to operation ",
             index);
    }
  }
}

void LocalTransport::stop(const std::string& reason, bool notify_peers) {
  mailbox_->stop(rank_, reason);
  if (notify_peers) mailbox_->leave(rank_, reason);
}

}  // namespace torch_overlap
