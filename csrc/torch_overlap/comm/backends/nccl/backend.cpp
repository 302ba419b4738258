#include "torch_overlap/comm/backends/nccl/backend.h"

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/backends/nccl/custom_call.h"
#include "torch_overlap/comm/backends/nccl/primitives.h"
#include "torch_overlap/comm/backends/nccl/watchdog.h"
#include "torch_overlap/comm/below_dispatch_guard.h"
#include "torch_overlap/comm/call_record.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/cuda/stream.h"
#include "torch_overlap/symm/cuda/vmm.h"

namespace torch_overlap {
namespace {

constexpr auto kLockPollInterval = std::chrono::milliseconds(100);

void record(cudaEvent_t event, c10::cuda::CUDAStream stream) {
  cuda::check(cudaEventRecord(event, stream.stream()), "cudaEventRecord");
}

// Leaves a forked stream as a leaf of the capture, even if the operation fails partway: otherwise
// the capture could not end any more.
class LeafOnExit {
 public:
  LeafOnExit(c10::cuda::CUDAStream side, c10::cuda::CUDAStream origin)
      : side_(side), origin_(origin) {}
  ~LeafOnExit() {
    try {
      cuda::reset_capture_dependencies(side_.stream(), origin_.stream());
    } catch (const Error& error) {
      TORCH_WARN("the capture cannot end: ", error.what());
    }
  }
  LeafOnExit(const LeafOnExit&) = delete;
  LeafOnExit& operator=(const LeafOnExit&) = delete;

 private:
  c10::cuda::CUDAStream side_;
  c10::cuda::CUDAStream origin_;
};

OpQueue queue_of(const Call& call) {
  switch (call.primitive) {
    case Primitive::wait_signal:
      return OpQueue::waits;
    case Primitive::put:
    case Primitive::signal:
      return OpQueue::one_sided;
    default:
      return OpQueue::collectives;
  }
}

at::Tensor make_workspace(c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const at::Tensor workspace = at::zeros({1}, at::TensorOptions().device(device).dtype(at::kByte));
  // Filled before this returns, so that no stream has to wait for it later.
  c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
  return workspace;
}

}  // namespace

std::shared_ptr<NcclBackend> NcclBackend::create(const BackendContext& context,
                                                 const NcclApi& api) {
  return start(context, NcclHandle::create(api, context));
}

std::shared_ptr<NcclBackend> NcclBackend::start(const BackendContext& context,
                                                std::shared_ptr<NcclHandle> handle) {
  start_deferred_deleter();
  std::shared_ptr<NcclBackend> backend(new NcclBackend(context, std::move(handle)), defer);
  watch(backend);
  return backend;
}

void NcclBackend::register_memory(const at::Tensor& tensor) {
  const c10::cuda::CUDAGuard device(runtime_->device);
  const auto& api = handle_->api();
  require_nccl(api, 21900, "tensor_register");
  const Lock lock = lock_unless_failed();
  void* handle = nullptr;
  nccl_check(
      api, api.comm_register(handle_->comm(), tensor.mutable_data_ptr(), tensor.nbytes(), &handle),
      "ncclCommRegister");
  registered_[tensor.const_data_ptr()] = handle;
}

void NcclBackend::deregister_memory(const at::Tensor& tensor) {
  const c10::cuda::CUDAGuard device(runtime_->device);
  const auto& api = handle_->api();
  const Lock lock = lock_unless_failed();
  const auto found = registered_.find(tensor.const_data_ptr());
  if (found == registered_.end()) return;
  nccl_check(api, api.comm_deregister(handle_->comm(), found->second), "ncclCommDeregister");
  registered_.erase(found);
}

struct NcclBackend::ReplayTracking {
  explicit ReplayTracking(const std::shared_ptr<CommRuntime>& runtime)
      : runtime(runtime),
        pool(std::make_shared<ReplayCounterPool>(runtime->device)),
        side(runtime->device, /*high_priority=*/false),
        events(runtime->events.acquire()) {}
  ~ReplayTracking() { runtime->events.release(events); }

  // Makes the next capture on `side` depend on everything that `stream` has captured so far.
  void follow(c10::cuda::CUDAStream stream) {
    record(events.ready, stream);
    cuda::stream_waits(side.get(), events.ready);
  }

  const std::shared_ptr<CommRuntime> runtime;
  const std::shared_ptr<ReplayCounterPool> pool;
  const cuda::OwnedStream side;
  const cuda::EventPair events;
};

NcclBackend::NcclBackend(const BackendContext& context, std::shared_ptr<NcclHandle> handle)
    : PendingDelete(context.device.index()),
      context_(context),
      runtime_(std::make_shared<CommRuntime>(context.name, context.device.index(),
                                             event_pool_size(context.options.hints))),
      workspace_(make_workspace(context.device)),
      handle_(std::move(handle)),
      custom_collectives_(context_, runtime_),
      peers_(context_.store, context_.rank, context_.size),
      replay_tracking_(graph_timeouts(context.options.hints)
                           ? std::make_unique<ReplayTracking>(runtime_)
                           : nullptr) {}

NcclBackend::~NcclBackend() = default;

std::string NcclBackend::version() const { return nccl_version_string(handle_->api().version()); }

int64_t NcclBackend::native_handle() const {
  const Lock lock = lock_unless_failed();
  return reinterpret_cast<int64_t>(handle_->comm());
}

NcclBackend::Lock NcclBackend::lock_unless_failed() const {
  runtime_->failure.rethrow_if_set();
  Lock lock(handle_->mutex(), std::try_to_lock);
  while (!lock && !lock.try_lock_for(kLockPollInterval)) runtime_->failure.rethrow_if_set();
  runtime_->failure.rethrow_if_set();
  return lock;
}

void NcclBackend::prepare_windows() {
  const c10::cuda::CUDAGuard device(runtime_->device);
  const Lock lock = lock_unless_failed();
  runtime_->wait_monitor();
  for (const OpQueue which : {OpQueue::one_sided, OpQueue::waits}) {
    runtime_->stream(which, context_.options.is_high_priority_stream, /*capturing=*/false);
  }
}

void NcclBackend::begin_window() {
  const Lock lock = lock_unless_failed();
  custom_collectives_.begin_window();
}

void NcclBackend::add_window(uint64_t number, const std::shared_ptr<SymmetricMemory>& memory) {
  const Lock lock = lock_unless_failed();
  custom_collectives_.add_window(number, memory);
}

Backend::RemoteSupport NcclBackend::remote_access_support() const {
  return OneSided::support(handle_->api(), context_.size);
}

std::shared_ptr<RemoteAccess> NcclBackend::open_remote(Bootstrap& bootstrap, std::string_view op,
                                                       SymmetricMemory& memory) {
  return remote_.open(handle_->api(), context_, bootstrap, op, memory);
}

std::shared_ptr<cuda::DeviceWaitMonitor> NcclBackend::wait_monitor() {
  const Lock lock = lock_unless_failed();
  return {runtime_, &runtime_->wait_monitor()};
}

WorkPtr NcclBackend::issue(Call call) {
  const c10::cuda::CUDAGuard device(runtime_->device);
  const auto current = c10::cuda::getCurrentCUDAStream(runtime_->device);
  const cuda::Capture capture = cuda::capture_of(current.stream());
  const auto work = std::make_shared<CudaWork>(runtime_, std::move(call), current, capture.id);
  try {
    EndedBatch ended;
    const Lock lock = lock_unless_failed();
    if (!capture) reap_some(ended);
    if (auto window = custom_collectives_.window_of(work->call()))
      work->set_window(std::move(window));
    enqueue(work, current, capture);
  } catch (...) {
    act_on_failure();
    throw;
  }
  if (!work->call().async_op) work->release(current);
  return work;
}

void NcclBackend::enqueue(const std::shared_ptr<CudaWork>& work, c10::cuda::CUDAStream current,
                          const cuda::Capture& capture) {
  const Call& call = work->call();
  const OpQueue which = queue_of(call);
  const auto stream = call.async_op
                          ? runtime_->stream(which, call.high_priority, static_cast<bool>(capture))
                          : current;
  work->set_stream(stream);
  if (capture && stream != current) {
    const cuda::Capture other = cuda::capture_of(stream.stream());
    TORCH_OVERLAP_CHECK(!other || other.id == capture.id, kState, call.describe(),
                        ": expected one capture of this communicator at a time, got a second; end "
                        "the first one before");
  }
  // After the check, so that a rejected call leaves the first capture as it is.
  if (capture) enter_capture(capture);
  auto& [queue, eager, captured] = queue_state(which);
  auto& previous = capture ? captured : eager;

  std::optional<LeafOnExit> leaf;
  // For an operation on the current stream `ready` only shows the watchdog when it could run.
  if (call.async_op || !capture) record(work->ready(), current);
  if (stream != current) {
    cuda::stream_waits(stream, work->ready());
    if (capture) leaf.emplace(stream, current);
  }
  // A wait on the current stream delays no other operation of the queue.
  const bool is_ordered = which != OpQueue::waits || call.async_op;
  // In a capture this is needed on the same stream too: a preceding async operation is a leaf.
  if (is_ordered && previous && (previous->stream != stream || (capture && call.async_op))) {
    cuda::stream_waits(stream, previous->work->end());
  }
  // Nothing else orders the branches of a graph. Puts and signals captured before a wait, which the
  // peer may need before it signals, must not run after it.
  if (const auto& put = queue_state(OpQueue::one_sided).previous_captured;
      capture && which == OpQueue::waits && put) {
    cuda::stream_waits(stream, put->work->end());
  }
  // A window's memory must stay mapped, on whatever stream the operation runs.
  const bool is_held = call.async_op || call.window != nullptr;
  // Kept before it runs: an operation that NCCL has accepted keeps its tensors until it ends, even
  // after an error.
  if (!capture) {
    queue.push_back(work);
  } else if (is_held) {
    graph_resources_->keep(work);
  }
  // A wait for a signal has its own timeout, and puts and signals wait for no peer.
  const bool is_tracked = capture && monitor_ && which == OpQueue::collectives;
  std::optional<LeafOnExit> tracking_leaf;
  if (is_tracked) {
    replay_tracking_->follow(stream);
    tracking_leaf.emplace(replay_tracking_->side.get(), current);
    monitor_->watch_begin(call, replay_tracking_->side.get().stream());
  }
  try {
    run(*work, stream, static_cast<bool>(capture));
    if (is_tracked) {
      replay_tracking_->follow(stream);
      monitor_->watch_end(replay_tracking_->side.get().stream());
    }
  } catch (...) {
    if (is_tracked) monitor_->drop_last();
    if (runtime_->failure.is_set()) {
      (void)cudaEventRecord(work->end(), stream.stream());
    } else if (!capture) {
      queue.pop_back();
    } else if (is_held) {
      graph_resources_->drop_last();
    }
    throw;
  }
  if (is_ordered) previous.emplace(work, stream);
}

void NcclBackend::run(const CudaWork& work, c10::cuda::CUDAStream stream, bool is_capturing) {
  const Call& call = work.call();
  std::optional<c10::cuda::CUDAStreamGuard> on_stream;  // otherwise `stream` is current
  if (call.async_op) on_stream.emplace(stream);
  const BelowDispatchGuard no_autograd;
  const bool nccl_maps_captured = is_capturing && handle_->api().is_graph_register_enabled;
  const bool nccl_maps = nccl_maps_captured || !registered_.empty();
  NcclPrimitives primitives(
      handle_->api(), handle_->comm(), context_.rank, context_.size, workspace_->data_ptr(),
      stream.stream(), runtime_.get(), call.timeout,
      {.is_mapped = nccl_maps ? cuda::is_exportable : nullptr, .is_capture = nccl_maps_captured});
  bool has_launched = false;
  try {
    // Before the launch is timed: mapping memory, at the first call, may wait for pending device
    // work.
    const CollectivePlan plan = custom_collectives_.plan(call, is_capturing);
    launching_timeout_ms_.store(call.timeout.count(), std::memory_order_relaxed);
    launching_since_.store(Clock::now().time_since_epoch().count(), std::memory_order_release);
    if (call.record) call.record->set_algorithm(to_string(plan).data());
    if (call.norm && call.norm->terms.defined() && plan.row_blocks == 0) {
      call.tensor.copy_(call.norm->terms, /*non_blocking=*/true);
    }
    if (plan) {
      if (is_capturing) graph_resources_->keep(custom_collectives_.memory());
      custom_collectives_.launch(call, plan, is_capturing, stream.stream(), has_launched);
    } else {
      if (nccl_maps_captured) keep_mapped(call);
      primitives.run(call);
    }
    if (call.norm && plan.row_blocks == 0) launch_rms_norm(call, stream.stream());
    record(work.end(), stream);
  } catch (...) {
    launching_since_.store(0, std::memory_order_release);
    runtime_->failure.rethrow_if_set();  // stopped from outside, which made the call fail
    fail_launch(call, has_launched || primitives.has_launched());
  }
  launching_since_.store(0, std::memory_order_release);
}

bool NcclBackend::quantizes_rms_norm(at::ScalarType dtype, size_t row_bytes) const {
  return c10::elementSize(dtype) == 2 && has_norm_kernels(dtype, row_bytes);
}

NormKernel NcclBackend::rms_norm_kernel(const Call& call) const {
  return custom_collectives_.norm_kernel(call);
}

void NcclBackend::run_rms_norm(const Call& call) {
  const c10::cuda::CUDAGuard device(runtime_->device);
  launch_rms_norm(call, c10::cuda::getCurrentCUDAStream(runtime_->device).stream());
}

void NcclBackend::keep_mapped(const Call& call) {
  for (const at::Tensor& tensor : call.tensors()) {
    if (tensor.numel() == 0) continue;
    if (auto mapping = cuda::VirtualMapping::find(tensor.const_data_ptr())) {
      graph_resources_->keep_mapped(std::move(mapping));
    }
  }
}

void NcclBackend::enter_capture(const cuda::Capture& capture) {
  if (capture.id == capture_) return;
  for (auto& state : queues_) state.previous_captured.reset();
  capture_ = 0;
  monitor_.reset();
  ++graphs_seen_;
  if (replay_tracking_)
    monitor_ = std::make_shared<GraphMonitor>(replay_tracking_->pool, graphs_seen_);
  graph_resources_ = GraphResources::attach(capture.graph, handle_, *workspace_, monitor_);
  if (replay_tracking_) monitors_.push_back(monitor_);
  capture_ = capture.id;
}

std::shared_ptr<Backend> NcclBackend::split(const SplitRequest& request) {
  drain("split");  // NCCL requires a parent with nothing outstanding
  std::shared_ptr<NcclHandle> child;
  try {
    child = handle_->split(request, context_.timeout());
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUnsupported && error.kind() != ErrorKind::kValue) {
      const bool is_timeout = error.kind() == ErrorKind::kTimeout;
      fail_with(is_timeout ? WorkStatus::TIMEDOUT : WorkStatus::ERROR, error.kind(), error.what());
    }
    throw;
  }
  if (!child) return nullptr;
  return start(request.child, std::move(child));
}

void NcclBackend::finalize() {
  drain("finalize");
  finalized_ = true;
  {
    const Lock lock = lock_unless_failed();
    custom_collectives_.release();
  }
  remote_.close(context_.timeout());
  if (handle_->close(context_.timeout())) return;
  fail(ErrorKind::kTimeout, "finalize: expected NCCL to free '", runtime_->name, "' within ",
       context_.timeout().count(), " ms, got no answer; it goes on in the background");
}

}  // namespace torch_overlap
