#include "torch_overlap/overlap/cuda/lanes.h"

#include <ATen/record_function.h>
#include <c10/cuda/CUDAGuard.h>

#include <limits>
#include <vector>

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

std::vector<OwnedStream::Priority> priorities_of(const LaneOptions& options) {
  const bool by_default = options.compute_priority == 0 && options.comm_priority == 0;
  std::vector<OwnedStream::Priority> priorities(options.computes, {options.compute_priority});
  priorities.push_back({by_default ? std::numeric_limits<int>::min() : options.comm_priority});
  return priorities;
}

}  // namespace

CudaLanes::CudaLanes(c10::DeviceIndex device, const LaneOptions& options)
    : Lanes(options.computes),
      device_(device),
      shares_caller_(options.compute_priority == 0),
      streams_(device, priorities_of(options)) {
  const c10::cuda::CUDAGuard guard(device);
  eager_end_.event = make_event();
  captured_end_.event = make_event();
}

CudaLanes::~CudaLanes() {
  const RelaxedCapture relaxed;
  (void)cudaEventDestroy(eager_end_.event);
  (void)cudaEventDestroy(captured_end_.event);
}

void CudaLanes::enter() {
  const auto caller = c10::cuda::getCurrentCUDAStream(device_).stream();
  const Capture capture = capture_of(caller);
  const End& end = capture ? captured_end_ : eager_end_;
  if (!end.is_recorded || end.capture != capture.id || end.stream == caller) return;
  check(cudaStreamWaitEvent(caller, end.event), "cudaStreamWaitEvent");
}

void CudaLanes::fork() { streams_.fork_at_first_use(c10::cuda::getCurrentCUDAStream(device_)); }

c10::cuda::CUDAStream CudaLanes::stream_of(int lane) {
  return lane == 0 && shares_caller_ ? streams_.origin() : streams_.stream(lane);
}

void CudaLanes::run(int lane, std::string_view name, std::function<void()> work) {
  at::RecordFunction span(at::RecordScope::USER_SCOPE);
  if (span.isActive()) span.before(concat("torch_overlap::", name));
  const c10::cuda::CUDAStreamGuard guard(stream_of(lane));
  work();
}

Lanes::Mark CudaLanes::mark(int lane) {
  return reinterpret_cast<Mark>(streams_.mark(stream_of(lane).stream()));
}

void CudaLanes::after(int lane, Mark mark) {
  check(cudaStreamWaitEvent(stream_of(lane).stream(), reinterpret_cast<cudaEvent_t>(mark)),
        "cudaStreamWaitEvent");
}

void CudaLanes::settle(int lane) {
  if (lane == 0 && shares_caller_) return;
  check(cudaStreamWaitEvent(streams_.origin().stream(), reinterpret_cast<cudaEvent_t>(mark(lane))),
        "cudaStreamWaitEvent");
}

void CudaLanes::wait(int lane, std::shared_ptr<WorkPtr> work) {
  run(lane, "wait", [&] {
    if (*work) (*work)->wait();
  });
}

void CudaLanes::join() { streams_.join(); }

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
    streams_.join();
  } catch (const std::exception&) {  // the capture is broken, or the device is
  }
}

}  // namespace torch_overlap::cuda
