#include "torch_overlap/overlap/cuda/lanes.h"

#include <ATen/record_function.h>
#include <c10/cuda/CUDAGuard.h>

#include <limits>
#include <thread>
#include <utility>

#include "torch_overlap/base/strings.h"
#include "torch_overlap/comm/backends/nccl/deferred_deleter.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {
namespace {

std::vector<OwnedStream::Priority> priorities_of(const LaneOptions& options) {
  const bool by_default = options.compute_priority == 0 && options.comm_priority == 0;
  std::vector<OwnedStream::Priority> priorities(options.num_compute_lanes,
                                                {options.compute_priority});
  priorities.push_back({by_default ? std::numeric_limits<int>::min() : options.comm_priority});
  return priorities;
}

}  // namespace

// Retained resources, which live until the device no longer uses them.
class CudaLanes::LaneResources final : public PendingDelete {
 public:
  LaneResources(c10::DeviceIndex device, std::vector<std::shared_ptr<void>> kept, cudaEvent_t until)
      : PendingDelete(device), retained_(std::move(kept)), until_(until) {}
  ~LaneResources() override { (void)cudaEventDestroy(until_); }
  bool can_delete() noexcept override { return cudaEventQuery(until_) != cudaErrorNotReady; }

 private:
  const std::vector<std::shared_ptr<void>> retained_;
  const cudaEvent_t until_;
};

CudaLanes::CudaLanes(c10::DeviceIndex device, const LaneOptions& options)
    : Lanes(options.num_compute_lanes),
      device_(device),
      shares_caller_(options.compute_priority == 0),
      streams_(device, priorities_of(options)) {
  start_deferred_deleter();
  const c10::cuda::CUDAGuard guard(device);
  last_op_ = std::make_unique<LastOpEvent>();
}

CudaLanes::~CudaLanes() {
  defer(new LaneResources(device_, std::move(retained_), last_op_->eager()));
}

void CudaLanes::enter() {
  last_op_->make_stream_wait(c10::cuda::getCurrentCUDAStream(device_).stream());
}

void CudaLanes::fork(bool single_lane) {
  streams_.fork_lazily(c10::cuda::getCurrentCUDAStream(device_));
  single_lane_ = single_lane && !streams_.is_captured();
}

c10::cuda::CUDAStream CudaLanes::stream_of(int lane) {
  if (single_lane_) return streams_.unforked_origin();
  return is_callers(lane) ? streams_.origin() : streams_.stream(lane);
}

void CudaLanes::run(int lane, std::string_view name, std::function<void()> work) {
  at::RecordFunction span(at::RecordScope::USER_SCOPE);
  if (span.isActive()) span.before(concat("torch_overlap::", name));
  const c10::cuda::CUDAStreamGuard guard(stream_of(lane));
  work();
}

Lanes::Mark CudaLanes::mark(int lane) {
  if (single_lane_) return Mark{};
  return reinterpret_cast<Mark>(streams_.mark(stream_of(lane).stream()));
}

void CudaLanes::after(int lane, Mark mark) {
  if (single_lane_) return;
  const auto event = reinterpret_cast<cudaEvent_t>(mark);
  if (!is_callers(lane)) return streams_.wait_event(lane, event);
  check(cudaStreamWaitEvent(stream_of(lane).stream(), event), "cudaStreamWaitEvent");
}

void CudaLanes::join_lane(int lane) {
  if (is_callers(lane)) return;
  check(cudaStreamWaitEvent(streams_.origin().stream(), reinterpret_cast<cudaEvent_t>(mark(lane))),
        "cudaStreamWaitEvent");
}

void CudaLanes::wait(int lane, std::shared_ptr<WorkPtr> work) {
  run(lane, "wait", [&] {
    if (*work) (*work)->wait();
  });
}

void CudaLanes::join() { streams_.join(); }

void CudaLanes::leave() { last_op_->record(c10::cuda::getCurrentCUDAStream(device_).stream()); }

void CudaLanes::drain(std::chrono::milliseconds timeout) noexcept {
  const RelaxedCapture relaxed;
  const auto until = std::chrono::steady_clock::now() + timeout;
  while (cudaEventQuery(last_op_->eager()) == cudaErrorNotReady &&
         std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  (void)cudaGetLastError();
}

void CudaLanes::cancel() noexcept {
  // A lane that is part of a capture must be joined, otherwise the capture cannot end.
  try {
    streams_.join();
  } catch (const std::exception&) {  // The capture or the device is broken.
  }
}

}  // namespace torch_overlap::cuda
