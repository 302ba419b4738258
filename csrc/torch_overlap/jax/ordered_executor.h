#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap::jax {

// Identifies a custom call of a compiled program. `domain` is the id of the axis or of the buffer
// that the call uses, `number` counts the calls of that domain in the order in which programs are
// compiled. Ranks run the same programs, so that both are equal on all ranks.
struct CallSite {
  int64_t domain = 0;
  int64_t number = 0;
  bool operator<(const CallSite& other) const {
    return std::pair(domain, number) < std::pair(other.domain, other.number);
  }
  bool operator==(const CallSite&) const = default;
};

// Runs the collectives of one rank on a thread of its own, in the order of rank 0.
//
// XLA on CPUs runs custom calls that do not depend on each other in any order and on any thread, so
// that two ranks may begin two collectives in opposite orders. Therefore a call is only queued, and
// XLA's thread is free for others. Rank 0 runs its queue in the order of arrival, and announces
// each call to the other ranks, which run that call of theirs:
//
//   rank 0   queue A B     announce A, run A    announce B, run B
//   rank 1   queue B A     hear A,     run A    hear B,     run B
//
// A rank that has heard of a call waits until its own program reaches it, for at most the timeout
// of the communicator. That ends: what the call depends on was complete on rank 0.
class OrderedExecutor {
 public:
  // Called with null to run, or with the reason why it cannot run. Must not throw.
  using Job = std::function<void(std::exception_ptr)>;

  explicit OrderedExecutor(std::shared_ptr<TorchComm> comm);
  // Completes what was submitted.
  ~OrderedExecutor();
  OrderedExecutor(const OrderedExecutor&) = delete;
  OrderedExecutor& operator=(const OrderedExecutor&) = delete;

  // Queues a job. Threads: any.
  void submit(const CallSite& site, Job job);

 private:
  // A site and how often it ran before on this rank.
  using SiteRun = std::pair<CallSite, int64_t>;
  struct Pending {
    SiteRun run;
    Job job;
  };

  void run();
  // Returns the job that is the next one on all ranks, waiting for it if necessary.
  Job next();
  SiteRun announce(const SiteRun& mine);
  Job wait_for(const SiteRun& run);

  const std::shared_ptr<TorchComm> comm_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Pending> pending_;
  std::map<CallSite, int64_t> counts_;
  std::exception_ptr broken_;  // the order is lost: every later job fails
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace torch_overlap::jax
