#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "torch_overlap/comm/backend.h"
#include "torch_overlap/comm/host/host_work.h"
#include "torch_overlap/comm/host/lanes.h"
#include "torch_overlap/comm/host/transport.h"
#include "torch_overlap/comm/primitives.h"

namespace torch_overlap {

// The launch path of all CPU communicators; a transport makes it a backend.
//
// Order: collectives run one after the other in the order of launch; so do the sends to one peer
// under one tag, the receives from one peer under one tag, and those from any rank under one tag.
// Nothing else waits for each other, so any pattern of matching sends and receives ends. Puts and
// signals to one rank run in the order of launch, and a wait for a signal keeps nothing else from
// running. An operation with async_op=false keeps that order too: it runs on the caller's thread
// when nothing is before it, else it takes its turn. Where the caller looks for signals
// (base/interrupt.h) and there are other ranks, it always takes its turn, and goes on if a signal
// ends the caller's wait.
//
// Timeouts count from launch. The first timeout or error after a message was posted breaks the
// communicator: everything that runs or waits ends with an error, later launches and finalize()
// throw one that names the first. A failure before that concerns one operation only.
// With abort_process_on_timeout_or_error, that first failure ends the process.
class HostBackend final : public Backend, public HostWorkOwner {
 public:
  HostBackend(const BackendContext& context, std::unique_ptr<HostTransport> transport,
              BackendFactory make_child);
  ~HostBackend() override;

  std::string version() const override { return transport_->version(); }
  WorkPtr launch(Call call) override;
  std::shared_ptr<Backend> split(const SplitRequest& request) override;
  void finalize() override;
  void abort() override { end(/*tells_peers=*/true); }
  void give_up(bool tells_peers) override { end(tells_peers); }
  bool is_aborted() const override { return aborted_.load(std::memory_order_acquire); }
  std::string failure() override;
  std::string why_left(int rank) override { return transport_->why_left(rank); }
  std::shared_ptr<Backend> regroup(const std::function<RegroupRequest()>& meet,
                                   Milliseconds timeout) override {
    abort_within(timeout / 2);  // the peers hear of it
    return make_child_(meet().context);
  }
  bool has_windows() const override { return context_.device.is_cpu(); }
  bool has_tags() const override { return true; }
  void expire(const HostWork& work) override;

 private:
  using Lane = TaskLanes::Key;
  static constexpr Lane kAllLanes = -1;

  using LaneList = c10::SmallVector<Lane, 4>;

  void end(bool tells_peers);
  Lane lane_of(const P2POp& op) const;
  LaneList lanes_of(const Call& call) const;
  WorkPtr launch_wait(Call call);
  // Runs the part of `work` that belongs to `lane` and ends it.
  void run(HostWork& work, Lane lane);
  void run_part(HostWork& work, Lane lane, bool& has_begun);
  // Throws an error that shows what this rank and a missing one wait in, if that one tells. A rank
  // whose clock ended first closes its connections, which looks like its death.
  void explain(const HostWork& work, ErrorKind kind, const std::set<int>& missing);
  void run_p2p_lane(HostWork& work, Lane lane, Primitives& primitives);
  // The first call decides what the communicator failed of.
  void break_down(const std::exception_ptr& error);
  void require_usable(std::string_view op);

  const BackendContext context_;
  const std::unique_ptr<HostTransport> transport_;
  const BackendFactory make_child_;
  std::atomic<uint64_t> launched_{0};
  std::atomic<bool> aborted_{false};
  std::atomic<bool> broken_{false};
  std::atomic<bool> finalized_{false};
  std::mutex mutex_;  // failure_
  std::string failure_;
  TaskLanes lanes_;  // last: its threads end before the rest does
};

}  // namespace torch_overlap
