#include "torch_overlap/overlap/cuda/lanes.h"

#include <ATen/record_function.h>
#include <c10/cuda/CUDAGuard.h>

#include <limits>
#include <thread>
#include <utility>

#include "torch_overlap/base/strings.h"
#include "torch_overlap/comm/backends/nccl/graveyard.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {
namespace {

std::vector<OwnedStream::Priority> priorities_of(const LaneOptions& options) {
  const bool by_default = options.compute_priority == 0 && options.comm_priority == 0;
  std::vector<OwnedStream::Priority> priorities(options.computes, {options.compute_priority});
  priorities.push_back({by_default ? std::numeric_limits<int>::min() : options.comm_priority});
  return priorities;
}

}  // namespace

// What was kept, for as long as the device may use it.
class CudaLanes::Hold final : public Body {
 public:
  Hold(c10::DeviceIndex device, std::vector<std::shared_ptr<void>> kept, cudaEvent_t until)
      : Body(device), kept_(std::move(kept)), until_(until) {}
  ~Hold() override { (void)cudaEventDestroy(until_); }
  bool may_go() noexcept override { return cudaEventQuery(until_) != cudaErrorNotReady; }

 private:
  const std::vector<std::shared_ptr<void>> kept_;
  const cudaEvent_t until_;
};

CudaLanes::CudaLanes(c10::DeviceIndex device, const LaneOptions& options)
    : Lanes(options.computes),
      device_(device),
      shares_caller_(options.compute_priority == 0),
      streams_(device, priorities_of(options)) {
  open_graveyard();
  const c10::cuda::CUDAGuard guard(device);
  ends_ = std::make_unique<Ends>();
}

CudaLanes::~CudaLanes() { bury(new Hold(device_, std::move(kept_), ends_->eager())); }

void CudaLanes::enter() { ends_->put_behind(c10::cuda::getCurrentCUDAStream(device_).stream()); }

void CudaLanes::fork(bool as_one) {
  streams_.fork_at_first_use(c10::cuda::getCurrentCUDAStream(device_));
  as_one_ = as_one && !streams_.are_captured();
}

c10::cuda::CUDAStream CudaLanes::stream_of(int lane) {
  if (as_one_) return streams_.unforked_origin();
  return is_callers(lane) ? streams_.origin() : streams_.stream(lane);
}

void CudaLanes::run(int lane, std::string_view name, std::function<void()> work) {
  at::RecordFunction span(at::RecordScope::USER_SCOPE);
  if (span.isActive()) span.before(concat("torch_overlap::", name));
  const c10::cuda::CUDAStreamGuard guard(stream_of(lane));
  work();
}

Lanes::Mark CudaLanes::mark(int lane) {
  if (as_one_) return Mark{};
  return reinterpret_cast<Mark>(streams_.mark(stream_of(lane).stream()));
}

void CudaLanes::after(int lane, Mark mark) {
  if (as_one_) return;
  const auto event = reinterpret_cast<cudaEvent_t>(mark);
  if (!is_callers(lane)) return streams_.follow(lane, event);
  check(cudaStreamWaitEvent(stream_of(lane).stream(), event), "cudaStreamWaitEvent");
}

void CudaLanes::settle(int lane) {
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

void CudaLanes::leave() { ends_->record(c10::cuda::getCurrentCUDAStream(device_).stream()); }

void CudaLanes::drain(std::chrono::milliseconds timeout) noexcept {
  const RelaxedCapture relaxed;
  const auto until = std::chrono::steady_clock::now() + timeout;
  while (cudaEventQuery(ends_->eager()) == cudaErrorNotReady &&
         std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  (void)cudaGetLastError();
}

void CudaLanes::cancel() noexcept {
  // A lane that a capture took in must be joined, or the capture cannot end.
  try {
    streams_.join();
  } catch (const std::exception&) {  // the capture is broken, or the device is
  }
}

}  // namespace torch_overlap::cuda
