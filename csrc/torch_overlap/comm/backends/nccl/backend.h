#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include "torch_overlap/comm/backend.h"
#include "torch_overlap/comm/backends/nccl/direct_collectives.h"
#include "torch_overlap/comm/backends/nccl/graveyard.h"
#include "torch_overlap/comm/backends/nccl/handle.h"
#include "torch_overlap/comm/backends/nccl/remote_windows.h"
#include "torch_overlap/comm/backends/nccl/runtime.h"
#include "torch_overlap/comm/backends/nccl/watchdog.h"
#include "torch_overlap/comm/backends/nccl/work.h"
#include "torch_overlap/comm/peer_failure.h"
#include "torch_overlap/common/cuda/capture.h"

namespace torch_overlap {

// A communicator over NCCL on one GPU.
//
// Streams. async_op = false runs on the current stream. async_op = true runs on the communicator's
// own stream of the asked priority, after an event on the current one. Every operation waits on the
// device for the one before it when that ran on another stream, so all run in the order of issue.
//
// Windows. Puts and signals are a lane beside the collectives, in order among themselves, with
// streams of their own; waits for signals are a third, of which those with async_op = true are in
// order. No lane waits for another, but that a captured wait comes behind the puts and signals that
// were captured before it. What goes to memory that is not mapped has a native communicator for
// each window (one_sided.h), which ends with this one.
//
// Captures. The same happens; events and waits become edges. An async operation is then left as a
// leaf of the graph (common/cuda/capture.h), which wait() may join or not. Captured operations are
// ordered among themselves; against eager ones and other graphs NCCL orders them. With the hint
// graph_timeouts the watchdog sees every replay (graph_monitor.h). Without, a replay that hangs is
// found by the next eager operation, which cannot start behind it. So while graphs of this
// communicator are alive, the clock of an operation does not wait for its stream: it runs from the
// end of the operation before it, however long other work on its stream takes.
//
// Failure. The first timeout or error ends the communicator: every call and every work that is not
// done throws it, NCCL is stopped, and the process is ended where that was asked for. The other
// ranks hear of it through the store, if an eager collective waits for long (peer_failure.h). An
// operation that fails half way is such an error: this rank is out of step with its peers. See
// handle.h for who may free what.
//
// End. Whoever drops the last reference, the graveyard's thread deletes it, and not before its
// operations have ended on the device.
class NcclBackend final : public Backend, public Watched, public Body {
 public:
  static std::shared_ptr<NcclBackend> create(const BackendContext& context, const NcclApi& api);
  ~NcclBackend() override;

  std::string version() const override;
  WorkPtr launch(Call call) override;
  std::shared_ptr<Backend> split(const SplitRequest& request) override;
  void finalize() override;
  void abort() override;
  void give_up(bool tells_peers) override;
  bool is_aborted() const override { return runtime_->failure.is_set(); }
  std::shared_ptr<Backend> regroup(const std::function<RegroupRequest()>& meet,
                                   Milliseconds timeout) override;
  int64_t native_handle() const override;
  bool has_windows() const override { return true; }
  bool has_rms_norm() const override { return true; }
  void run_rms_norm(const Call& call) override;
  void prepare_windows() override;
  void begin_window() override;
  void add_window(uint64_t number, const std::shared_ptr<SymmetricMemory>& memory) override;
  void remove_window(const SymmetricMemory& memory, Milliseconds timeout) override;
  RemoteSupport remote_support() const override;
  std::shared_ptr<RemoteAccess> open_remote(Bootstrap& bootstrap, std::string_view op,
                                            SymmetricMemory& memory) override;
  // Of this communicator's windows, and of whatever else waits on the device for its ranks: a wait
  // that expires is the communicator's failure.
  std::shared_ptr<cuda::WaitBoard> wait_board();
  void register_memory(const at::Tensor& tensor) override;
  void deregister_memory(const at::Tensor& tensor) override;

  void tick() noexcept override;
  bool may_go() noexcept override;

 private:
  using Clock = CudaWork::Clock;
  using Lock = std::unique_lock<std::timed_mutex>;
  // The operation before, on the device: what the next one waits for.
  struct Previous {
    std::shared_ptr<CudaWork> work;
    c10::cuda::CUDAStream stream;
  };
  // Works that have ended. Their tensors go when this does, which is after the lock.
  struct Ended {
    c10::SmallVector<std::shared_ptr<CudaWork>, 16> works;
    void push_back(std::shared_ptr<CudaWork> work) { works.push_back(std::move(work)); }
    ~Ended() {
      for (const auto& work : works) work->release_all();
    }
  };

  NcclBackend(const BackendContext& context, std::shared_ptr<NcclHandle> handle);
  static std::shared_ptr<NcclBackend> start(const BackendContext& context,
                                            std::shared_ptr<NcclHandle> handle);

  // Gives up when the communicator fails while the lock is held by a launch that is stuck.
  Lock lock_unless_failed() const;
  // The launch path, under the lock.
  void issue(const std::shared_ptr<CudaWork>& work, c10::cuda::CUDAStream current,
             const cuda::Capture& capture);
  // Sets the failure, and throws it, if NCCL cannot go on; else an error leaves all as it was.
  void run(const CudaWork& work, c10::cuda::CUDAStream stream, bool is_capturing);
  [[noreturn]] void fail_launch(const Call& call, bool begun);
  void enter_capture(const cuda::Capture& capture);
  void keep_mapped(const Call& call);
  // Takes all operations that have ended from the queue. `Sink` has push_back.
  template <typename Sink>
  void reap(Sink& ended);
  // Takes the first `count`, which must be there, if the last of them has ended.
  using Queue = std::deque<std::shared_ptr<CudaWork>>;
  template <typename Sink>
  static bool reap_first(Queue& queue, Sink& ended, size_t count);
  template <typename Sink>
  void reap_waits(Sink& ended);
  // At a launch: some of them, where many are queued.
  void reap_some(Ended& ended);
  bool is_idle() const;
  // Waits until all that was issued has ended.
  void drain(std::string_view op);

  // By ncclCommShrink, where all members were together before and no communicator of theirs has
  // failed. Null on all if that did not come about on one.
  std::shared_ptr<NcclBackend> shrink(const RegroupRequest& request);

  // The first caller's error ends the communicator. Does not wait.
  void fail_with(WorkStatus status, ErrorKind kind, const std::string& message);
  // What follows from a failure that is set: NCCL is stopped, or, on the watchdog's thread, the
  // process. Once, with no lock held; not after abort().
  void act_on_failure(bool is_watchdog = false);
  // abort() and give_up(): NCCL is waited for so long.
  void end_with(Milliseconds limit);
  void check_launching(Clock::time_point now);
  // Under the launch lock: says what is wrong if the operation, or one in a replayed graph, is
  // late.
  std::string who_is_missing() const;
  std::optional<std::string> check_head(CudaWork& head, Clock::time_point now);
  // Of an operation that has not ended for some time, though it is not late yet.
  std::optional<std::string> check_peers(CudaWork& head, Clock::time_point now);
  std::optional<std::string> check_replays(Clock::time_point now);

  const BackendContext context_;
  const std::shared_ptr<CommRuntime> runtime_;
  const at::Tensor workspace_;  // one byte, for barriers
  std::shared_ptr<NcclHandle> handle_;
  RemoteWindows remote_;
  DirectCollectives direct_;  // under the launch lock
  PeerFailure peers_;

  // Under the launch lock, which is the handle's.
  struct LaneState {
    Queue queue;  // not captured, in order of issue
    std::optional<Previous> previous;
    std::optional<Previous> previous_captured;
  };
  LaneState& lane(Lane which) { return lanes_[static_cast<size_t>(which)]; }
  std::array<LaneState, kLanes> lanes_;
  unsigned long long capture_ = 0;                     // the last capture that was seen
  GraphHold* hold_ = nullptr;                          // valid during that capture
  std::shared_ptr<GraphMonitor> monitor_;              // of that capture
  std::vector<std::weak_ptr<GraphMonitor>> monitors_;  // of the graphs that are alive
  uint64_t graphs_seen_ = 0;

  std::map<const void*, void*> registered_;  // memory, and NCCL's handle of it

  // For graph_timeouts: what captures need to leave their marks. Null without the hint.
  struct Marking;
  const std::unique_ptr<Marking> marking_;

  // When the call that is inside NCCL now went in; 0: none is.
  std::atomic<Clock::rep> launching_since_{0};
  std::atomic<int64_t> launching_timeout_ms_{0};
  std::atomic<bool> finalized_{false};
  std::atomic<bool> acted_on_failure_{false};
};

}  // namespace torch_overlap
