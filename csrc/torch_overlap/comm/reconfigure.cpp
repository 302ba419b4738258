// Changes of a live communicator: its members, its timeout, its hints.

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/collectives/select.h"
#include "torch_overlap/comm/call_record.h"
#include "torch_overlap/comm/host/host_work.h"
#include "torch_overlap/comm/mismatch.h"
#include "torch_overlap/comm/regroup_rendezvous.h"
#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<std::string> handle_list(const ReconfigureOptions& options) {
  if (const auto* list = std::get_if<std::vector<std::string>>(&options.init_handles)) return *list;
  const auto& set = std::get<std::set<std::string>>(options.init_handles);
  return {set.begin(), set.end()};
}

void check_handles(const std::vector<std::string>& handles, const std::string& mine) {
  TORCH_OVERLAP_CHECK(std::find(handles.begin(), handles.end(), mine) != handles.end(), kValue,
                      "reconfigure: expected this rank's own handle '", mine,
                      "' among init_handles, got ", list_string(handles));
  std::set<std::string> seen;
  for (const auto& handle : handles) {
    TORCH_OVERLAP_CHECK(!handle.empty() && handle.find('\n') == std::string::npos, kValue,
                        "reconfigure: expected what get_init_handle() gave, got '", handle, "'");
    TORCH_OVERLAP_CHECK(seen.insert(handle).second, kValue,
                        "reconfigure: expected each handle once, got '", handle, "' twice");
  }
}

std::shared_ptr<MismatchCheck> mismatch_check(const BackendContext& context) {
  if (!context.store || context.size == 1) return nullptr;
  return std::make_shared<MismatchCheck>(context.store, context.rank, context.size);
}

// Returns what this rank publishes in the rendezvous.
RegroupRendezvousRequest make_regroup_request(const TorchComm& comm, const Membership& before,
                                              const ReconfigureOptions& options,
                                              const std::vector<std::string>& handles,
                                              const ResolvedOptions& resolved) {
  RegroupRendezvousRequest regroup_request;
  regroup_request.name = comm.name();
  regroup_request.uuid = options.uuid;
  regroup_request.handles = handles;
  regroup_request.ordered = std::holds_alternative<std::vector<std::string>>(options.init_handles);
  regroup_request.digest = concat("backend=", comm.backend_name(),
                                  " device=", c10::DeviceTypeName(comm.device().type(), true),
                                  resolved.check_mismatch ? " check_mismatch" : "",
                                  " custom_collectives=", to_string(resolved.custom_collectives));
  regroup_request.me = {.handle = comm.init_handle(),
                        .generation = before.generation,
                        .old_rank = before.context.rank,
                        .old_size = before.context.size,
                        .formation = concat(before.generation, "@", before.handles.at(0))};
  return regroup_request;
}

// Aborts after a failed reconfigure. Uses abort_async(), because the timeout may have expired, and
// only warns of errors, because the caller throws the reconfigure's own.
void abort_without_throw(const Membership& members) {
  members.context.record->state.store(CommRecord::State::kAborted);
  try {
    members.backend->abort_async(/*notify_peers=*/true);
  } catch (const std::exception& error) {
    TORCH_WARN("reconfigure of '", members.context.name, "': abort failed: ", error.what());
  }
}

// Returns a completed work, for operations that block.
WorkPtr done_work(const std::string& name) {
  Call call;
  call.name = OpName::barrier;
  call.primitive = Primitive::barrier;
  call.comm = name;
  return HostWork::completed(std::move(call));
}

}  // namespace

template <typename Change>
void TorchComm::change(const Change& apply) {
  const std::lock_guard lock(membership_mutex_);
  auto next = std::make_shared<Membership>(*membership());
  apply(*next);
  membership_ = std::move(next);
}

void TorchComm::begin(std::shared_ptr<Backend> backend) {
  const auto members = membership();
  const auto& context = members->context;
  std::vector<std::string> handles;
  if (context.options.enable_reconfigure && context.store) {
    handles = exchange(*context.store, "handles", context.rank, context.size, init_handle_,
                       context.options.timeout);
  }
  change([&](Membership& next) {
    next.backend = std::move(backend);
    next.handles = std::move(handles);
    next.mismatch = mismatch_check(next.context);
  });
}

void TorchComm::set_timeout(Milliseconds timeout) {
  require_not_finalized("set_timeout");
  TORCH_OVERLAP_CHECK(timeout.count() > 0, kValue,
                      "set_timeout: expected a timeout of at least 1 ms, got ", timeout.count(),
                      " ms");
  const Milliseconds bounded = std::min(timeout, kMaxTimeout);
  change([&](Membership& members) { members.context.options.timeout = bounded; });
  timeout_->store(bounded);
}

ResolvedOptions TorchComm::options_with(const Hints& hints) const {
  ResolvedOptions merged = options();
  merge_hints(merged, hints);
  const auto entry = find_backend(backend_name_);
  if (entry && entry->check_hints) entry->check_hints(merged.hints);
  return merged;
}

void TorchComm::set_hints(const Hints& hints) {
  require_not_finalized("set_hints");
  (void)options_with(hints);  // throws on a hint that cannot be parsed
  change([&](Membership& members) { merge_hints(members.context.options, hints); });
}

WorkPtr TorchComm::reconfigure(const ReconfigureOptions& options) {
  require_own_process("reconfigure");
  check_not_capturing("reconfigure", device_);
  const auto before = membership();
  TORCH_OVERLAP_CHECK(
      before->context.options.enable_reconfigure, kState,
      "reconfigure: expected a communicator made with enable_reconfigure=True, got '", name(),
      "'; its members stay what they are");
  TORCH_OVERLAP_CHECK(options.timeout.count() >= 0, kValue,
                      "reconfigure: expected a timeout >= 0, got ", options.timeout.count(), " ms");
  const auto handles = handle_list(options);
  check_handles(handles, init_handle_);
  (void)options_with(options.hints);  // throws on a hint that cannot be parsed

  State expected = State::kActive;
  if (!state_.compare_exchange_strong(expected, State::kReconfiguring)) {
    const bool aborted = expected == State::kAborted &&
                         state_.compare_exchange_strong(expected, State::kReconfiguring);
    TORCH_OVERLAP_CHECK(
        aborted, kState, "reconfigure: expected a live or aborted communicator, got '", name(),
        "', which ", expected == State::kReconfiguring ? "is being reconfigured" : "was finalized");
  }
  try {
    TORCH_OVERLAP_CHECK(used_uuids_.insert(options.uuid).second, kValue,
                        "reconfigure: expected a uuid that '", name(), "' has not used, got ",
                        options.uuid, "; another one keeps late ranks of an old call out");
  } catch (...) {
    state_.store(expected);
    throw;
  }
  try {
    auto next = next_generation(options, handles);
    {
      const std::lock_guard lock(membership_mutex_);
      // The timeout may have been changed meanwhile; the hints are those of this call.
      next->context.options.timeout = membership()->context.options.timeout;
      membership_ = next;
    }
    drop_attachments();
    before->context.record->state.store(CommRecord::State::kClosed);
    expected = State::kReconfiguring;
    if (!state_.compare_exchange_strong(expected, State::kActive)) {
      fail(ErrorKind::kState, "reconfigure: expected no abort() meanwhile, got one; '", name(),
           "' stays aborted");
    }
  } catch (...) {
    const auto error = std::current_exception();
    const auto after = membership();
    abort_without_throw(*before);
    if (after != before) abort_without_throw(*after);
    state_.store(State::kAborted);
    std::rethrow_exception(error);
  }
  return done_work(name());
}

std::shared_ptr<Membership> TorchComm::next_generation(const ReconfigureOptions& options,
                                                       const std::vector<std::string>& handles) {
  const auto before = membership();
  const BackendContext& old = before->context;
  auto next = std::make_shared<Membership>();
  next->context = old;
  merge_hints(next->context.options, options.hints);
  const Milliseconds timeout =
      options.timeout.count() > 0 ? std::min(options.timeout, kMaxTimeout) : old.options.timeout;
  const auto begin = Clock::now();
  const auto left = [deadline = begin + timeout] {
    return std::max(std::chrono::ceil<Milliseconds>(deadline - Clock::now()), Milliseconds(1));
  };

  const auto rendezvous_with_members = [&] {
    const auto ended = std::chrono::floor<Milliseconds>(Clock::now() - begin);
    RegroupRequest request;
    if (old.store) {
      RegroupRendezvousRequest regroup_request =
          make_regroup_request(*this, *before, options, handles, next->context.options);
      regroup_request.aborting = ended;
      const auto store =
          open_store(Env::read(), old.user_store, {old.rank, old.size}, "reconfigure", left());
      auto rendezvous = rendezvous_members(store, regroup_request, left(), [this] {
        TORCH_OVERLAP_CHECK(state_.load() == State::kReconfiguring, kState,
                            "reconfigure: expected no abort() meanwhile, got one of '", name(),
                            "'");
      });
      next->context.rank = rendezvous.rank;
      next->context.store = std::move(rendezvous.store);
      next->generation = rendezvous.generation;
      next->handles = std::move(rendezvous.handles);
      request.old_ranks = std::move(rendezvous.old_ranks);
    } else {  // a backend without peers: all listed members are present
      const auto me = std::find(handles.begin(), handles.end(), init_handle_);
      next->context.rank = static_cast<int>(me - handles.begin());
      next->generation = before->generation + 1;
      next->handles = handles;
    }
    next->context.size = static_cast<int>(handles.size());
    next->ranks_in_world.resize(handles.size());
    std::iota(next->ranks_in_world.begin(), next->ranks_in_world.end(), 0);
    next->context.record =
        make_comm_record(name(), backend_name_, next->context.rank, next->ranks_in_world);

    request.context = next->context;
    request.context.options.timeout = left();
    return request;
  };
  next->backend = before->backend->regroup(rendezvous_with_members, timeout);
  next->mismatch = mismatch_check(next->context);
  return next;
}

}  // namespace torch_overlap
