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

class HostBackend;

// Returns how long the thread of a timed-out operation waits for the peers to report the operations
// in which they wait.
std::chrono::milliseconds peer_report_timeout(std::chrono::milliseconds timeout);

// An operation of a CPU communicator. It owns the call, and so every tensor, until the operation is
// done. The thread that ends the operation releases the tensors with no lock held, because the last
// reference to a Python tensor acquires the GIL. Callbacks run on other threads
// (callback_threads.h). If the process ends before the operation does, no callback runs, and the
// tensors are leaked.
class HostWork final : public TorchWork {
 public:
  // `index` counts the communicator's operations. `parts` is the number of calls to end_part().
  HostWork(Call call, std::unique_ptr<Staging> staging, uint64_t index, int parts,
           std::weak_ptr<HostBackend> owner);
  // Returns the work of an operation that is complete.
  static WorkPtr completed(Call call);

  // Valid until the last end_part().
  const Call& call() const { return call_; }
  const Staging* staging() const { return staging_.get(); }
  uint64_t index() const { return index_; }
  Deadline deadline() const { return deadline_; }
  // Marks the operation as started.
  void begin();
  // Sets the sender that a receive from any rank matched.
  void set_source(int rank) { source_.store(rank, std::memory_order_relaxed); }
  // Returns, for example, "queued 12 s ago, running for 10 s".
  std::string describe_age() const;

  // Ends one part. The first error of a part is the operation's; the last part completes it.
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
  const Deadline waiter_deadline_;  // if started: a waiter then expires it
  const ProcessStamp process_;
  const std::weak_ptr<HostBackend> owner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int> source_{kAnySource};
  int parts_;
  std::exception_ptr error_;        // final once
  std::atomic<bool> done_ = false;  // this is set; both are then read without the lock
  std::vector<std::function<void(std::exception_ptr)>> callbacks_;
};

}  // namespace torch_overlap
