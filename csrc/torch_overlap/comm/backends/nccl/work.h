#pragma once

#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>

#include "torch_overlap/comm/backends/nccl/runtime.h"
#include "torch_overlap/comm/call.h"
#include "torch_overlap/comm/work.h"

namespace torch_overlap {

// One operation on a CUDA stream. See TorchWork for the contract.
//
// Tensors. An operation on the current stream holds none; an async one holds all of them until (a)
// wait() on the stream that issued it, or (b) the communicator sees that the operation has ended.
// From (a) on the order of that stream protects them, including those that were allocated on
// another stream: each is recorded with torch's allocator (record_stream), which does not reuse its
// memory before the stream has reached the point at which it is freed. Memory of the stream itself
// is not held longer for it. An async operation in a capture holds them until (a), or until the
// graph is destroyed: a leaf of the graph runs concurrently with later work of the capture, which
// must not get the leaf's memory.
//
// Thread-safe. Takes no lock, and never calls into NCCL.
class CudaWork final : public TorchWork {
 public:
  using Clock = std::chrono::steady_clock;

  // `capture` is the ID of the capture that the operation becomes part of, or 0.
  CudaWork(std::shared_ptr<CommRuntime> runtime, Call call, c10::cuda::CUDAStream issued_on,
           unsigned long long capture);
  ~CudaWork() override;

  void wait() override;
  void wait_blocking(std::optional<std::chrono::milliseconds> timeout) override;
  bool is_completed() override;
  WorkStatus status() override;
  std::exception_ptr exception() override;
  void on_completion(std::function<void(std::exception_ptr)> callback) override;
  std::optional<c10::Stream> stream() const override { return stream_.unwrap(); }

  // --- For the communicator ----------------------------------------------------------------------
  const Call& call() const { return call_; }
  cudaEvent_t ready() const { return events_.ready; }
  cudaEvent_t end() const { return events_.end; }
  void set_stream(c10::cuda::CUDAStream stream) { stream_ = stream; }
  // Sets the window whose memory the operation uses. Called before the operation is issued.
  void set_window(std::shared_ptr<SymmetricMemory> window) { call_.window = std::move(window); }
  // True if the device has passed the end event, even if the operation failed. False while
  // captured. An error of the device is recorded as the communicator's failure, on which the
  // watchdog acts.
  bool has_ended();
  // Called by the watchdog when it sees that the stream has reached the operation.
  void set_started(Clock::time_point now);
  // Records that the device has passed the operation, as its event or a later operation showed.
  void on_ended();
  // Drops the tensors. Must be called with no lock held, and not on the watchdog's thread: the last
  // reference to a tensor may acquire the GIL.
  // `stream` runs the operation or waits for it; from then on its order protects the memory.
  void release(std::optional<c10::cuda::CUDAStream> stream = std::nullopt);
  // Drops the memory of a window too, which stays mapped until the operation has ended, on any
  // stream. Only for callers that know that it has ended, or that its graph was destroyed.
  void release_all();

  // Time of issue, and time at which the watchdog first saw that the operation could run.
  const Clock::time_point issued;
  std::optional<Clock::time_point> started;

 private:
  bool is_captured() const { return capture_ != 0; }
  void wait_in_capture(c10::cuda::CUDAStream current);

  const std::shared_ptr<CommRuntime> runtime_;
  Call call_;
  const c10::cuda::CUDAStream issued_on_;
  c10::cuda::CUDAStream stream_;
  const unsigned long long capture_;
  const cuda::EventPair events_;
  std::atomic<bool> completed_{false};  // ended, and the communicator had not failed by then
  std::atomic<bool> released_{false};
  std::atomic<bool> window_released_{false};
};

}  // namespace torch_overlap
