#include "torch_overlap/comm/backends/nccl/work.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <thread>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/comm/call_record.h"
#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/cuda/stream.h"

namespace torch_overlap {
namespace {

// A wait spins while short operations end; for long ones it sleeps between polls.
constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr auto kPollInterval = std::chrono::microseconds(50);

}  // namespace

CudaWork::CudaWork(std::shared_ptr<CommRuntime> runtime, Call call, c10::cuda::CUDAStream issued_on,
                   unsigned long long capture)
    : issued(Clock::now()),
      runtime_(std::move(runtime)),
      call_(std::move(call)),
      issued_on_(issued_on),
      stream_(issued_on),
      capture_(capture),
      events_(runtime_->events.acquire()) {
  call_.comm = runtime_->name;  // the caller's string may be destroyed before this work
  if (capture_ != 0 && call_.record) call_.record->captured();
}

CudaWork::~CudaWork() { runtime_->events.release(events_); }

void CudaWork::release(std::optional<c10::cuda::CUDAStream> stream) {
  if (released_.exchange(true, std::memory_order_acq_rel)) return;
  // Moved out first: describe() stays valid, and the destructors run when this object is up to
  // date.
  Call dropped;
  dropped.tensor = std::move(call_.tensor);
  dropped.in = std::move(call_.in);
  dropped.out = std::move(call_.out);
  dropped.p2p = std::move(call_.p2p);
  dropped.norm = std::move(call_.norm);
  dropped.reduce_op = std::exchange(call_.reduce_op, ReduceOp());
  if (!stream) return;
  dropped.for_each_tensor([&stream](const at::Tensor& tensor) {
    if (!tensor.is_cuda() || !tensor.has_storage()) return;
    c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), *stream);
  });
}

void CudaWork::release_all() {
  release();
  if (window_released_.exchange(true, std::memory_order_acq_rel)) return;
  const auto window = std::move(call_.window);
}

void CudaWork::set_started(Clock::time_point now) {
  started = now;
  if (call_.record) call_.record->started();
}

bool CudaWork::has_ended() {
  if (completed_.load(std::memory_order_acquire)) return true;
  if (is_captured()) return false;
  const c10::cuda::CUDAGuard device(runtime_->device);
  const cuda::RelaxedCapture relaxed;
  const cudaError_t status = cudaEventQuery(events_.end);
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  if (status == cudaSuccess) {
    on_ended();
    return true;
  }
  try {
    cuda::check(status, call_.describe());
  } catch (const Error&) {
    runtime_->failure.set(WorkStatus::ERROR, std::current_exception());
  }
  return true;
}

void CudaWork::on_ended() {
  runtime_->check_waits();
  // After a failure an operation ends because it was aborted, which is not completion.
  if (runtime_->failure.is_set()) return;
  if (call_.record) call_.record->ended(nullptr);
  completed_.store(true, std::memory_order_release);
}

bool CudaWork::is_completed() {
  if (is_captured()) return false;
  return runtime_->failure.is_set() || has_ended();
}

WorkStatus CudaWork::status() {
  if (is_captured()) return WorkStatus::NOT_STARTED;
  if (completed_.load(std::memory_order_acquire)) return WorkStatus::COMPLETED;
  if (!runtime_->failure.is_set() && !has_ended()) return WorkStatus::INPROGRESS;
  if (completed_.load(std::memory_order_acquire)) return WorkStatus::COMPLETED;
  return runtime_->failure.status();
}

std::exception_ptr CudaWork::exception() {
  const WorkStatus now = status();
  const bool failed = now == WorkStatus::TIMEDOUT || now == WorkStatus::ERROR;
  return failed ? runtime_->failure.error() : nullptr;
}

void CudaWork::wait() {
  const auto current = c10::cuda::getCurrentCUDAStream(runtime_->device);
  if (is_captured()) return wait_in_capture(current);
  if (!completed_.load(std::memory_order_acquire)) {
    runtime_->failure.rethrow_if_set();
    if (current != stream_) {
      if (cuda::capture_of(current.stream())) {
        // Waiting for an event from outside would break the capture: wait() is legal only if the
        // operation has ended.
        TORCH_OVERLAP_CHECK(has_ended(), kState, call_.describe(),
                            ": expected wait() before the capture began, got it inside; an "
                            "operation that was issued outside a graph cannot be joined by one");
      } else {
        const c10::cuda::CUDAGuard device(runtime_->device);
        cuda::stream_waits(current, events_.end);
      }
    }
  }
  if (completed_.load(std::memory_order_acquire)) return release();
  if (current == issued_on_) release(current);
}

void CudaWork::wait_in_capture(c10::cuda::CUDAStream current) {
  if (current == stream_) return;
  // The stream stays in the capture until the capture ends.
  if (cuda::capture_of(stream_.stream()).id != capture_) return;
  const cuda::Capture here = cuda::capture_of(current.stream());
  TORCH_OVERLAP_CHECK(!here || here.id == capture_, kState, call_.describe(),
                      ": expected wait() in the capture that has the operation, got it in another "
                      "capture");
  const c10::cuda::CUDAGuard device(runtime_->device);
  cuda::stream_waits(current, events_.end);
  if (current == issued_on_) release(current);
}

void CudaWork::wait_blocking(std::optional<std::chrono::milliseconds> timeout) {
  TORCH_OVERLAP_CHECK(!is_captured(), kState, call_.describe(),
                      ": expected an operation that runs now for wait_blocking(), got one that was "
                      "captured; synchronize the stream that replays the graph");
  const auto begin = Clock::now();
  while (!is_completed()) {
    const auto waited = Clock::now() - begin;
    if (timeout && waited >= clamp_timeout(*timeout)) {
      fail(ErrorKind::kTimeout, call_.describe(), ": expected the end within ", timeout->count(),
           " ms of wait_blocking(), got none; it goes on and can be waited for again");
    }
    if (waited < kSpinTime) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPollInterval);
    }
  }
  if (!completed_.load(std::memory_order_acquire)) runtime_->failure.rethrow_if_set();
  release();
}

void CudaWork::on_completion(std::function<void(std::exception_ptr)> callback) {
  fail(ErrorKind::kUnsupported, call_.describe(),
       ": expected a host operation for on_completion(), got one on a CUDA stream; use stream() or "
       "wait_blocking()");
}

}  // namespace torch_overlap
