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

// Signals on the device, and what bounds the waits for them: the host can stop all that run, and is
// told of the first that expired. After either, no wait of this board waits and no signal of it is
// sent: what they would tell is not true any more.
//
// One for a communicator. Whoever may still launch or run a kernel of it, a graph too, holds it.
// Threads: any.
class WaitBoard {
 public:
  // Also during a capture of this thread.
  explicit WaitBoard(c10::DeviceIndex device);
  // Calls no CUDA: the memory goes to the next board.
  ~WaitBoard();
  WaitBoard(const WaitBoard&) = delete;
  WaitBoard& operator=(const WaitBoard&) = delete;

  void signal(SymmetricMemory& window, int dst, cudaStream_t stream) const;
  // Adds one to a count of signals, wherever it is.
  void signal(uint64_t* count, cudaStream_t stream) const;
  void wait(SymmetricMemory& window, int src, std::chrono::milliseconds timeout,
            cudaStream_t stream);

  // For kernels that wait in another way, for something in the memory that `id` stands for and
  // `name` names in errors.
  WaitControl control(uint64_t id, const std::string& name, std::chrono::milliseconds timeout);

  void stop() noexcept;
  // What the first wait that expired was waiting for; empty if none has.
  std::optional<std::string> expired() const;
  // What a wait is waiting for that has come to the end of its time and has not yet expired, or
  // was the last to do so; empty if there was none.
  std::string late() const;

  // Mapped host memory, and a word of device memory.
  struct Block {
    WaitRecord* record;
    uint32_t* failed;
  };

 private:
  const c10::DeviceIndex device_;
  const Block block_;
  mutable std::mutex mutex_;
  std::map<uint64_t, std::string> names_;  // of windows, by id
};

}  // namespace torch_overlap::cuda
