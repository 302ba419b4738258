#pragma once

#include <c10/cuda/CUDAStream.h>

#include <memory>
#include <vector>

#include "torch_overlap/common/cuda/event.h"
#include "torch_overlap/common/cuda/stream.h"

namespace torch_overlap::cublaslt {

// A fork of the current stream into several, and their join, which also happens when an exception
// leaves the scope. Legal during a capture, of which the side streams become part.
class SideStreams {
 public:
  // `origin` is current; `count` streams beside it.
  SideStreams(c10::cuda::CUDAStream origin, size_t count);
  ~SideStreams();
  SideStreams(const SideStreams&) = delete;
  SideStreams& operator=(const SideStreams&) = delete;

  size_t count() const { return streams_.size(); }
  c10::cuda::CUDAStream operator[](size_t index) const { return streams_[index]->get(); }
  // What was put on the side streams is seen by what `origin` gets next.
  void join();

 private:
  const c10::cuda::CUDAStream origin_;
  std::vector<std::unique_ptr<cuda::OwnedStream>> streams_;
  bool joined_ = false;
};

}  // namespace torch_overlap::cublaslt
