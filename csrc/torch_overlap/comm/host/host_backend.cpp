#include "torch_overlap/comm/host/host_backend.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/interrupt.h"
#include "torch_overlap/comm/below_dispatch_guard.h"
#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/comm/call_record.h"
#include "torch_overlap/comm/host/host_primitives.h"
#include "torch_overlap/comm/host/host_window.h"
#include "torch_overlap/comm/mismatch.h"
#include "torch_overlap/comm/process_abort.h"
#include "torch_overlap/comm/recorder_dump.h"
#include "torch_overlap/common/capture.h"
#include "torch_overlap/symm/bootstrap.h"

namespace torch_overlap {
namespace {

// Time that a rank which lost the connection to a peer waits for that peer's report.
constexpr Milliseconds kPeerReportTimeout{300};

constexpr int kCollectives = 0;  // queue index; queues of sends, receives, puts and signals follow

bool is_timeout(const std::exception_ptr& error) {
  return Fault::of(error).kind == ErrorKind::kTimeout;
}

// A timeout whose message shows the operations in which this rank and the missing peer wait.
class ComparedTimeout final : public Error {
  using Error::Error;
};

// Returns the error with the operation in its message. A timeout also gets the operation's age and,
// unless it was compared with the peers, a hint at mismatched calls.
std::exception_ptr with_op_context(const HostWork& work, const std::exception_ptr& error) {
  const auto text = [&work](const char* what) {
    return concat(work.call().describe(), ": ", what);
  };
  try {
    std::rethrow_exception(error);
  } catch (const Error& thrown) {
    if (thrown.kind() == ErrorKind::kTimeout) {
      const bool is_compared = dynamic_cast<const ComparedTimeout*>(&thrown) != nullptr;
      return std::make_exception_ptr(
          Error(ErrorKind::kTimeout, concat(text(thrown.what()), " (", work.describe_age(), ")",
                                            is_compared ? "" : mismatch_hint(work.call()))));
    }
    return std::make_exception_ptr(Error(thrown.kind(), text(thrown.what())));
  } catch (const c10::Error& thrown) {
    return std::make_exception_ptr(
        Error(ErrorKind::kRuntime, text(thrown.what_without_backtrace())));
  } catch (const std::exception& thrown) {
    return std::make_exception_ptr(Error(ErrorKind::kRuntime, text(thrown.what())));
  } catch (...) {
    return error;
  }
}

// One queue for collectives; per peer, one for sends, one for receives, one for puts and signals.
int num_fixed_queues(int size) { return 1 + 3 * size; }

std::string timeout_message(const Call& call) {
  return concat("did not end in ", call.timeout.count(), " ms");
}

}  // namespace

HostBackend::HostBackend(const BackendContext& context, std::unique_ptr<HostTransport> transport,
                         BackendFactory make_child)
    : context_(context),
      transport_(std::move(transport)),
      make_child_(std::move(make_child)),
      queues_(num_fixed_queues(context.size)) {}

HostBackend::~HostBackend() {
  transport_->stop(concat("communicator '", context_.name, "' was destroyed"), true);
}

HostBackend::QueueKey HostBackend::queue_of(const P2POp& op) const {
  // Sends to this rank are copies to the receives of the same batch: one queue for both.
  const bool is_recv = op.type == P2POp::Type::RECV && op.peer != context_.rank;
  if (op.peer != kAnySource && op.tag == 0) return 1 + op.peer + (is_recv ? context_.size : 0);
  // The keys after the fixed queues: one per tag, direction and peer; the last peer is "any".
  const QueueKey peer = op.peer == kAnySource ? context_.size : op.peer;
  return num_fixed_queues(context_.size) +
         (QueueKey{op.tag} * 2 + (is_recv ? 1 : 0)) * (context_.size + 1) + peer;
}

HostBackend::QueueList HostBackend::queues_of(const Call& call) const {
  if (call.window != nullptr) return {1 + 2 * context_.size + call.peer};
  if (call.primitive != Primitive::p2p) return {kCollectives};
  QueueList queues;
  for (const P2POp& op : call.p2p) queues.push_back(queue_of(op));
  std::sort(queues.begin(), queues.end());
  queues.erase(std::unique(queues.begin(), queues.end()), queues.end());
  return queues;
}

WorkPtr HostBackend::issue(Call call) {
  require_usable(to_string(call.name));
  check_not_capturing(to_string(call.name),
                      context_.device);  // staging tensors of a device synchronizes a stream
  call.comm = context_.name;             // the work may outlive the caller's copy of the name
  if (call.primitive == Primitive::wait_signal) return issue_wait(std::move(call));
  const auto self = std::static_pointer_cast<HostBackend>(shared_from_this());
  const bool async_op = call.async_op;
  const auto queues = queues_of(call);
  // The thread that runs the operation cannot poll for signals. A single rank waits for no peer.
  const bool may_run = !async_op && (context_.size == 1 || !is_interruptible());
  const bool here = may_run && queues_.try_acquire(queues);
  const int parts = here ? 1 : static_cast<int>(queues.size());
  std::shared_ptr<HostWork> work;
  try {
    auto staging = Staging::to_host(call, context_.rank, context_.device);
    work = std::make_shared<HostWork>(std::move(call), std::move(staging), issued_.fetch_add(1),
                                      parts, self);
    if (!here) {
      std::vector<TaskQueues::Part> tasks;
      for (const QueueKey queue : queues) {
        const QueueKey part = work->call().primitive == Primitive::p2p ? queue : kAllQueues;
        tasks.emplace_back(queue, [self, work, part] { self->run(*work, part); });
      }
      queues_.push(std::move(tasks));
    }
  } catch (...) {
    if (here) queues_.release(queues);
    throw;
  }
  if (here) {
    run(*work, kAllQueues);
    queues_.release(queues);
  }
  if (!async_op) work->wait();
  return work;
}

// A wait for a signal may outlast all other operations, and the signal may depend on operations
// that are issued later. The wait has a queue to itself, so nothing is queued after it.
WorkPtr HostBackend::issue_wait(Call call) {
  const auto self = std::static_pointer_cast<HostBackend>(shared_from_this());
  const bool async_op = call.async_op;
  call.ticket = take_ticket(*call.window, call.peer);  // taken now: waits end in that order
  const auto work = std::make_shared<HostWork>(std::move(call), nullptr, issued_.fetch_add(1),
                                               /*parts=*/1, self);
  if (async_op || is_interruptible()) {
    queues_.push_alone([self, work] { self->run(*work, kAllQueues); });
  } else {
    run(*work, kAllQueues);
  }
  if (!async_op) work->wait();
  return work;
}

void HostBackend::run(HostWork& work, QueueKey queue) {
  std::exception_ptr error;
  bool has_started = false;
  try {
    run_part(work, queue, has_started);
  } catch (...) {
    error = with_op_context(work, std::current_exception());
    // Peers may be in the middle of the operation, or wait for it. The communicator remains usable
    // only if nothing was posted and there was no timeout.
    if (has_started || is_timeout(error)) set_broken(error);
  }
  work.end_part(error);
}

void HostBackend::run_part(HostWork& work, QueueKey queue, bool& has_started) {
  if (HostClock::now() >= work.deadline()) fail(ErrorKind::kTimeout, timeout_message(work.call()));
  if (broken_.load(std::memory_order_acquire)) {
    fail(ErrorKind::kState, "not run, because of ", failure());
  }
  if (work.call().record) work.call().record->started();
  work.begin();
  const BelowDispatchGuard plain;
  HostPrimitives primitives(context_.rank, context_.size, *transport_, work.deadline(),
                            work.call().timeout, broken_);
  has_started = true;  // an error of before() breaks the communicator
  transport_->before(work.index(), work.deadline());
  try {
    if (queue == kAllQueues) {
      primitives.run(work.call());
    } else {
      run_p2p_queue(work, queue, primitives);
    }
    if (primitives.source() != kAnySource) work.set_source(primitives.source());
    if (const Staging* staging = work.staging(); staging != nullptr && queue == kAllQueues) {
      const c10::DeviceGuard guard(context_.device);
      staging->write_back();
    }
  } catch (const Error& error) {
    has_started = primitives.has_started();
    throw_if_mismatched(work, error.kind(), primitives.missing());
    throw;
  } catch (...) {
    has_started = primitives.has_started();
    throw;
  }
}

void HostBackend::throw_if_mismatched(const HostWork& work, ErrorKind kind,
                                      const std::set<int>& missing) {
  if (kind != ErrorKind::kTimeout && kind != ErrorKind::kRuntime) return;
  if (missing.empty() || context_.store == nullptr || !transport_->hides_mismatches()) return;
  // The store may not answer any more. The query then continues on its thread; its result is lost.
  const auto why = std::make_shared<std::string>();
  const Milliseconds limit =
      kind == ErrorKind::kTimeout ? peer_report_timeout(work.call().timeout) : kPeerReportTimeout;
  const auto ask = [why, store = context_.store,
                    compare = make_timeout_comparison(work.call(), context_.rank, context_.size,
                                                      missing, limit)] { *why = compare(*store); };
  try {
    if (!run_with_timeout(ask, limit + limit / 2)) return;
  } catch (const std::exception&) {  // the store is unreachable
    return;
  }
  if (!why->empty()) throw ComparedTimeout(ErrorKind::kTimeout, *why);
}

void HostBackend::run_p2p_queue(HostWork& work, QueueKey queue, Primitives& primitives) {
  std::vector<P2POp> mine;
  for (const P2POp& op : work.call().p2p) {
    if (queue_of(op) == queue) mine.push_back(op);
  }
  primitives.p2p(mine);
  const P2POp& any = mine.front();
  const bool receives = any.type == P2POp::Type::RECV || any.peer == context_.rank;
  if (work.staging() != nullptr && receives) {
    const c10::DeviceGuard guard(context_.device);
    work.staging()->write_back_from(any.peer, any.tag);
  }
}

void HostBackend::set_broken(const std::exception_ptr& error) {
  const std::string why = Fault::of(error).text;
  {
    std::lock_guard lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = why;
    broken_.store(true, std::memory_order_release);
  }
  report_failure(context_.record.get(), why);
  const bool timeout = is_timeout(error);
  if (context_.options.abort_process_on_timeout_or_error) {
    abort_process(timeout ? WorkStatus::TIMEDOUT : WorkStatus::ERROR, why, context_.on_abort);
  }
  // Peers are not notified after a timeout. Their own deadlines pass soon, and their errors then
  // name the rank that is really missing.
  transport_->stop(concat("not run, because of ", why), /*notify_peers=*/!timeout);
}

std::string HostBackend::failure() {
  std::lock_guard lock(mutex_);
  return failure_;
}

void HostBackend::require_usable(std::string_view op) {
  if (__builtin_expect(broken_.load(std::memory_order_acquire), 0)) {
    fail(ErrorKind::kState, op, ": expected a working communicator, got '", context_.name,
         "', which failed: ", failure(), "; make a new one");
  }
  TORCH_OVERLAP_CHECK(!finalized_.load(std::memory_order_acquire), kState, op,
                      ": expected a live communicator, got '", context_.name,
                      "', which was finalized");
}

void HostBackend::expire(const HostWork& work) {
  const Error error(ErrorKind::kTimeout, timeout_message(work.call()));
  set_broken(with_op_context(work, std::make_exception_ptr(error)));
}

std::shared_ptr<Backend> HostBackend::split(const SplitRequest& request) {
  require_usable("split");
  return request.member ? make_child_(request.child) : nullptr;
}

void HostBackend::finalize() {
  finalized_.store(true, std::memory_order_release);
  const auto timeout = clamp_timeout(context_.timeout());
  bool drained = false;
  try {
    drained = queues_.drain(HostClock::now() + timeout);
  } catch (const Error&) {  // interrupted: the operations cannot be waited for again
    end(/*notify_peers=*/true);
    throw;
  }
  if (!drained) {
    set_broken(std::make_exception_ptr(Error(
        ErrorKind::kTimeout, concat("finalize of '", context_.name, "': operations did not end in ",
                                    timeout.count(), " ms"))));
  }
  queues_.close(HostClock::now() + std::chrono::seconds(5));
  transport_->stop(concat("communicator '", context_.name, "' was finalized"), true);
  if (broken_.load(std::memory_order_acquire)) {
    fail(ErrorKind::kState, "finalize: expected a working communicator, got '", context_.name,
         "', which failed: ", failure());
  }
}

void HostBackend::end(bool notify_peers) {
  if (aborted_.exchange(true)) return;
  const std::string why = concat("communicator '", context_.name, "' was aborted");
  {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = why;
    broken_.store(true, std::memory_order_release);
  }
  transport_->stop(why, notify_peers);
}

}  // namespace torch_overlap
