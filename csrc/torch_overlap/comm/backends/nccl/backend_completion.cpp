// Detection of operations that have ended, or that are late.
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <thread>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/backends/nccl/backend.h"
#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/comm/mismatch.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap {
namespace {

// An event query costs as much as recording an event: issue() queries once for this many
// operations.
constexpr size_t kReapAtIssue = 32;

}  // namespace

// The device runs the operations of a queue in the order of issue: if one has ended, so have all
// before it.
template <typename Sink>
bool NcclBackend::reap_first(Queue& queue, Sink& ended, size_t count) {
  if (!queue[count - 1]->has_ended()) return false;
  for (; count > 0; --count) {
    queue.front()->on_ended();
    ended.push_back(queue.front());
    queue.pop_front();
  }
  return true;
}

template <typename Sink>
void NcclBackend::reap(Sink& ended) {
  for (const OpQueue which : {OpQueue::collectives, OpQueue::one_sided}) {
    Queue& queue = queue_state(which).queue;
    for (size_t count = queue.size(); count > 0; count = std::min(count / 2, queue.size())) {
      while (count <= queue.size() && reap_first(queue, ended, count)) {
      }
    }
  }
  reap_waits(ended);
}

// Waits end in any order.
template <typename Sink>
void NcclBackend::reap_waits(Sink& ended) {
  std::erase_if(queue_state(OpQueue::waits).queue, [&ended](const std::shared_ptr<CudaWork>& work) {
    if (!work->has_ended()) return false;
    ended.push_back(work);
    return true;
  });
}

void NcclBackend::reap_some(EndedBatch& ended) {
  for (const OpQueue which : {OpQueue::collectives, OpQueue::one_sided}) {
    Queue& queue = queue_state(which).queue;
    if (queue.size() >= 2 * kReapAtIssue) reap_first(queue, ended, kReapAtIssue);
  }
  if (queue_state(OpQueue::waits).queue.size() >= 2 * kReapAtIssue) reap_waits(ended);
}

bool NcclBackend::is_idle() const {
  return std::all_of(queues_.begin(), queues_.end(),
                     [](const QueueState& state) { return state.queue.empty(); });
}

void NcclBackend::drain(std::string_view op) {
  const auto deadline = Clock::now() + clamp_timeout(context_.timeout());
  auto poll_interval = std::chrono::microseconds(20);
  while (true) {
    act_on_failure();
    {
      EndedBatch ended;
      const Lock lock = lock_unless_failed();
      reap(ended);
      if (is_idle()) break;
    }
    if (Clock::now() >= deadline) {
      fail_with(WorkStatus::TIMEDOUT, ErrorKind::kTimeout,
                concat(op, " on '", runtime_->name, "': expected all operations to end within ",
                       context_.timeout().count(), " ms, got some that did not"));
    }
    std::this_thread::sleep_for(poll_interval);
    poll_interval = std::min(poll_interval * 2, std::chrono::microseconds(1000));
  }
  runtime_->failure.rethrow_if_set();
}

void NcclBackend::remove_window(const SymmetricMemory& memory, Milliseconds timeout) {
  const auto deadline = Clock::now() + clamp_timeout(timeout);
  const auto uses_it = [&](const std::shared_ptr<CudaWork>& work) {
    return work->call().window.get() == &memory;
  };
  while (true) {
    act_on_failure();
    {
      EndedBatch ended;
      const Lock lock = lock_unless_failed();
      custom_collectives_.remove_window(memory);
      reap(ended);
      const Queue& queue = queue_state(OpQueue::collectives).queue;
      if (std::none_of(queue.begin(), queue.end(), uses_it)) return;
    }
    TORCH_OVERLAP_CHECK(Clock::now() < deadline, kTimeout, "tensor_deregister on '", runtime_->name,
                        "': expected the collectives on '", memory.name(), "' to end within ",
                        timeout.count(), " ms, got some that did not");
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// --- Watchdog ------------------------------------------------------------------------------------

void NcclBackend::tick() noexcept {
  if (finalized_) return;
  const auto now = Clock::now();
  try {
    // The device is set first: a CUDA query with device 0 current would create a context there. The
    // capture mode is relaxed, because this thread must never break another one's capture.
    const c10::cuda::CUDAGuard device(runtime_->device);
    const cuda::RelaxedCapture relaxed;
    runtime_->check_waits();
    act_on_failure(/*is_watchdog=*/true);
    EndedWorks ended(runtime_->device);
    Lock lock(handle_->mutex(), std::try_to_lock);
    if (!lock) {
      check_launching(now);
      return act_on_failure(/*is_watchdog=*/true);
    }
    reap(ended);
    if (runtime_->failure.is_set()) {
      lock.unlock();
      return act_on_failure(/*is_watchdog=*/true);
    }
    ncclResult_t state = ncclSuccess;
    const auto& api = handle_->api();
    if (handle_->comm() != nullptr) (void)api.comm_async_error(handle_->comm(), &state);
    if (state != ncclSuccess && state != ncclInProgress) {
      const char* last = api.last_error(nullptr);
      const std::string message =
          concat("communicator '", runtime_->name,
                 "': expected NCCL to work in the background, "
                 "got ",
                 api.error_string(state), "; NCCL says: ", last != nullptr ? last : "");
      lock.unlock();
      fail_with(WorkStatus::ERROR, ErrorKind::kRuntime, message);
      return act_on_failure(/*is_watchdog=*/true);
    }
    auto late = check_replays(now);
    std::optional<std::string> peer_error;
    if (const Queue& queue = queue_state(OpQueue::collectives).queue; !late && !queue.empty()) {
      late = check_head(*queue.front(), now);
      if (!late) peer_error = check_peers(*queue.front(), now);
    }
    // Copies always end; NCCL's transfers over a network may not.
    if (const Queue& queue = queue_state(OpQueue::one_sided).queue;
        !late && !queue.empty() && queue.front()->call().window->remote() != nullptr) {
      late = check_head(*queue.front(), now);
    }
    lock.unlock();
    if (late) fail_with(WorkStatus::TIMEDOUT, ErrorKind::kTimeout, *late);
    if (peer_error) fail_with(WorkStatus::ERROR, ErrorKind::kRuntime, *peer_error);
    act_on_failure(/*is_watchdog=*/true);
  } catch (const std::exception& error) {
    fail_with(WorkStatus::ERROR, ErrorKind::kRuntime,
              concat("communicator '", runtime_->name, "': watchdog: ", error.what()));
    act_on_failure(/*is_watchdog=*/true);
  }
}

void NcclBackend::check_launching(Clock::time_point now) {
  const auto since = launching_since_.load(std::memory_order_acquire);
  if (since == 0) return;
  const auto stuck = now - Clock::time_point(Clock::duration(since));
  const Milliseconds timeout(launching_timeout_ms_.load(std::memory_order_relaxed));
  if (stuck < clamp_timeout(timeout)) return;
  fail_with(
      WorkStatus::TIMEDOUT, ErrorKind::kTimeout,
      concat("communicator '", runtime_->name, "': expected a call into NCCL to return within ",
             timeout.count(), " ms, got none for ", seconds_string(stuck),
             "; a peer does not answer: look at the other ranks"));
}

std::string NcclBackend::describe_missing_peer() const {
  const std::string missing = runtime_->late_wait();
  return missing.empty() ? "a peer did not take part: look at the other ranks" : missing;
}

// The timeout of an operation starts when the preceding ones have ended and its stream has reached
// it: an operation that is queued for long is not late.
std::optional<std::string> NcclBackend::check_head(CudaWork& head, Clock::time_point now) {
  // With graphs alive it starts at once: an operation after a replay that hangs would never start.
  if (!head.started && handle_->has_graphs()) head.set_started(now);
  if (!head.started) {
    const cudaError_t status = cudaEventQuery(head.ready());
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return std::nullopt;
    }
    cuda::check(status, [&] { return head.call().describe(); });
    head.set_started(now);
    return std::nullopt;
  }
  const auto running = now - *head.started;
  if (running < clamp_timeout(head.call().timeout) || head.has_ended()) return std::nullopt;
  return concat(head.call().describe(), ": expected it to end within ", head.call().timeout.count(),
                " ms of its start, got no end (queued ", seconds_string(now - head.issued),
                " ago, running for ", seconds_string(running), "); ", describe_missing_peer(),
                mismatch_hint(head.call()));
}

std::optional<std::string> NcclBackend::check_peers(CudaWork& head, Clock::time_point now) {
  if (!head.started) return std::nullopt;
  const auto peer_error = peers_.peer_error(*head.started, now);
  if (!peer_error || head.has_ended()) return std::nullopt;
  return concat(head.call().describe(),
                ": expected a communicator of which all ranks are well, got one that another has "
                "ended: ",
                *peer_error);
}

std::optional<std::string> NcclBackend::check_replays(Clock::time_point now) {
  std::erase_if(monitors_, [](const auto& weak) { return weak.expired(); });
  for (const auto& weak : monitors_) {
    const auto monitor = weak.lock();
    if (!monitor) continue;
    if (auto late = monitor->check(now)) {
      const std::string missing = runtime_->late_wait();
      if (!missing.empty()) *late += "; " + missing;
      return late;
    }
  }
  return std::nullopt;
}

// --- Deferred deletion ---------------------------------------------------------------------------

// Needs no lock: no other reference exists any more.
bool NcclBackend::can_delete() noexcept {
  try {
    EndedBatch ended;
    reap(ended);
    return is_idle();
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace torch_overlap
