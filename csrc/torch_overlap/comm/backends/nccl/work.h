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
// From (a) on the order of that stream protects them, also those that were allocated on another
// stream: torch's allocator is told of each (record_stream), and gives its memory to nobody before
// the stream has come to where it is freed. Memory of the stream itself is not held longer for it.
// An async operation in a capture holds them until (a), or until the graph is gone: a leaf of the
// graph runs beside what comes later in the capture, and must not lend it its memory.
//
// Threads: any. It takes no lock, and never calls into NCCL.
class CudaWork final : public TorchWork {
 public:
  using Clock = std::chrono::steady_clock;

  // `capture`: the id of the capture that the operation becomes part of, 0 for none.
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
  void runs_on(c10::cuda::CUDAStream stream) { stream_ = stream; }
  // Before it is issued: memory of a window that the operation touches.
  void uses(std::shared_ptr<SymmetricMemory> window) { call_.window = std::move(window); }
  // The device has passed the end event, whatever came of the operation. False while captured. An
  // error of the device is noted as the communicator's failure, on which the watchdog acts.
  bool has_ended();
  // By the watchdog, which saw that the stream has come to it.
  void has_started(Clock::time_point now);
  // The device has passed it, as a later operation showed.
  void end_is_known();
  // Drops the tensors. Call it with no lock held, and not on the watchdog's thread: the last
  // reference to a tensor may take the GIL.
  // `stream`: runs the operation or waits for it, and keeps the memory from then on.
  void release(std::optional<c10::cuda::CUDAStream> stream = std::nullopt);
  // Also the memory of a window, which stays mapped until the operation has ended, whatever stream
  // it is on: for who knows that it has, or that the graph which had it is gone.
  void release_all();

  // When it was issued, and when the watchdog first saw that it could run.
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
