#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

enum class WorkStatus { NOT_STARTED, INPROGRESS, COMPLETED, TIMEDOUT, ERROR };

TORCH_OVERLAP_API std::string_view to_string(WorkStatus status);

// An issued operation. A communicator makes one for every operation, async or not; any thread may
// use it. Inputs, outputs and factors live until the operation is done, whatever the caller drops:
// an operation on a stream or thread of the communicator keeps them alive; one on the current
// stream need not, because their memory can be reused only in that stream's order.
class TORCH_OVERLAP_API TorchWork {
 public:
  virtual ~TorchWork() = default;

  // Makes the results visible to what the caller does next: on a CUDA device the current stream
  // waits for the operation (the host does not); on a CPU device the thread blocks. Throws the
  // operation's error: a TimeoutError names the operation, any other error is the operation's own.
  // A CUDA operation that is still queued cannot have failed yet; its error surfaces in the next
  // call.
  //
  // In a CUDA graph capture: adds the edge from the operation to the current stream. That is
  // allowed, and needed only if the captured work reads the result; without it the operation stays
  // a leaf of the graph, and still ends before the graph's launch does. After that capture has
  // ended, wait() on its works is a no-op: the stream that replays orders the replays.
  virtual void wait() = 0;
  // Same as wait(), but blocks the thread on every device until the operation is done, at most for
  // `timeout` (TimeoutError; the operation itself continues and can be waited for again).
  virtual void wait_blocking(std::optional<std::chrono::milliseconds> timeout = std::nullopt) = 0;

  // Queries the device. True once the operation is done, successfully or not. Never blocks. False
  // for an operation in a graph, which runs at each replay.
  virtual bool is_completed() = 0;
  virtual WorkStatus status() = 0;
  // Null unless status() is TIMEDOUT or ERROR.
  virtual std::exception_ptr exception() = 0;

  // Calls `callback` once when the operation is done: on the caller's thread if it is already done,
  // otherwise on a thread for callbacks, which may issue operations and wait for them. Host
  // operations only; a CUDA work has stream() instead.
  virtual void on_completion(std::function<void(std::exception_ptr)> callback) = 0;
  // Sender of a receive from any rank, once that is done; -1 before, and for all other operations.
  virtual int source() { return -1; }
  // Stream on which the operation runs; empty on CPU.
  virtual std::optional<c10::Stream> stream() const { return std::nullopt; }
};

using WorkPtr = std::shared_ptr<TorchWork>;

}  // namespace torch_overlap
