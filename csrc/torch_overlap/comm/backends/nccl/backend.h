#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include "torch_overlap/comm/backend.h"
#include "torch_overlap/comm/backends/nccl/custom_collectives.h"
#include "torch_overlap/comm/backends/nccl/deferred_deleter.h"
#include "torch_overlap/comm/backends/nccl/handle.h"
#include "torch_overlap/comm/backends/nccl/remote_windows.h"
#include "torch_overlap/comm/backends/nccl/runtime.h"
#include "torch_overlap/comm/backends/nccl/work.h"
#include "torch_overlap/comm/peer_failure.h"
#include "torch_overlap/comm/shutdown.h"
#include "torch_overlap/common/cuda/capture.h"

namespace torch_overlap {

// A communicator over NCCL on one GPU.
//
// Streams. async_op = false runs on the current stream. async_op = true runs on the communicator's
// own stream of the requested priority, after an event on the current stream. Every operation waits
// on the device for the preceding one if that ran on another stream, so all run in the order of
// issue.
//
// Windows. Puts and signals are a queue that is concurrent with the collectives: ordered among
// themselves, on streams of their own. Waits for signals are a third queue, in which those with
// async_op = true are ordered. No queue waits for another, except that a captured wait runs after
// the puts and signals that were captured before it. Each window with memory that is not mapped has
// a native communicator for that memory (one_sided.h), which ends with this one.
//
// Captures. The same holds; events and waits become edges. An async operation is then left as a
// leaf of the graph (common/cuda/capture.h), which wait() may join or not. Captured operations are
// ordered among themselves; NCCL orders them against eager operations and other graphs. With the
// hint graph_timeouts the watchdog sees every replay (graph_monitor.h). Without it, a replay that
// hangs is detected by the next eager operation, which cannot start after it. Therefore, while
// graphs of this communicator are alive, the timeout of an operation does not wait for its stream:
// it counts from the end of the preceding operation, however long other work on its stream runs.
//
// Failure. The first timeout or error ends the communicator: every call, and every work that is not
// done, throws it; NCCL is stopped; and the process is ended if that was requested. The other ranks
// learn of it through the store if an eager collective waits for long (peer_failure.h). An
// operation that fails partway is such an error: this rank is out of step with its peers. handle.h
// describes who may free what.
//
// Destruction. Whichever thread drops the last reference, the deferred deleter's thread deletes the
// backend, and not before its operations have ended on the device.
class NcclBackend final : public Backend, public PendingDelete {
 public:
  static std::shared_ptr<NcclBackend> create(const BackendContext& context, const NcclApi& api);
  ~NcclBackend() override;

  std::string version() const override;
  WorkPtr issue(Call call) override;
  std::shared_ptr<Backend> split(const SplitRequest& request) override;
  void finalize() override;
  void abort() override;
  void abort_async(bool notify_peers) override;
  bool is_aborted() const override { return runtime_->failure.is_set(); }
  std::shared_ptr<Backend> regroup(const std::function<RegroupRequest()>& rendezvous,
                                   Milliseconds timeout) override;
  int64_t native_handle() const override;
  bool has_windows() const override { return true; }
  bool has_rms_norm() const override { return true; }
  bool quantizes_rms_norm(at::ScalarType dtype, size_t row_bytes) const override;
  NormKernel rms_norm_kernel(const Call& call) const override;
  void run_rms_norm(const Call& call) override;
  void prepare_windows() override;
  void begin_window() override;
  void add_window(uint64_t number, const std::shared_ptr<SymmetricMemory>& memory) override;
  void remove_window(const SymmetricMemory& memory, Milliseconds timeout) override;
  RemoteSupport remote_access_support() const override;
  std::shared_ptr<RemoteAccess> open_remote(Bootstrap& bootstrap, std::string_view op,
                                            SymmetricMemory& memory) override;
  // Returns the monitor of the device-side waits of this communicator's windows, and of others that
  // wait on the device for its ranks. A wait that expires fails the communicator.
  std::shared_ptr<cuda::DeviceWaitMonitor> wait_monitor();
  void register_memory(const at::Tensor& tensor) override;
  void deregister_memory(const at::Tensor& tensor) override;

  // Called on the watchdog's thread. Waits for nothing that another thread could hold for long, and
  // so releases no tensor (deferred_deleter.h). The same holds for the destructor, if the watchdog
  // drops the last reference.
  void tick() noexcept;
  bool can_delete() noexcept override;

 private:
  using Clock = CudaWork::Clock;
  using Lock = std::unique_lock<std::timed_mutex>;
  // The preceding operation on the device, for which the next one waits.
  struct Previous {
    std::shared_ptr<CudaWork> work;
    c10::cuda::CUDAStream stream;
  };
  // Works that have ended. Their tensors are released with this, after the lock.
  struct EndedBatch {
    c10::SmallVector<std::shared_ptr<CudaWork>, 16> works;
    void push_back(std::shared_ptr<CudaWork> work) { works.push_back(std::move(work)); }
    ~EndedBatch() {
      for (const auto& work : works) work->release_all();
    }
  };

  NcclBackend(const BackendContext& context, std::shared_ptr<NcclHandle> handle);
  static std::shared_ptr<NcclBackend> start(const BackendContext& context,
                                            std::shared_ptr<NcclHandle> handle);

  // Acquires the launch lock. Throws if the communicator fails while a stuck launch holds the lock.
  Lock lock_unless_failed() const;
  // Orders the operation on its stream and runs it. Requires the launch lock.
  void enqueue(const std::shared_ptr<CudaWork>& work, c10::cuda::CUDAStream current,
               const cuda::Capture& capture);
  // If NCCL cannot continue, sets the failure and throws it; any other error changes nothing.
  void run(const CudaWork& work, c10::cuda::CUDAStream stream, bool is_capturing);
  [[noreturn]] void fail_launch(const Call& call, bool has_launched);
  void enter_capture(const cuda::Capture& capture);
  void keep_mapped(const Call& call);
  // Removes all operations that have ended from the queues. `Sink` has push_back.
  template <typename Sink>
  void reap(Sink& ended);
  // Removes the first `count` operations, which must exist, if the last of them has ended.
  using Queue = std::deque<std::shared_ptr<CudaWork>>;
  template <typename Sink>
  static bool reap_first(Queue& queue, Sink& ended, size_t count);
  template <typename Sink>
  void reap_waits(Sink& ended);
  // Called by issue(): reaps some operations if many are queued.
  void reap_some(EndedBatch& ended);
  bool is_idle() const;
  // Waits until all issued operations have ended.
  void drain(std::string_view op);

  // Uses ncclCommShrink, if all members were in the old communicator and can_shrink() is true on
  // each. Returns null on all ranks if it did not succeed on one.
  std::shared_ptr<NcclBackend> shrink(const RegroupRequest& request);

  // The first caller's error ends the communicator. Does not wait.
  void fail_with(WorkStatus status, ErrorKind kind, const std::string& message);
  // Acts on a failure that is set: stops NCCL or, on the watchdog's thread, ends the process. Runs
  // once, with no lock held; not after abort().
  void act_on_failure(bool is_watchdog = false);
  // Implements abort() and abort_async(). `limit` is how long NCCL is waited for.
  void abort_within_limit(Milliseconds limit);
  void check_launching(Clock::time_point now);
  // These require the launch lock. The checks return an error message if the operation, or one in a
  // replayed graph, is late.
  std::string describe_missing_peer() const;
  std::optional<std::string> check_head(CudaWork& head, Clock::time_point now);
  // Returns a peer's error for an operation that has not ended for some time, but is not late yet.
  std::optional<std::string> check_peers(CudaWork& head, Clock::time_point now);
  std::optional<std::string> check_replays(Clock::time_point now);

  const BackendContext context_;
  const std::shared_ptr<CommRuntime> runtime_;
  const LeakedAtExit<at::Tensor> workspace_;  // one byte, for barriers
  std::shared_ptr<NcclHandle> handle_;
  RemoteWindows remote_;
  CustomCollectives custom_collectives_;  // guarded by the launch lock
  PeerFailure peers_;

  // Guarded by the launch lock, which is the handle's.
  struct QueueState {
    Queue queue;  // eager operations, in order of issue
    std::optional<Previous> previous;
    std::optional<Previous> previous_captured;
  };
  QueueState& queue_state(OpQueue which) { return queues_[static_cast<size_t>(which)]; }
  std::array<QueueState, kNumOpQueues> queues_;
  unsigned long long capture_ = 0;                     // ID of the last capture seen
  GraphResources* graph_resources_ = nullptr;          // valid during that capture
  std::shared_ptr<GraphMonitor> monitor_;              // monitor of that capture
  std::vector<std::weak_ptr<GraphMonitor>> monitors_;  // monitors of live graphs
  uint64_t graphs_seen_ = 0;

  std::map<const void*, void*> registered_;  // address to NCCL's handle

  // State with which captures record replay counters for graph_timeouts. Null without the hint.
  struct ReplayTracking;
  const std::unique_ptr<ReplayTracking> replay_tracking_;

  // Time at which the launch in progress began, by NCCL or by a kernel of this project; 0 if there
  // is none.
  std::atomic<Clock::rep> launching_since_{0};
  std::atomic<int64_t> launching_timeout_ms_{0};
  std::atomic<bool> finalized_{false};
  std::atomic<bool> acted_on_failure_{false};
};

}  // namespace torch_overlap
