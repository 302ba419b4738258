#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "torch_overlap/comm/backends/nccl/one_sided.h"

namespace torch_overlap {

// The windows of a communicator that go through NCCL. Each has a native communicator of its own,
// which ends no later than that of the collectives. Thread-safe.
class RemoteWindows {
 public:
  std::shared_ptr<OneSided> open(const NcclApi& api, const BackendContext& context,
                                 Bootstrap& bootstrap, std::string_view op,
                                 SymmetricMemory& memory);
  // Stops all live windows, and those that are being created: these end at their next step, or
  // inside NCCL once they have a native communicator. Does not wait.
  void stop();
  // Closes all live windows. Every operation must have ended.
  void close(Milliseconds limit);

 private:
  std::vector<std::shared_ptr<OneSided>> alive();

  std::mutex mutex_;
  std::vector<std::weak_ptr<OneSided>> windows_;
  bool is_stopped_ = false;
  uint64_t opened_ = 0;
};

}  // namespace torch_overlap
