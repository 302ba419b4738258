#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <vector>

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/stream.h"

namespace torch_overlap::cuda {

// Streams for work beside another stream: forked from it when they are first used, and joined to it
// by events. Captures get streams of their own: one that a capture took in stays in it until that
// capture ends. Threads: one fork at a time.
class SideStreams {
 public:
  // A stream for each priority.
  SideStreams(c10::DeviceIndex device, std::vector<OwnedStream::Priority> priorities);
  ~SideStreams();
  SideStreams(const SideStreams&) = delete;
  SideStreams& operator=(const SideStreams&) = delete;

  // What is put on the streams from now on comes behind what `origin` has.
  void fork(c10::cuda::CUDAStream origin);
  // The same of what it has when origin() or a stream is first asked for: where neither is, nothing
  // is recorded.
  void fork_at_first_use(c10::cuda::CUDAStream origin);
  const c10::cuda::CUDAStream& origin();
  // Without that: of a fork whose streams are not used.
  const c10::cuda::CUDAStream& unforked_origin() const { return *origin_; }
  // Whether the fork is in a capture.
  bool are_captured() const { return current_ != nullptr && current_->capture != 0; }
  // Of the fork.
  c10::cuda::CUDAStream stream(size_t index);
  // An event behind what the stream has; it is used again after the next fork.
  cudaEvent_t mark(cudaStream_t stream);
  // What is put on a stream from now on comes behind `mark`, which was made since the fork.
  void follow(size_t index, cudaEvent_t mark);
  // The origin comes behind what the streams have; nothing to do without a fork.
  void join();

 private:
  struct Set {
    unsigned long long capture = 0;  // the last that it served; 0: none, it is for eager calls
    std::vector<std::unique_ptr<OwnedStream>> streams;
    std::vector<bool> forked;
  };
  Set& set_for(const Capture& capture);
  cudaEvent_t next_event();
  void mark_fork();

  const c10::DeviceIndex device_;
  const std::vector<OwnedStream::Priority> priorities_;
  std::vector<std::unique_ptr<Set>> sets_;
  std::vector<cudaEvent_t> events_;
  // Of the last fork.
  std::optional<c10::cuda::CUDAStream> origin_;
  Set* current_ = nullptr;
  cudaEvent_t forked_ = nullptr;  // null: not yet recorded
  size_t used_ = 0;
};

}  // namespace torch_overlap::cuda
