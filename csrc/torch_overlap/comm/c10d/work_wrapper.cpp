#include "torch_overlap/comm/c10d/work_wrapper.h"

#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "torch_overlap/base/boundary.h"
#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

using Milliseconds = std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// The combined result of several operations that end in any order on any thread.
struct Countdown {
  explicit Countdown(size_t count) : left(count) {}
  std::atomic<size_t> left;
  std::mutex mutex;
  std::exception_ptr error;
};

// Calls `done` once, when all works are done, with the first error.
void when_all_done(const std::vector<WorkPtr>& works,
                   const std::function<void(std::exception_ptr)>& done) {
  if (works.empty()) return done(nullptr);
  auto countdown = std::make_shared<Countdown>(works.size());
  for (const auto& work : works) {
    work->on_completion([countdown, done](std::exception_ptr error) {
      if (error) {
        const std::lock_guard lock(countdown->mutex);
        if (!countdown->error) countdown->error = error;
      }
      if (countdown->left.fetch_sub(1) == 1) done(countdown->error);
    });
  }
}

// Names in profiles, which must live as long as the process. They are those of torch's backends.
const char* span_name(c10d::OpType type) {
  switch (type) {
    case c10d::OpType::BROADCAST:
      return "torch_overlap:broadcast";
    case c10d::OpType::ALLREDUCE:
    case c10d::OpType::ALLREDUCE_COALESCED:
      return "torch_overlap:all_reduce";
    case c10d::OpType::REDUCE:
      return "torch_overlap:reduce";
    case c10d::OpType::ALLGATHER:
    case c10d::OpType::ALLGATHER_COALESCED:
      return "torch_overlap:all_gather";
    case c10d::OpType::_ALLGATHER_BASE:
      return "torch_overlap:_all_gather_base";
    case c10d::OpType::GATHER:
      return "torch_overlap:gather";
    case c10d::OpType::SCATTER:
      return "torch_overlap:scatter";
    case c10d::OpType::REDUCE_SCATTER:
      return "torch_overlap:reduce_scatter";
    case c10d::OpType::_REDUCE_SCATTER_BASE:
      return "torch_overlap:_reduce_scatter_base";
    case c10d::OpType::ALLTOALL:
    case c10d::OpType::ALLTOALL_BASE:
      return "torch_overlap:all_to_all";
    case c10d::OpType::SEND:
      return "torch_overlap:send";
    case c10d::OpType::RECV:
    case c10d::OpType::RECVANYSOURCE:
      return "torch_overlap:recv";
    case c10d::OpType::BARRIER:
      return "torch_overlap:barrier";
    default:
      return "torch_overlap:coalesced";
  }
}

}  // namespace

Span begin_span(c10d::OpType type, at::ArrayRef<at::Tensor> inputs) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return nullptr;
  auto span = std::make_shared<at::RecordFunction>(std::move(*callbacks));
  if (!span->isActive()) return nullptr;
  span->_setAsync();  // as torch's backends mark theirs
  const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
  span->before(span_name(type), &values);
  return span;
}

WorkParts begin_work(c10d::OpType type, at::ArrayRef<at::Tensor> inputs,
                     std::vector<at::Tensor> outputs) {
  return {.type = type, .outputs = std::move(outputs), .span = begin_span(type, inputs)};
}

void end_span(WorkParts& parts) {
  // At issue, on this thread: a profiler that has stopped since has freed what end() writes to.
  if (const auto span = std::exchange(parts.span, nullptr)) span->end();
}

WorkWrapper::WorkWrapper(WorkParts parts)
    : c10d::Work(parts.rank, parts.type), parts_(std::move(parts)) {
  const auto stream = this->stream();
  if (parts_.copies.empty() || !stream) return;
  const c10::StreamGuard guard(*stream);
  copy_back(parts_.copies);
  // The tensors may have been allocated on another stream, and nothing waits before they are freed.
  for (const auto& [from, to] : parts_.copies) {
    from.record_stream(*stream);
    to.record_stream(*stream);
  }
  copies_event_.emplace(stream->device_type());
  copies_event_->record(*stream);
}

std::optional<c10::Stream> WorkWrapper::stream() const {
  return parts_.works.empty() ? std::nullopt : parts_.works.back()->stream();
}

void WorkWrapper::finish_outputs() {
  for (const auto& member : parts_.members) member->finish_outputs();
  if (parts_.copies.empty()) return;
  if (copies_event_) {
    const c10::impl::VirtualGuardImpl impl(copies_event_->device_type());
    copies_event_->block(impl.getStream(stream()->device()));
  } else {
    std::call_once(copied_, [this] { copy_back(parts_.copies); });
  }
}

bool WorkWrapper::isCompleted() {
  const bool done = std::all_of(parts_.works.begin(), parts_.works.end(),
                                [](const WorkPtr& work) { return work->is_completed(); }) &&
                    std::all_of(parts_.members.begin(), parts_.members.end(),
                                [](const auto& member) { return member->isCompleted(); });
  if (!done || parts_.copies.empty()) return done;
  if (copies_event_) return copies_event_->query();
  if (isSuccess()) finish_outputs();
  return true;
}

bool WorkWrapper::isSuccess() const {
  return std::all_of(parts_.works.begin(), parts_.works.end(),
                     [](const WorkPtr& work) { return work->status() == WorkStatus::COMPLETED; });
}

std::exception_ptr WorkWrapper::exception() const {
  for (const auto& work : parts_.works) {
    if (auto error = work->exception()) return error;
  }
  return nullptr;
}

int WorkWrapper::sourceRank() const {
  if (parts_.source >= 0) return parts_.source;
  const int source = parts_.works.empty() ? -1 : parts_.works.front()->source();
  return source >= 0 ? source : c10d::Work::sourceRank();
}

void WorkWrapper::synchronize() {
  for (const auto& work : parts_.works) work->wait();
  finish_outputs();
}

bool WorkWrapper::wait(Milliseconds timeout) {
  with_exception_translation([&] { finish(timeout); });
  return true;
}

void WorkWrapper::finish(Milliseconds timeout) {
  if (timeout > kNoTimeout) {
    const auto deadline = Clock::now() + timeout;
    for (const auto& work : parts_.works) {
      const auto left = std::chrono::duration_cast<Milliseconds>(deadline - Clock::now());
      work->wait_blocking(std::max(left, Milliseconds(1)));
    }
  } else if (parts_.blocks_host) {
    for (const auto& work : parts_.works) work->wait_blocking();
  }
  synchronize();
}

void WorkWrapper::blockCurrentStream() {
  if (stream()) {
    synchronize();
  } else {
    c10d::Work::blockCurrentStream();
  }
}

c10::intrusive_ptr<WorkWrapper::Future> WorkWrapper::stream_future(const c10::Stream& stream) {
  auto future = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                            std::vector<c10::Device>{stream.device()});
  // The future records its event on the current stream.
  const c10::StreamGuard guard(stream);
  // The works of the other members may have run on other streams.
  if (!parts_.members.empty()) synchronize();
  future->markCompleted(c10::IValue(parts_.outputs));
  return future;
}

c10::intrusive_ptr<WorkWrapper::Future> WorkWrapper::getFuture() {
  std::unique_lock lock(mutex_);
  if (future_) return future_;
  if (const auto stream = this->stream()) return future_ = stream_future(*stream);
  auto future = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
  future_ = future;
  // A completed work calls back immediately, in this call.
  lock.unlock();
  auto self = c10::intrusive_ptr<WorkWrapper>::reclaim_copy(this);
  when_all_done(parts_.works, [self, future](std::exception_ptr error) {
    if (error) return future->setError(error);
    self->finish_outputs();
    future->markCompleted(c10::IValue(self->parts_.outputs));
  });
  return future;
}

c10::intrusive_ptr<WorkWrapper::Future> WorkWrapper::getFutureResult() {
  TORCH_OVERLAP_CHECK(!stream(), kUnsupported,
                      "get_future_result: expected an operation on CPU, got one on ",
                      stream()->device().str(), "; use get_future() or wait(timeout)");
  std::unique_lock lock(mutex_);
  if (future_result_) return future_result_;
  auto future = c10::make_intrusive<Future>(c10::IntType::get());
  future_result_ = future;
  lock.unlock();
  auto self = c10::intrusive_ptr<WorkWrapper>::reclaim_copy(this);
  when_all_done(parts_.works, [self, future](std::exception_ptr error) {
    auto result = c10d::WorkResult::SUCCESS;
    for (const auto& work : self->parts_.works) {
      const auto status = work->status();
      if (status == WorkStatus::TIMEDOUT) result = c10d::WorkResult::TIMEOUT;
      if (status == WorkStatus::ERROR) result = c10d::WorkResult::COMM_ERROR;
      if (result != c10d::WorkResult::SUCCESS) break;
    }
    if (error && result == c10d::WorkResult::SUCCESS) result = c10d::WorkResult::UNKNOWN;
    future->markCompleted(c10::IValue(static_cast<int64_t>(result)));
  });
  return future;
}

}  // namespace torch_overlap
