#include "torch_overlap/comm/host/host_work.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/interrupt.h"
#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/comm/call_record.h"
#include "torch_overlap/comm/host/callback_threads.h"
#include "torch_overlap/comm/host/host_backend.h"
#include "torch_overlap/comm/shutdown.h"
#include "torch_overlap/symm/bootstrap.h"

namespace torch_overlap {
namespace {

// Time after the deadline at which a waiter expires an operation that has not started.
constexpr std::chrono::milliseconds kGrace{200};

Deadline after(std::chrono::milliseconds timeout) {
  return HostClock::now() + clamp_timeout(timeout);
}

// Resources that an operation releases when it is done.
struct Ended {
  Call call;  // first member: tensors are destroyed last, after all notifications
  std::unique_ptr<Staging> staging;
  std::vector<std::function<void(std::exception_ptr)>> callbacks;
  std::exception_ptr error;
};

}  // namespace

std::chrono::milliseconds peer_report_timeout(std::chrono::milliseconds timeout) {
  using std::chrono::milliseconds;
  return std::clamp<milliseconds>(timeout / 4, milliseconds(1000), milliseconds(5000));
}

HostWork::HostWork(Call call, std::unique_ptr<Staging> staging, uint64_t index, int parts,
                   std::weak_ptr<HostBackend> owner)
    : call_(std::move(call)),
      staging_(std::move(staging)),
      index_(index),
      deadline_(after(call_.timeout)),
      // The thread that runs an operation knows the cause of a delay, and may ask the peers first.
      waiter_deadline_(deadline_ + peer_report_timeout(call_.timeout) * 2),
      owner_(std::move(owner)),
      parts_(parts) {}

WorkPtr HostWork::completed(Call call) {
  auto work = std::make_shared<HostWork>(std::move(call), nullptr, /*index=*/0, /*parts=*/1,
                                         std::weak_ptr<HostBackend>());
  work->end_part(nullptr);
  return work;
}

void HostWork::begin() {
  Deadline never = Deadline::max();
  started_.compare_exchange_strong(never, HostClock::now());
}

std::string HostWork::describe_age() const {
  const auto now = HostClock::now();
  const Deadline started = started_;
  return concat("queued ", seconds_string(now - issued_), " ago, ",
                started == Deadline::max() ? std::string("not started")
                                           : concat("running for ", seconds_string(now - started)));
}

void HostWork::end_part(const std::exception_ptr& error) {
  const Permit permit;
  auto ended = std::make_unique<Ended>();
  {
    std::lock_guard lock(mutex_);
    if (error && !error_) error_ = error;
    if (--parts_ > 0) return;
    ended->call = std::move(call_);
    ended->staging = std::move(staging_);
    ended->callbacks.swap(callbacks_);
    ended->error = error_;
    if (ended->call.record) ended->call.record->ended(error_);
    done_ = true;
    changed_.notify_all();
  }
  if (!permit) {
    [[maybe_unused]] const auto* const leaked = ended.release();
    return;
  }
  for (auto& callback : ended->callbacks) {
    run_callback([callback = std::move(callback), error = ended->error, op = ended->call.name,
                  id = ended->call.id] {
      try {
        callback(error);
      } catch (const std::exception& thrown) {
        TORCH_WARN(to_string(op), " #", id, ": a completion callback threw: ", thrown.what());
      }
    });
  }
}

// Checked before the mutex is locked: a thread of the parent may have held it at the fork.
void HostWork::require_own_process(std::string_view op) const {
  TORCH_OVERLAP_CHECK(process_.is_current(), kState, op, ": expected the process that issued ",
                      to_string(call_.name), " #", call_.id, ", got a fork of it");
}

void HostWork::wait_until(Deadline until) {
  require_own_process("wait");
  std::unique_lock lock(mutex_);
  const auto done = [this] { return done_.load(); };
  Deadline expires_at = deadline_ + kGrace;
  bool is_over = wait_interruptibly(changed_, lock, std::min(until, expires_at), done);
  if (!is_over && started_.load() != Deadline::max()) {
    expires_at = waiter_deadline_;
    is_over = wait_interruptibly(changed_, lock, std::min(until, expires_at), done);
  }
  if (!is_over) {
    if (until < expires_at) {
      fail(ErrorKind::kTimeout, "wait_blocking: expected ", call_.describe(),
           " to end in the given time, got no end; it goes on and may be waited for again");
    }
    lock.unlock();
    if (const auto owner = owner_.lock()) owner->expire(*this);
    lock.lock();
    changed_.wait(lock, done);
  }
  if (error_) std::rethrow_exception(error_);
}

void HostWork::wait() { wait_until(Deadline::max()); }

void HostWork::wait_blocking(std::optional<std::chrono::milliseconds> timeout) {
  wait_until(timeout ? after(*timeout) : Deadline::max());
}

bool HostWork::is_completed() { return done_; }

WorkStatus HostWork::status() {
  if (!done_) return WorkStatus::INPROGRESS;
  if (!error_) return WorkStatus::COMPLETED;
  return Fault::of(error_).kind == ErrorKind::kTimeout ? WorkStatus::TIMEDOUT : WorkStatus::ERROR;
}

std::exception_ptr HostWork::exception() { return done_ ? error_ : nullptr; }

void HostWork::on_completion(std::function<void(std::exception_ptr)> callback) {
  require_own_process("on_completion");
  {
    const std::lock_guard lock(mutex_);
    if (!done_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback(error_);
}

}  // namespace torch_overlap
