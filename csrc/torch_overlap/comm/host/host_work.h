#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/host/staging.h"
#include "torch_overlap/comm/host/transport.h"
#include "torch_overlap/comm/work.h"

namespace torch_overlap {

class HostWork;

// Who runs the operation. Told when its deadline has passed and a waiter noticed before the thread
// that runs it did, because another operation is in the way; ends it soon.
class HostWorkOwner {
 public:
  virtual ~HostWorkOwner() = default;
  virtual void expire(const HostWork& work) = 0;
};

// How long the thread whose operation timed out waits for what other ranks tell that they wait in.
std::chrono::milliseconds late_limit(std::chrono::milliseconds timeout);

// An operation of a CPU communicator. It owns the call, and so every tensor, until the operation is
// done; the tensors are released by the thread that ends it, with no lock held (the last reference
// to a Python tensor takes Python's lock). Callbacks run on threads of their own
// (callback_threads.h). If the process ends before the operation does, nobody is called back, and
// the tensors are leaked.
class HostWork final : public TorchWork {
 public:
  // `index` counts the communicator's operations. `parts`: how many times end_part will be called.
  HostWork(Call call, std::unique_ptr<Staging> staging, uint64_t index, int parts,
           std::weak_ptr<HostWorkOwner> owner);

  // Valid until the last end_part.
  const Call& call() const { return call_; }
  const Staging* staging() const { return staging_.get(); }
  uint64_t index() const { return index_; }
  Deadline deadline() const { return deadline_; }
  // Its turn has come.
  void begin();
  // The rank that sent what a receive from any rank got.
  void received_from(int rank) { source_.store(rank, std::memory_order_relaxed); }
  // "queued 12 s ago, running for 10 s"
  std::string age() const;

  // A part of the operation is over. The first error is the operation's; the last part completes
  // it.
  void end_part(const std::exception_ptr& error);

  void wait() override;
  void wait_blocking(std::optional<std::chrono::milliseconds> timeout) override;
  bool is_completed() override;
  WorkStatus status() override;
  std::exception_ptr exception() override;
  void on_completion(std::function<void(std::exception_ptr)> callback) override;
  int source() override { return done_ ? source_.load(std::memory_order_relaxed) : kAnySource; }

 private:
  void require_own_process(std::string_view op) const;
  void wait_until(Deadline until);

  Call call_;
  std::unique_ptr<Staging> staging_;
  const uint64_t index_;
  const Deadline issued_ = HostClock::now();
  std::atomic<Deadline> started_{Deadline::max()};
  const Deadline deadline_;
  const Deadline expiry_;  // of one that runs: a waiter speaks up then, if nobody has
  const ProcessStamp process_;
  const std::weak_ptr<HostWorkOwner> owner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int> source_{kAnySource};
  int parts_;
  std::exception_ptr error_;        // as it is when
  std::atomic<bool> done_ = false;  // this is set: both are then read without the lock
  std::vector<std::function<void(std::exception_ptr)>> callbacks_;
};

}  // namespace torch_overlap
