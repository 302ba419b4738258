#pragma once

#include <c10/cuda/CUDAStream.h>

#include <memory>

#include "torch_overlap/common/cuda/side_streams.h"

namespace torch_overlap::cublaslt {

// The streams of a group of GEMMs, in addition to the current one. They are borrowed from the
// device's idle ones, so that groups of several threads run concurrently, and joined even if an
// exception leaves the scope.
class GroupStreams {
 public:
  static constexpr size_t kMaxStreams = 3;
  // `count`: at most kMaxStreams.
  GroupStreams(c10::cuda::CUDAStream origin, size_t count);
  ~GroupStreams();
  GroupStreams(const GroupStreams&) = delete;
  GroupStreams& operator=(const GroupStreams&) = delete;

  size_t count() const { return count_; }
  c10::cuda::CUDAStream operator[](size_t index) const { return streams_->stream(index); }
  // Orders later work of `origin` after the work on these streams.
  void join();

 private:
  const size_t count_;
  std::unique_ptr<cuda::SideStreams> streams_;
  bool joined_ = false;
};

}  // namespace torch_overlap::cublaslt
