#include "torch_overlap/comm/torch_comm.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

#include "torch_overlap/base/env.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/collectives/select.h"
#include "torch_overlap/comm/mismatch.h"
#include "torch_overlap/comm/process_abort.h"
#include "torch_overlap/comm/profile.h"
#include "torch_overlap/comm/recorder.h"
#include "torch_overlap/comm/recorder_dump.h"
#include "torch_overlap/comm/registry.h"
#include "torch_overlap/comm/regroup_rendezvous.h"
#include "torch_overlap/comm/store_bootstrap.h"
#include "torch_overlap/comm/validate.h"

namespace torch_overlap {
namespace {

std::atomic<uint64_t> next_op_id{0};

// Returns "comm_0", "comm_1", ... Ranks must make their communicators in the same order, and so get
// the same names. Ranks that are threads, which pass their rank explicitly, are counted separately.
std::string generated_name(bool is_thread) {
  static std::atomic<int> process_count{0};
  thread_local int thread_count = 0;
  return concat("comm_", is_thread ? thread_count++ : process_count++);
}

BackendEntry require_backend(const std::string& name) {
  auto entry = find_backend(name);
  TORCH_OVERLAP_CHECK(entry, kValue, "new_comm: expected a backend among ",
                      list_string(registered_backends()), ", got '", name, "'");
  return *std::move(entry);
}

void check_device(const std::string& backend, const BackendEntry& entry, c10::Device device) {
  const auto& types = entry.devices;
  TORCH_OVERLAP_CHECK(std::find(types.begin(), types.end(), device.type()) != types.end(), kType,
                      "new_comm: expected a device of backend '", backend, "' (",
                      list_string(types), "), got ", device);
}

}  // namespace

TorchComm::TorchComm(std::string backend_name, BackendContext context,
                     std::vector<int> ranks_in_world)
    : backend_name_(std::move(backend_name)),
      name_(context.name),
      device_(context.device),
      init_handle_(make_handle(context.rank)),
      hooks_(std::make_shared<Hooks>()),
      timeout_(std::make_shared<std::atomic<Milliseconds>>(context.options.timeout)) {
  context.record = make_comm_record(name_, backend_name_, context.rank, ranks_in_world);
  const Env env = Env::read();
  prepare_dumps(env);
  prepare_process_abort(env);
  // The backend may outlive this object (a graph, a watchdog), so it gets the hooks and not the
  // owner.
  context.on_abort = [hooks = std::weak_ptr<Hooks>(hooks_)]() noexcept {
    try {
      if (auto alive = hooks.lock()) alive->abort();
    } catch (const std::exception& error) {
      TORCH_WARN("abort hook: ", error.what());
    }
  };
  context.current_timeout = timeout_;
  auto members = std::make_shared<Membership>();
  members->context = std::move(context);
  members->ranks_in_world = std::move(ranks_in_world);
  membership_ = std::move(members);
}

std::shared_ptr<TorchComm> TorchComm::create(const std::string& backend, c10::Device device,
                                             std::optional<std::string> name,
                                             const CommOptions& options,
                                             std::optional<RankAndSize> who) {
  const std::string kind = to_lower(backend);
  const BackendEntry entry = require_backend(kind);
  check_device(kind, entry, device);
  const Env env = Env::read();

  BackendContext context;
  if (!name) name = options.name;
  context.name = name ? *name : generated_name(who.has_value());
  TORCH_OVERLAP_CHECK(!context.name.empty(), kValue,
                      "new_comm: expected a name that is not empty, got ''");
  context.options = resolve_options(options);
  const auto digest = concat("backend=", kind, " device=", c10::DeviceTypeName(device.type(), true),
                             context.options.check_mismatch ? " check_mismatch" : "",
                             " custom_collectives=", to_string(context.options.custom_collectives));
  detail::require_free_name(context.name);
  const RankAndSize me = resolve_rank_and_size(env, who);
  context.rank = me.rank;
  context.size = me.size;
  context.device = resolve_device(device, env, me.rank);
  check_not_capturing("new_comm", context.device);
  if (entry.has_peers) {
    context.user_store = options.store;
    context.store =
        rendezvous(env, context.name, digest, context.options.timeout, options.store, me);
  }

  std::vector<int> world(me.size);
  std::iota(world.begin(), world.end(), 0);
  std::shared_ptr<TorchComm> comm(new TorchComm(kind, std::move(context), std::move(world)));
  comm->begin(entry.make(comm->membership()->context));
  detail::add_comm(comm);
  return comm;
}

TorchComm::~TorchComm() {
  if (!process_.is_current()) {
    // The threads and connections belong to the parent: this process must neither end nor wait for
    // them.
    (void)new std::shared_ptr<const Membership>(membership());
    return;
  }
  detail::remove_comm(this);
  membership()->context.record->state.store(CommRecord::State::kClosed);
  const auto backend = membership()->backend;
  if (state_.load() != State::kActive || !backend) return;
  TORCH_WARN("communicator '", name(), "' is destroyed without finalize(); it is aborted");
  try {
    backend->abort();
  } catch (const std::exception& error) {
    TORCH_WARN("communicator '", name(), "': abort failed: ", error.what());
  }
}

std::string TorchComm::backend_version() const { return membership()->backend->version(); }

int64_t TorchComm::native_handle() const {
  require_active("native_handle");
  return membership()->backend->native_handle();
}

void TorchComm::require_active(std::string_view op) const {
  const State state = state_.load(std::memory_order_acquire);
  require_own_process(op);
  if (__builtin_expect(state == State::kActive, 1)) return;
  const char* what = "was finalized";
  if (state == State::kAborted) what = "was aborted";
  if (state == State::kReconfiguring) what = "is being reconfigured";
  fail(ErrorKind::kState, op, ": expected a live communicator, got '", name(), "', which ", what);
}

void TorchComm::require_not_finalized(std::string_view op) const {
  TORCH_OVERLAP_CHECK(!is_finalized(), kState, op, ": expected a live communicator, got '", name(),
                      "', which was finalized");
}

void TorchComm::require_own_process(std::string_view op) const {
  if (__builtin_expect(process_.is_current(), 1)) return;
  fail(ErrorKind::kState, op, ": expected the process that made communicator '", name(),
       "', got a fork of it; make a new communicator in the child, or start it with 'spawn'");
}

uint64_t TorchComm::allocate_op_id() { return next_op_id.fetch_add(1, std::memory_order_relaxed); }

WorkPtr TorchComm::issue(const Checker& check, Call call, bool async_op, const OpOptions& options) {
  require_active(to_string(call.name));
  TORCH_OVERLAP_CHECK(options.timeout.count() >= 0, kValue, to_string(call.name),
                      ": expected a timeout >= 0, got ", options.timeout.count(), " ms");
  call.async_op = async_op;
  call.bumps_versions = options.bumps_versions;
  const BackendContext& context = check.members->context;
  call.timeout = options.timeout.count() > 0 ? std::min(options.timeout, kMaxTimeout)
                                             : context.options.timeout;
  const OpHints hints = op_hints(to_string(call.name), options.hints);
  call.high_priority = hints.high_priority.value_or(context.options.is_high_priority_stream);
  call.custom_collectives = hints.custom_collectives.value_or(context.options.custom_collectives);
  call.id = allocate_op_id();
  call.comm = name();
  const Membership& members = *check.members;
  if (hooks_->pre.empty() && hooks_->post.empty()) return issue_recorded(members, std::move(call));

  WorkPtr work;
  const HookEvent event{.name = call.name, .id = call.id, .call = &call, .work = &work};
  hooks_->pre(event);
  // The post-hook must still see the call, so the backend gets a copy.
  return hooks_->run_with_post_hook(event, [&] { return work = issue_recorded(members, call); });
}

WorkPtr TorchComm::issue_recorded(const Membership& members, Call call) {
  call.sequence = members.context.record->next_sequence_number(call.primitive);
  const ProfileScope profile(call, *members.context.record);
  if (call.bumps_versions) call.bump_versions(members.context.rank);
  call.detach_tensors();
  FlightRecorder& recorder = FlightRecorder::of_process();
  if (!recorder.is_enabled() && hooks_->record.empty()) {
    return issue_compared(members, std::move(call));
  }
  const auto record = std::make_shared<CallRecord>(call, members.context.record);
  call.record = record;
  hooks_->record(call);
  recorder.add(record);
  try {
    return issue_compared(members, std::move(call));
  } catch (...) {
    record->ended(std::current_exception());
    throw;
  }
}

WorkPtr TorchComm::issue_compared(const Membership& members, Call call) const {
  // One-sided operations have no matching call on another rank.
  if (!members.context.options.check_mismatch || !members.mismatch || call.window != nullptr) {
    return members.backend->issue(std::move(call));
  }
  std::unique_lock<std::mutex> order_lock;
  try {
    order_lock = members.mismatch->compare(call, [&] {
      require_active(to_string(call.name));
      TORCH_OVERLAP_CHECK(!members.backend->is_aborted(), kState, to_string(call.name),
                          ": expected a live communicator, got '", name(),
                          "', which was aborted, or whose ranks are out of step");
    });
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kValue) members.backend->abort();
    throw;
  } catch (const std::exception& error) {
    members.backend->abort();
    fail(ErrorKind::kRuntime, call.describe(),
         ": expected the store to answer, which check_mismatch needs, got: ", error.what());
  }
  call.is_compared = true;
  return members.backend->issue(std::move(call));
}

void TorchComm::finalize() {
  require_own_process("finalize");
  State expected = State::kActive;
  if (!state_.compare_exchange_strong(expected, State::kFinalizing)) {
    TORCH_OVERLAP_CHECK(expected != State::kReconfiguring, kState,
                        "finalize: expected a live communicator, got '", name(),
                        "', which is being reconfigured; abort() ends that");
    // After abort(), finalize() only releases what is left.
    TORCH_OVERLAP_CHECK(expected == State::kAborted, kState,
                        "finalize: expected a live communicator, got '", name(),
                        "', which was already finalized");
    state_.store(State::kFinalized);
    membership()->context.record->state.store(CommRecord::State::kClosed);
    detail::remove_comm(this);
    drop_attachments();
    return;
  }
  // The hooks see the number that the next operation will get, because finalize is not an
  // operation.
  const HookEvent event{.name = OpName::finalize, .id = next_op_id.load(std::memory_order_relaxed)};
  try {
    check_not_capturing("finalize", device_);
    hooks_->pre(event);
  } catch (...) {
    state_.store(State::kActive);  // nothing was done yet
    throw;
  }
  detail::remove_comm(this);
  for (const auto& attached : attachments()) attached->drain(membership()->context.timeout());
  drop_attachments();
  const auto finalized = [this](void*) {
    state_.store(State::kFinalized);
    membership()->context.record->state.store(CommRecord::State::kClosed);
  };
  const std::unique_ptr<void, decltype(finalized)> at_end(this, finalized);
  hooks_->run_with_post_hook(event, [&] { membership()->backend->finalize(); });
}

std::shared_ptr<CommAttachment> TorchComm::attachment(std::string_view name) const {
  const std::lock_guard lock(attachments_mutex_);
  const auto found = attachments_.find(name);
  return found == attachments_.end() ? nullptr : found->second;
}

void TorchComm::attach(std::string_view name, std::shared_ptr<CommAttachment> what) {
  const std::lock_guard lock(attachments_mutex_);
  attachments_[std::string(name)].swap(what);  // the old one is destroyed after the lock
}

std::vector<std::shared_ptr<CommAttachment>> TorchComm::attachments() const {
  std::vector<std::shared_ptr<CommAttachment>> all;
  const std::lock_guard lock(attachments_mutex_);
  for (const auto& [name, attached] : attachments_) all.push_back(attached);
  return all;
}

std::unique_ptr<StoreBootstrap> TorchComm::bootstrap(const Membership& members, std::string name) {
  const BackendContext& context = members.context;
  if (!context.store) return nullptr;
  require_own_process(name);  // the connection to the store belongs to the parent
  ExchangeCallbacks owner;
  owner.abort_reason = [backend = std::weak_ptr(members.backend)] {
    const auto alive = backend.lock();
    return alive ? alive->failure() : "";
  };
  owner.departure_reason = [backend = std::weak_ptr(members.backend)](int rank) {
    const auto alive = backend.lock();
    return alive ? alive->departure_reason(rank) : "";
  };
  owner.on_missing = [self = weak_from_this(), generation = members.generation](bool has_left) {
    const auto alive = self.lock();
    return alive ? alive->abort_out_of_step(generation, has_left) : "";
  };
  return std::make_unique<StoreBootstrap>(context.store, std::move(name), context.rank,
                                          context.size, context.timeout(), std::move(owner));
}

std::string TorchComm::abort_out_of_step(uint64_t generation, bool has_left) {
  if (state_.load() == State::kReconfiguring || this->generation() != generation) return "";
  abort_with([has_left](Backend& backend) { backend.abort_async(/*notify_peers=*/has_left); });
  return concat("; '", name(),
                "' is aborted: its ranks are out of step; reconfigure it, or make a ", "new one");
}

void TorchComm::drop_attachments() {
  Attachments dropped;
  const std::lock_guard lock(attachments_mutex_);
  dropped.swap(attachments_);
}

void TorchComm::abort() {
  abort_with([](Backend& backend) { backend.abort(); });
}

void TorchComm::abort_with(const std::function<void(Backend&)>& end) {
  if (!process_.is_current()) return;  // a fork has no operations to end
  const auto members = membership();
  State expected = State::kActive;
  if (!state_.compare_exchange_strong(expected, State::kAborted)) {
    // A finalize in another thread may be waiting for a peer: it ends with the abort's error.
    if (expected == State::kFinalizing) members->backend->abort();
    // A reconfigure in another thread polls the state, and ends.
    if (expected == State::kReconfiguring) {
      state_.compare_exchange_strong(expected, State::kAborted);
    }
    return;
  }
  members->context.record->state.store(CommRecord::State::kAborted);
  // End the operations before the hooks run: a hook may wait for a lock that the thread of a stuck
  // operation holds.
  end(*members->backend);
  members->context.on_abort();
}

bool TorchComm::is_aborted() const {
  const auto backend = membership()->backend;
  return state_.load() == State::kAborted || (backend && backend->is_aborted());
}

}  // namespace torch_overlap
