#include "torch_overlap/overlap/cuda/lanes.h"

#include <ATen/record_function.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <limits>

#include "torch_overlap/base/strings.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {
namespace {

cudaEvent_t make_event() {
  const RelaxedCapture relaxed;
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

}  // namespace

CudaLanes::CudaLanes(c10::DeviceIndex device, const LaneOptions& options)
    : Lanes(options.computes),
      device_(device),
      options_(options),
      shares_caller_(options.compute_priority == 0) {
  const c10::cuda::CUDAGuard guard(device);
  eager_end_.event = make_event();
  captured_end_.event = make_event();
  set_for({});  // now: a stream that is made during a capture costs time then
}

CudaLanes::~CudaLanes() {
  const RelaxedCapture relaxed;
  for (const cudaEvent_t event : events_) (void)cudaEventDestroy(event);
  (void)cudaEventDestroy(eager_end_.event);
  (void)cudaEventDestroy(captured_end_.event);
}

CudaLanes::Set& CudaLanes::set_for(const Capture& capture) {
  for (const auto& set : sets_) {
    if (set->capture == capture.id) return *set;
  }
  for (const auto& set : sets_) {
    if (set->capture == 0) continue;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const bool is_free = std::all_of(set->lanes.begin(), set->lanes.end(), [&](const auto& lane) {
      return cudaStreamIsCapturing(lane->stream.get().stream(), &status) == cudaSuccess &&
             status == cudaStreamCaptureStatusNone;
    });
    if (!is_free) continue;
    set->capture = capture.id;
    return *set;
  }
  auto set = std::make_unique<Set>();
  set->capture = capture.id;
  const bool by_default = options_.compute_priority == 0 && options_.comm_priority == 0;
  for (int lane = 0; lane < count(); ++lane) {
    const int priority = lane < computes() ? options_.compute_priority
                         : by_default      ? std::numeric_limits<int>::min()
                                           : options_.comm_priority;
    set->lanes.push_back(std::unique_ptr<Lane>(
        new Lane{.stream = OwnedStream(device_, OwnedStream::Priority{priority})}));
  }
  return *sets_.emplace_back(std::move(set));
}

cudaEvent_t CudaLanes::next_event() {
  if (used_ == events_.size()) events_.push_back(make_event());
  return events_[used_++];
}

void CudaLanes::fork() {
  caller_ = c10::cuda::getCurrentCUDAStream(device_);
  const cudaStream_t caller = caller_->stream();
  const Capture capture = capture_of(caller);
  current_ = &set_for(capture);
  used_ = 0;
  forked_ = next_event();
  check(cudaEventRecord(forked_, caller), "cudaEventRecord");
  for (const auto& lane : current_->lanes) lane->forked = false;
}

void CudaLanes::enter() {
  const auto caller = c10::cuda::getCurrentCUDAStream(device_).stream();
  const Capture capture = capture_of(caller);
  const End& end = capture ? captured_end_ : eager_end_;
  if (!end.is_recorded || end.capture != capture.id || end.stream == caller) return;
  check(cudaStreamWaitEvent(caller, end.event), "cudaStreamWaitEvent");
}

cudaStream_t CudaLanes::stream_of(int lane) {
  if (is_caller(lane)) return caller_->stream();
  Lane& used = *current_->lanes.at(lane);
  const cudaStream_t stream = used.stream.get().stream();
  if (used.forked) return stream;
  check(cudaStreamWaitEvent(stream, forked_), "cudaStreamWaitEvent");
  used.forked = true;
  return stream;
}

void CudaLanes::run(int lane, std::string_view name, std::function<void()> work) {
  (void)stream_of(lane);
  at::RecordFunction span(at::RecordScope::USER_SCOPE);
  if (span.isActive()) span.before(concat("torch_overlap::", name));
  const c10::cuda::CUDAStreamGuard guard(is_caller(lane) ? *caller_
                                                         : current_->lanes[lane]->stream.get());
  work();
}

Lanes::Mark CudaLanes::mark(int lane) {
  const cudaEvent_t event = next_event();
  check(cudaEventRecord(event, stream_of(lane)), "cudaEventRecord");
  return reinterpret_cast<Mark>(event);
}

void CudaLanes::after(int lane, Mark mark) {
  check(cudaStreamWaitEvent(stream_of(lane), reinterpret_cast<cudaEvent_t>(mark)),
        "cudaStreamWaitEvent");
}

void CudaLanes::wait(int lane, std::shared_ptr<WorkPtr> work) {
  run(lane, "wait", [&] {
    if (*work) (*work)->wait();
  });
}

void CudaLanes::join() {
  const cudaStream_t caller = caller_->stream();
  for (const auto& lane : current_->lanes) {
    if (!lane->forked) continue;
    const cudaEvent_t event = next_event();
    check(cudaEventRecord(event, lane->stream.get().stream()), "cudaEventRecord");
    check(cudaStreamWaitEvent(caller, event), "cudaStreamWaitEvent");
  }
}

void CudaLanes::leave() {
  const auto caller = c10::cuda::getCurrentCUDAStream(device_).stream();
  const Capture capture = capture_of(caller);
  End& end = capture ? captured_end_ : eager_end_;
  check(cudaEventRecord(end.event, caller), "cudaEventRecord");
  end.is_recorded = true;
  end.stream = caller;
  end.capture = capture.id;
}

void CudaLanes::cancel() noexcept {
  // A lane that a capture took in must be joined, or the capture cannot end.
  try {
    if (caller_ && current_ != nullptr) join();
  } catch (const std::exception&) {  // the capture is broken, or the device is
  }
}

}  // namespace torch_overlap::cuda
