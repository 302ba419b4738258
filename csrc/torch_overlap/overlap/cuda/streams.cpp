#include "torch_overlap/overlap/cuda/streams.h"

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

std::vector<OwnedStream::Priority> priorities_of(const StreamOptions& options) {
  const bool by_default = options.compute_priority == 0 && options.comm_priority == 0;
  std::vector<OwnedStream::Priority> priorities(options.num_compute_streams,
                                                {options.compute_priority});
  priorities.push_back({by_default ? std::numeric_limits<int>::min() : options.comm_priority});
  return priorities;
}

}  // namespace

// Retained resources, which live until the device no longer uses them.
class CudaStreams::StreamResources final : public PendingDelete {
 public:
  StreamResources(c10::DeviceIndex device, std::vector<std::shared_ptr<void>> kept,
                  cudaEvent_t until)
      : PendingDelete(device), retained_(std::move(kept)), until_(until) {}
  ~StreamResources() override { (void)cudaEventDestroy(until_); }
  bool can_delete() noexcept override { return cudaEventQuery(until_) != cudaErrorNotReady; }

 private:
  const std::vector<std::shared_ptr<void>> retained_;
  const cudaEvent_t until_;
};

CudaStreams::CudaStreams(c10::DeviceIndex device, const StreamOptions& options)
    : OverlapStreams(options.num_compute_streams),
      device_(device),
      shares_caller_(options.compute_priority == 0),
      streams_(device, priorities_of(options)) {
  start_deferred_deleter();
  const c10::cuda::CUDAGuard guard(device);
  last_op_ = std::make_unique<LastOpEvent>();
}

CudaStreams::~CudaStreams() {
  defer(new StreamResources(device_, std::move(retained_), last_op_->eager()));
}

void CudaStreams::wait_for_previous() {
  last_op_->make_stream_wait(c10::cuda::getCurrentCUDAStream(device_).stream());
}

void CudaStreams::fork(bool single_stream) {
  streams_.fork_lazily(c10::cuda::getCurrentCUDAStream(device_));
  single_stream_ = single_stream && !streams_.is_captured();
}

c10::cuda::CUDAStream CudaStreams::cuda_stream(int stream) {
  if (single_stream_) return streams_.unforked_origin();
  return is_callers(stream) ? streams_.origin() : streams_.stream(stream);
}

void CudaStreams::run(int stream, std::string_view name, std::function<void()> work) {
  at::RecordFunction span(at::RecordScope::USER_SCOPE);
  if (span.isActive()) span.before(concat("torch_overlap::", name));
  const c10::cuda::CUDAStreamGuard guard(cuda_stream(stream));
  work();
}

OverlapStreams::Mark CudaStreams::mark(int stream) {
  if (single_stream_) return Mark{};
  return reinterpret_cast<Mark>(streams_.mark(cuda_stream(stream).stream()));
}

void CudaStreams::after(int stream, Mark mark) {
  if (single_stream_) return;
  const auto event = reinterpret_cast<cudaEvent_t>(mark);
  if (!is_callers(stream)) return streams_.wait_event(stream, event);
  check(cudaStreamWaitEvent(cuda_stream(stream).stream(), event), "cudaStreamWaitEvent");
}

void CudaStreams::join_stream(int stream) {
  if (is_callers(stream)) return;
  check(
      cudaStreamWaitEvent(streams_.origin().stream(), reinterpret_cast<cudaEvent_t>(mark(stream))),
      "cudaStreamWaitEvent");
}

void CudaStreams::wait(int stream, std::shared_ptr<WorkPtr> work) {
  run(stream, "wait", [&] {
    if (*work) (*work)->wait();
  });
}

void CudaStreams::join() { streams_.join(); }

void CudaStreams::record_last() {
  last_op_->record(c10::cuda::getCurrentCUDAStream(device_).stream());
}

void CudaStreams::drain(std::chrono::milliseconds timeout) noexcept {
  const RelaxedCapture relaxed;
  const auto until = std::chrono::steady_clock::now() + timeout;
  while (cudaEventQuery(last_op_->eager()) == cudaErrorNotReady &&
         std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  (void)cudaGetLastError();
}

void CudaStreams::cancel() noexcept {
  // A stream that is part of a capture must be joined, otherwise the capture cannot end.
  try {
    streams_.join();
  } catch (const std::exception&) {  // The capture or the device is broken.
  }
}

}  // namespace torch_overlap::cuda
