#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "torch_overlap/comm/backend.h"
#include "torch_overlap/comm/host/host_work.h"
#include "torch_overlap/comm/host/task_queues.h"
#include "torch_overlap/comm/host/transport.h"
#include "torch_overlap/comm/primitives.h"

namespace torch_overlap {

// The backend of all CPU communicators. A transport moves the bytes.
//
// Order. Collectives run one after the other in the order of issue. The same holds for the sends
// to one peer with one tag, for the receives from one peer with one tag, and for the receives from
// any rank with one tag. These sequences do not wait for each other, so every pattern of matching
// sends and receives completes. Puts and signals to one rank run in the order of issue. A wait for
// a signal blocks no other operation. An operation with async_op=false keeps that order too: it
// runs on the caller's thread if its queues are idle, otherwise it is queued. If the caller polls
// for signals (base/interrupt.h) and there are other ranks, the operation is always queued, and it
// continues if a signal ends the caller's wait.
//
// Timeouts count from issue. The first timeout, or the first error after a message was posted,
// breaks the communicator: every running and every queued operation ends with an error, and later
// operations and finalize() throw an error that quotes the first one. An error before a message was
// posted affects only its operation. If abort_process_on_timeout_or_error is set, the failure that
// breaks the communicator ends the process.
class HostBackend final : public Backend {
 public:
  HostBackend(const BackendContext& context, std::unique_ptr<HostTransport> transport,
              BackendFactory make_child);
  ~HostBackend() override;

  std::string version() const override { return transport_->version(); }
  WorkPtr issue(Call call) override;
  std::shared_ptr<Backend> split(const SplitRequest& request) override;
  void finalize() override;
  void abort() override { end(/*notify_peers=*/true); }
  void abort_async(bool notify_peers) override { end(notify_peers); }
  bool is_aborted() const override { return aborted_.load(std::memory_order_acquire); }
  std::string failure() override;
  std::string departure_reason(int rank) override { return transport_->departure_reason(rank); }
  std::shared_ptr<Backend> regroup(const std::function<RegroupRequest()>& rendezvous,
                                   Milliseconds timeout) override {
    abort_within(timeout / 2);  // notifies the peers
    return make_child_(rendezvous().context);
  }
  bool has_windows() const override { return context_.device.is_cpu(); }
  bool has_tags() const override { return true; }
  // Called if a waiter sees that the deadline has passed before the thread that runs the operation
  // does, because another operation is in the way. Ends the operation soon.
  void expire(const HostWork& work);

 private:
  using QueueKey = TaskQueues::Key;
  static constexpr QueueKey kAllQueues = -1;

  using QueueList = c10::SmallVector<QueueKey, 4>;

  void end(bool notify_peers);
  QueueKey queue_of(const P2POp& op) const;
  QueueList queues_of(const Call& call) const;
  WorkPtr issue_wait(Call call);
  // Runs the part of `work` that belongs to `queue`, then ends the part.
  void run(HostWork& work, QueueKey queue);
  void run_part(HostWork& work, QueueKey queue, bool& has_started);
  // Throws an error that shows the operations in which this rank and a missing peer wait, if the
  // peer reports its own. A rank whose deadline passed first closes its connections, which looks
  // like a crash to the others.
  void throw_if_mismatched(const HostWork& work, ErrorKind kind, const std::set<int>& missing);
  void run_p2p_queue(HostWork& work, QueueKey queue, Primitives& primitives);
  // Only the first call sets the communicator's failure.
  void set_broken(const std::exception_ptr& error);
  void require_usable(std::string_view op);

  const BackendContext context_;
  const std::unique_ptr<HostTransport> transport_;
  const BackendFactory make_child_;
  std::atomic<uint64_t> issued_{0};
  std::atomic<bool> aborted_{false};
  std::atomic<bool> broken_{false};
  std::atomic<bool> finalized_{false};
  std::mutex mutex_;  // guards failure_
  std::string failure_;
  TaskQueues queues_;  // last member: its threads end before the others are destroyed
};

}  // namespace torch_overlap
