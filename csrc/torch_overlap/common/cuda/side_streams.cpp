#include "torch_overlap/common/cuda/side_streams.h"

#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {
namespace {

bool is_outside_captures(const OwnedStream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream.get().stream(), &status) == cudaSuccess) {
    return status == cudaStreamCaptureStatusNone;
  }
  (void)cudaGetLastError();
  return false;
}

}  // namespace

SideStreams::SideStreams(c10::DeviceIndex device, std::vector<OwnedStream::Priority> priorities)
    : device_(device), priorities_(std::move(priorities)) {
  set_for({});  // now: creating a stream during a capture costs time then
}

SideStreams::~SideStreams() {
  const RelaxedCapture relaxed;
  for (const cudaEvent_t event : events_) (void)cudaEventDestroy(event);
}

SideStreams::Set& SideStreams::set_for(const Capture& capture) {
  for (const auto& set : sets_) {
    if (set->capture == capture.id) return *set;
  }
  for (const auto& set : sets_) {
    if (set->capture == 0) continue;
    const bool is_free =
        std::all_of(set->streams.begin(), set->streams.end(),
                    [](const auto& stream) { return is_outside_captures(*stream); });
    if (!is_free) continue;
    set->capture = capture.id;
    return *set;
  }
  auto set = std::make_unique<Set>();
  set->capture = capture.id;
  for (const auto priority : priorities_) {
    set->streams.push_back(std::make_unique<OwnedStream>(device_, priority));
  }
  set->forked.resize(priorities_.size());
  return *sets_.emplace_back(std::move(set));
}

cudaEvent_t SideStreams::next_event() {
  if (used_ == events_.size()) {
    const c10::cuda::CUDAGuard guard(device_);
    const RelaxedCapture relaxed;
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    events_.push_back(event);
  }
  return events_[used_++];
}

void SideStreams::fork(c10::cuda::CUDAStream origin) {
  fork_lazily(origin);
  record_fork();
}

void SideStreams::fork_lazily(c10::cuda::CUDAStream origin) {
  origin_ = origin;
  current_ = &set_for(capture_of(origin.stream()));
  current_->forked.assign(priorities_.size(), false);
  used_ = 0;
  forked_ = nullptr;
}

void SideStreams::record_fork() {
  if (forked_ == nullptr) forked_ = mark(origin_->stream());
}

const c10::cuda::CUDAStream& SideStreams::origin() {
  record_fork();
  return *origin_;
}

c10::cuda::CUDAStream SideStreams::stream(size_t index) {
  const c10::cuda::CUDAStream stream = current_->streams.at(index)->get();
  if (!current_->forked[index]) {
    record_fork();
    check(cudaStreamWaitEvent(stream.stream(), forked_), "cudaStreamWaitEvent");
    current_->forked[index] = true;
  }
  return stream;
}

cudaEvent_t SideStreams::mark(cudaStream_t stream) {
  const cudaEvent_t event = next_event();
  check(cudaEventRecord(event, stream), "cudaEventRecord");
  return event;
}

void SideStreams::wait_event(size_t index, cudaEvent_t mark) {
  check(cudaStreamWaitEvent(current_->streams.at(index)->get().stream(), mark),
        "cudaStreamWaitEvent");
  current_->forked[index] = true;  // the mark was recorded after the fork
}

void SideStreams::join() {
  if (current_ == nullptr) return;
  for (size_t i = 0; i < current_->streams.size(); ++i) {
    if (!current_->forked[i]) continue;
    current_->forked[i] = false;
    check(cudaStreamWaitEvent(origin_->stream(), mark(current_->streams[i]->get().stream())),
          "cudaStreamWaitEvent");
  }
}

}  // namespace torch_overlap::cuda
