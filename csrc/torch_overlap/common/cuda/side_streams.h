#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <vector>

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/stream.h"

namespace torch_overlap::cuda {

// Streams for work that runs concurrently with another stream. They fork from it when they are
// first used, and join it by events. Each capture uses its own streams: a stream that has joined a
// capture stays in it until that capture ends. Threads: one fork at a time.
class SideStreams {
 public:
  // Creates one stream per priority.
  SideStreams(c10::DeviceIndex device, std::vector<OwnedStream::Priority> priorities);
  ~SideStreams();
  SideStreams(const SideStreams&) = delete;
  SideStreams& operator=(const SideStreams&) = delete;

  // Orders later work on the streams after the current work of `origin`.
  void fork(c10::cuda::CUDAStream origin);
  // The same for the work that `origin` has when origin() or a stream is first requested. If
  // neither is, nothing is recorded.
  void fork_lazily(c10::cuda::CUDAStream origin);
  const c10::cuda::CUDAStream& origin();
  // Returns the origin without recording the fork, for a fork whose streams are not used.
  const c10::cuda::CUDAStream& unforked_origin() const { return *origin_; }
  // Returns true if the fork is in a capture.
  bool is_captured() const { return current_ != nullptr && current_->capture != 0; }
  // Returns a stream of the fork.
  c10::cuda::CUDAStream stream(size_t index);
  // Records an event after the current work of the stream. It is reused after the next fork.
  cudaEvent_t mark(cudaStream_t stream);
  // Orders later work on a stream after `mark`, which was recorded since the fork.
  void wait_event(size_t index, cudaEvent_t mark);
  // Orders later work on the origin after the work of the streams. No-op without a fork.
  void join();

 private:
  struct Set {
    unsigned long long capture = 0;  // last capture that it served; 0: none, it is for eager calls
    std::vector<std::unique_ptr<OwnedStream>> streams;
    std::vector<bool> forked;
  };
  Set& set_for(const Capture& capture);
  cudaEvent_t next_event();
  void record_fork();

  const c10::DeviceIndex device_;
  const std::vector<OwnedStream::Priority> priorities_;
  std::vector<std::unique_ptr<Set>> sets_;
  std::vector<cudaEvent_t> events_;
  // State of the last fork.
  std::optional<c10::cuda::CUDAStream> origin_;
  Set* current_ = nullptr;
  cudaEvent_t forked_ = nullptr;  // null: not yet recorded
  size_t used_ = 0;
};

}  // namespace torch_overlap::cuda
