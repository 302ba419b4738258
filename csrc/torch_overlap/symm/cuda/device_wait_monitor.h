#pragma once

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "torch_overlap/symm/cuda/wait_record.h"
#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap::cuda {

// Signals on the device, and limits of the waits for them. The host can stop all running waits, and
// is notified of the first one that expired. After either, no wait of this monitor waits and no
// signal of it is sent, since a signal may not be true any more.
//
// Each communicator has one. It is held by everything that may still launch or run a kernel that
// uses it, including graphs.
// Threads: any.
class DeviceWaitMonitor {
 public:
  // May be called during a capture of this thread.
  explicit DeviceWaitMonitor(c10::DeviceIndex device);
  // Does not call CUDA: the memory goes to the next monitor.
  ~DeviceWaitMonitor();
  DeviceWaitMonitor(const DeviceWaitMonitor&) = delete;
  DeviceWaitMonitor& operator=(const DeviceWaitMonitor&) = delete;

  void signal(SymmetricMemory& window, int dst, cudaStream_t stream) const;
  // Adds one to a signal count at any address.
  void signal(uint64_t* count, cudaStream_t stream) const;
  void wait(SymmetricMemory& window, int src, std::chrono::milliseconds timeout,
            cudaStream_t stream);

  // Returns the control block for kernels that wait in another way, for memory that `id` identifies
  // and `name` names in errors.
  WaitControl control(uint64_t id, const std::string& name, std::chrono::milliseconds timeout);

  void stop() noexcept;
  // Returns a description of the first wait that expired; empty if none has.
  std::optional<std::string> expired() const;
  // Returns a description of a wait that has exceeded its timeout and has not yet expired, or was
  // the last to do so; empty if there was none.
  std::string late() const;

  // A record in mapped host memory, and a word of device memory.
  struct Storage {
    WaitRecord* record;
    uint32_t* failed;
  };

 private:
  const c10::DeviceIndex device_;
  const Storage storage_;
  mutable std::mutex mutex_;
  std::map<uint64_t, std::string> names_;  // names of windows, by id
};

}  // namespace torch_overlap::cuda
