#pragma once

#include <c10/cuda/CUDAStream.h>

#include <memory>

#include "torch_overlap/common/cuda/side_streams.h"

namespace torch_overlap::cublaslt {

// The streams of a group of products beside the current one. Lent from the device's, so that groups
// of several threads go on side by side; joined also when an exception leaves the scope.
class GroupStreams {
 public:
  static constexpr size_t kMost = 3;
  // `count`: at most kMost.
  GroupStreams(c10::cuda::CUDAStream origin, size_t count);
  ~GroupStreams();
  GroupStreams(const GroupStreams&) = delete;
  GroupStreams& operator=(const GroupStreams&) = delete;

  size_t count() const { return count_; }
  c10::cuda::CUDAStream operator[](size_t index) const { return streams_->stream(index); }
  // What was put on the streams is seen by what `origin` gets next.
  void join();

 private:
  const size_t count_;
  std::unique_ptr<cuda::SideStreams> streams_;
  bool joined_ = false;
};

}  // namespace torch_overlap::cublaslt
