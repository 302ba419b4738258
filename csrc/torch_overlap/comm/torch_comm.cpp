#include "torch_overlap/comm/torch_comm.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <set>

#include "torch_overlap/base/env.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/direct.h"
#include "torch_overlap/comm/meeting.h"
#include "torch_overlap/comm/mismatch.h"
#include "torch_overlap/comm/process_end.h"
#include "torch_overlap/comm/recorder.h"
#include "torch_overlap/comm/recorder_dump.h"
#include "torch_overlap/comm/registry.h"
#include "torch_overlap/comm/validate.h"

namespace torch_overlap {
namespace {

std::atomic<uint64_t> next_op_id{0};

// "TorchComm::all_reduce": the operation's span in a profile. The text lives as long as the
// process.
const char* profiler_name(OpName name) {
  static const auto* names = [] {
    auto* out = new std::array<std::string, kOpNames>;
    for (size_t i = 0; i < out->size(); ++i) {
      (*out)[i] = concat("TorchComm::", to_string(static_cast<OpName>(i)));
    }
    return out;
  }();
  return (*names)[static_cast<size_t>(name)].c_str();
}

// "comm_0", "comm_1", ...: ranks that make their communicators in the same order, as they must, get
// the same names. Ranks that are threads, which say who they are, count for themselves.
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

// One rank's wish in a split, as text for the store. All members of one part must have the same.
//   "0,2,3|<timeout>|<name>|<key>=<value>|..."   the ranks may be none
//   "!<why>"                                     the call failed on this rank before it began
std::string encode_wish(const std::vector<int>& ranks, const std::optional<std::string>& name,
                        const OpOptions& options) {
  std::string text;
  for (const int rank : ranks) text += concat(text.empty() ? "" : ",", rank);
  text += concat("|", options.timeout.count(), "|", name.value_or(""));
  for (const auto& [key, value] : options.hints) text += concat("|", key, "=", value);
  return text;
}

std::vector<int> ranks_of_wish(const std::string& wish) {
  std::vector<int> ranks;
  const std::string list = wish.substr(0, wish.find('|'));
  if (list.empty()) return ranks;
  for (const auto& part : split_string(list, ',')) {
    ranks.push_back(static_cast<int>(parse_int(part, "split")));
  }
  return ranks;
}

// Where the ranks of `comm` meet for a split in its store; errors begin with it.
std::string split_key(const std::string& comm, uint64_t sequence) {
  return concat("split #", sequence, " of '", comm, "'");
}

// What is wrong with `ranks` as the list of `me`; empty if nothing.
std::string fault_of_list(const std::vector<int>& ranks, int me, int size) {
  if (ranks.empty()) return {};
  std::set<int> seen;
  for (const int rank : ranks) {
    if (rank < 0 || rank >= size) return concat("expected ranks in [0, ", size, "), got ", rank);
    if (!seen.insert(rank).second) return concat("expected each rank once, got ", rank, " twice");
  }
  if (seen.count(me) == 0) {
    return concat("expected a list with the calling rank ", me, ", got ", list_string(ranks));
  }
  return {};
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
  prepare_process_end(env);
  // The backend may outlive this object (a graph, a watchdog): it gets the hooks, not the owner.
  context.on_abort = [hooks = std::weak_ptr<Hooks>(hooks_)]() noexcept {
    try {
      if (auto alive = hooks.lock()) alive->abort();
    } catch (const std::exception& error) {
      TORCH_WARN("abort hook: ", error.what());
    }
  };
  context.live_timeout = timeout_;
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
                             " direct_collectives=", to_string(context.options.direct));
  detail::require_free_name(context.name);
  const RankAndSize me = who_am_i(env, who);
  context.rank = me.rank;
  context.size = me.size;
  context.device = resolve_device(device, env, me.rank);
  refuse_capture("new_comm", context.device);
  if (entry.has_peers) {
    context.given_store = options.store;
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
    // The threads and connections are the parent's: nothing of it may be ended, or waited for.
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

void TorchComm::require_own_process(std::string_view op) const {
  if (__builtin_expect(process_.is_current(), 1)) return;
  fail(ErrorKind::kState, op, ": expected the process that made communicator '", name(),
       "', got a fork of it; make a new communicator in the child, or start it with 'spawn'");
}

uint64_t TorchComm::take_op_id() { return next_op_id.fetch_add(1, std::memory_order_relaxed); }

WorkPtr TorchComm::issue(const Checker& check, Call call, bool async_op, const OpOptions& options) {
  require_active(to_string(call.name));
  TORCH_OVERLAP_CHECK(options.timeout.count() >= 0, kValue, to_string(call.name),
                      ": expected a timeout >= 0, got ", options.timeout.count(), " ms");
  call.async_op = async_op;
  const BackendContext& context = check.members->context;
  call.timeout = options.timeout.count() > 0 ? std::min(options.timeout, kLongestTimeout)
                                             : context.options.timeout;
  const OpHints hints = op_hints(options.hints);
  call.high_priority = hints.high_priority.value_or(context.options.is_high_priority_stream);
  call.direct = hints.direct.value_or(context.options.direct);
  call.id = take_op_id();
  call.comm = name();
  RECORD_FUNCTION(profiler_name(call.name), c10::ArrayRef<const c10::IValue>{});
  const Membership& members = *check.members;
  if (hooks_->pre.empty() && hooks_->post.empty()) return launch(members, std::move(call));

  WorkPtr work;
  const HookEvent event{.name = call.name, .id = call.id, .call = &call, .work = &work};
  hooks_->pre(event);
  // The post-hook must still see the call, so the backend gets a copy.
  return hooks_->around(event, [&] { return work = launch(members, call); });
}

WorkPtr TorchComm::launch(const Membership& members, Call call) {
  FlightRecorder& recorder = FlightRecorder::of_process();
  if (!recorder.is_enabled() && hooks_->record.empty()) {
    return launch_compared(members, std::move(call));
  }
  const auto record = std::make_shared<CallRecord>(call, members.context.record);
  call.record = record;
  hooks_->record(call);
  recorder.add(record);
  try {
    return launch_compared(members, std::move(call));
  } catch (...) {
    record->ended(std::current_exception());
    throw;
  }
}

WorkPtr TorchComm::launch_compared(const Membership& members, Call call) const {
  // One-sided operations have no counterpart on another rank.
  if (!members.context.options.check_mismatch || !members.mismatch || call.window != nullptr) {
    return members.backend->launch(std::move(call));
  }
  std::unique_lock<std::mutex> turn;
  try {
    turn = members.mismatch->compare(call, [&] {
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
  return members.backend->launch(std::move(call));
}

std::shared_ptr<TorchComm> TorchComm::split(const std::vector<int>& ranks,
                                            std::optional<std::string> child_name,
                                            const OpOptions& options) {
  return split([&]() -> SplitArguments { return {ranks, child_name, options}; });
}

std::shared_ptr<TorchComm> TorchComm::split(const std::function<SplitArguments()>& read) {
  require_active("split");
  // Counted whatever happens next: all ranks must agree on the number of the next split.
  const auto members = membership();
  const uint64_t sequence = members->splits->fetch_add(1);
  SplitArguments arguments;
  HookEvent event{.name = OpName::split,
                  .id = next_op_id.fetch_add(1, std::memory_order_relaxed),
                  .ranks = &arguments.ranks};
  try {
    arguments = read();
    const auto& [ranks, child_name, options] = arguments;
    event.split_name = child_name ? &*child_name : nullptr;
    TORCH_OVERLAP_CHECK(options.timeout.count() >= 0, kValue,
                        "split: expected a timeout >= 0, got ", options.timeout.count(), " ms");
    TORCH_OVERLAP_CHECK(!child_name || !child_name->empty(), kValue,
                        "split: expected a name that is not empty, got ''");
    if (child_name && !ranks.empty()) detail::require_free_name(*child_name);
    ResolvedOptions merged = members->context.options;
    merge_hints(merged, options.hints);
    refuse_capture("split", device_);
    hooks_->pre(event);
  } catch (const std::exception& error) {
    // The others hear of it at once instead of waiting for this rank.
    if (const auto& store = members->context.store) {
      publish(*store, split_key(name(), sequence), members->context.rank, members->context.size,
              concat("!", error.what()));
    }
    throw;
  }
  return hooks_->around(event, [&] {
    return split_checked(*members, sequence, arguments.ranks, arguments.name, arguments.options);
  });
}

void TorchComm::agree_on_split(const Membership& members, uint64_t sequence,
                               const std::string& mine) const {
  const auto& context = members.context;
  const int size = context.size;
  std::vector<std::string> wishes(size);
  if (context.store) {
    wishes = exchange(*context.store, split_key(name(), sequence), context.rank, size, mine,
                      context.options.timeout);
  } else {  // a backend without peers: those that are named want the same
    for (const int r : ranks_of_wish(mine)) {
      if (r >= 0 && r < size) wishes[r] = mine;
    }
    wishes[context.rank] = mine;
  }
  std::vector<std::vector<int>> lists;
  for (int r = 0; r < size; ++r) {
    TORCH_OVERLAP_CHECK(wishes[r].empty() || wishes[r][0] != '!', kValue, "split: rank ", r,
                        " of '", name(), "' could not take part: ", wishes[r].substr(1));
    lists.push_back(ranks_of_wish(wishes[r]));
  }
  for (int r = 0; r < size; ++r) {
    const std::string fault = fault_of_list(lists[r], r, size);
    TORCH_OVERLAP_CHECK(fault.empty(), kValue, "split: ", fault, " (on rank ", r, " of '", name(),
                        "')");
  }
  for (int r = 0; r < size; ++r) {
    for (const int member : lists[r]) {
      TORCH_OVERLAP_CHECK(wishes[member] == wishes[r], kValue,
                          "split: expected the same ranks, name, timeout and hints on all members "
                          "of a part, got '",
                          wishes[r], "' on rank ", r, " and '", wishes[member], "' on rank ",
                          member);
    }
  }
}

std::shared_ptr<TorchComm> TorchComm::split_checked(const Membership& members, uint64_t sequence,
                                                    const std::vector<int>& ranks,
                                                    const std::optional<std::string>& child_name,
                                                    const OpOptions& options) {
  // All ranks tell all others what they want, good or bad, before anything is made: so a bad list
  // on one rank is an error on every rank, and nobody waits for a communicator that cannot come.
  agree_on_split(members, sequence, encode_wish(ranks, child_name, options));

  SplitRequest request;
  std::shared_ptr<TorchComm> child;
  request.member = !ranks.empty();
  if (request.member) {
    const int color = *std::min_element(ranks.begin(), ranks.end());
    const auto position = std::find(ranks.begin(), ranks.end(), members.context.rank);
    request.color = color;
    request.child = members.context;
    request.child.name = child_name ? *child_name : concat(name(), "/split_", sequence, "_", color);
    request.child.rank = static_cast<int>(position - ranks.begin());
    request.child.size = static_cast<int>(ranks.size());
    if (members.context.store) {
      request.child.store =
          prefixed_store(members.context.store, concat("split/", sequence, "/", color));
    }
    if (options.timeout.count() > 0) {
      request.child.options.timeout = std::min(options.timeout, kLongestTimeout);
    }
    merge_hints(request.child.options, options.hints);
    std::vector<int> world;
    for (const int r : ranks) world.push_back(members.ranks_in_world.at(r));
    child.reset(new TorchComm(backend_name_, request.child, std::move(world)));
    request.child = child->membership()->context;
  }
  auto backend = members.backend->split(request);
  if (child) {
    child->begin(std::move(backend));
    detail::add_comm(child);
  }
  return child;
}

void TorchComm::finalize() {
  require_own_process("finalize");
  State expected = State::kActive;
  if (!state_.compare_exchange_strong(expected, State::kFinalizing)) {
    TORCH_OVERLAP_CHECK(expected != State::kReconfiguring, kState,
                        "finalize: expected a live communicator, got '", name(),
                        "', which is being reconfigured; abort() ends that");
    // After abort() a finalize only lets go of what is left.
    TORCH_OVERLAP_CHECK(expected == State::kAborted, kState,
                        "finalize: expected a live communicator, got '", name(),
                        "', which was already finalized");
    state_.store(State::kFinalized);
    membership()->context.record->state.store(CommRecord::State::kClosed);
    detail::remove_comm(this);
    drop_attachments();
    return;
  }
  const HookEvent event{.name = OpName::finalize,
                        .id = next_op_id.fetch_add(1, std::memory_order_relaxed)};
  try {
    refuse_capture("finalize", device_);
    hooks_->pre(event);
  } catch (...) {
    state_.store(State::kActive);  // nothing has happened yet
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
  hooks_->around(event, [&] { membership()->backend->finalize(); });
}

std::shared_ptr<CommAttachment> TorchComm::attachment(const std::string& name) const {
  const std::lock_guard lock(attachments_mutex_);
  const auto found = attachments_.find(name);
  return found == attachments_.end() ? nullptr : found->second;
}

void TorchComm::attach(const std::string& name, std::shared_ptr<CommAttachment> what) {
  const std::lock_guard lock(attachments_mutex_);
  attachments_[name].swap(what);  // the old one ends after the lock
}

std::vector<std::shared_ptr<CommAttachment>> TorchComm::attachments() const {
  std::vector<std::shared_ptr<CommAttachment>> all;
  const std::lock_guard lock(attachments_mutex_);
  for (const auto& [name, attached] : attachments_) all.push_back(attached);
  return all;
}

void TorchComm::drop_attachments() {
  std::map<std::string, std::shared_ptr<CommAttachment>> dropped;
  const std::lock_guard lock(attachments_mutex_);
  dropped.swap(attachments_);
}

void TorchComm::abort() {
  if (!process_.is_current()) return;  // a fork has nothing to end
  const auto members = membership();
  State expected = State::kActive;
  if (!state_.compare_exchange_strong(expected, State::kAborted)) {
    // A finalize in another thread may wait for a peer: it ends with the abort's error.
    if (expected == State::kFinalizing) members->backend->abort();
    // A reconfigure in another thread looks at the state, and leaves.
    if (expected == State::kReconfiguring) {
      state_.compare_exchange_strong(expected, State::kAborted);
    }
    return;
  }
  members->context.record->state.store(CommRecord::State::kAborted);
  // First: a hook may wait for a lock that a stuck operation's thread holds.
  members->backend->abort();
  members->context.on_abort();
}

bool TorchComm::is_aborted() const {
  const auto backend = membership()->backend;
  return state_.load() == State::kAborted || (backend && backend->is_aborted());
}

}  // namespace torch_overlap
