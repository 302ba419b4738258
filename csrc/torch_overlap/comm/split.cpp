// Implements TorchComm::split: the ranks exchange their requests before anything is made.

#include <set>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/call_record.h"
#include "torch_overlap/comm/recorder.h"
#include "torch_overlap/comm/registry.h"
#include "torch_overlap/comm/regroup_rendezvous.h"
#include "torch_overlap/comm/store_bootstrap.h"
#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap {
namespace {

// Returns one rank's request in a split, as text for the store. It must be equal on all members of
// a part.
//   "0,2,3|<timeout>|<name>|<key>=<value>|..."   the list of ranks may be empty
//   "!<why>"                                     the call failed on this rank before it began
std::string encode_split_request(const std::vector<int>& ranks,
                                 const std::optional<std::string>& name, const OpOptions& options) {
  std::string text;
  for (const int rank : ranks) text += concat(text.empty() ? "" : ",", rank);
  text += concat("|", options.timeout.count(), "|", name.value_or(""));
  for (const auto& [key, value] : options.hints) text += concat("|", key, "=", value);
  return text;
}

std::vector<int> ranks_of_split_request(const std::string& wish) {
  std::vector<int> ranks;
  const std::string list = wish.substr(0, wish.find('|'));
  if (list.empty()) return ranks;
  for (const auto& part : split_string(list, ',')) {
    ranks.push_back(static_cast<int>(parse_int(part, "split")));
  }
  return ranks;
}

// Returns why `ranks` is invalid as the list of rank `me`; empty if it is valid.
std::string invalid_ranks_reason(const std::vector<int>& ranks, int me, int size) {
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

std::shared_ptr<TorchComm> TorchComm::split(const std::vector<int>& ranks,
                                            std::optional<std::string> child_name,
                                            const OpOptions& options) {
  return split([&]() -> SplitArguments { return {ranks, child_name, options}; });
}

std::shared_ptr<TorchComm> TorchComm::split(const std::function<SplitArguments()>& read) {
  require_active("split");
  // Count the split even if it fails: all ranks must agree on the number of the next one.
  const auto members = membership();
  const uint64_t sequence = members->splits->fetch_add(1);
  const auto store = bootstrap(*members, concat("split #", sequence, " of '", name(), "'"));
  SplitArguments arguments;
  HookEvent event{.name = OpName::split, .id = allocate_op_id(), .ranks = &arguments.ranks};
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
    check_not_capturing("split", device_);
    hooks_->pre(event);
  } catch (const std::exception& error) {
    // Notify the other ranks at once, so that they do not wait for this rank.
    if (store) store->publish(concat("!", error.what()));
    throw;
  }
  std::shared_ptr<TorchComm> child;
  event.child = &child;
  const auto record = record_split(*members, event.id);
  return hooks_->run_with_post_hook(event, [&] {
    try {
      child = split_checked(*members, store.get(), sequence, arguments.ranks, arguments.name,
                            arguments.options);
    } catch (...) {
      if (record) record->ended(std::current_exception());
      throw;
    }
    if (record) record->ended(nullptr);
    if (child) hooks_->split(child);
    return child;
  });
}

// Records the split like a call, so that a dump shows a rank that waits in it. It has the number of
// the collective before it.
std::shared_ptr<CallRecord> TorchComm::record_split(const Membership& members, uint64_t id) const {
  FlightRecorder& recorder = FlightRecorder::of_process();
  if (!recorder.is_enabled() && hooks_->record.empty()) return nullptr;
  const BackendContext& context = members.context;
  Call call;
  call.name = OpName::split;
  call.primitive = Primitive::barrier;
  call.id = id;
  call.sequence = context.record->collectives.load(std::memory_order_relaxed);
  call.timeout = context.timeout();
  call.comm = name();
  call.record = std::make_shared<CallRecord>(call, context.record);
  hooks_->record(call);
  recorder.add(call.record);
  call.record->started();
  return call.record;
}

void TorchComm::agree_on_split(const Membership& members, StoreBootstrap* store,
                               const std::string& mine) const {
  const auto& context = members.context;
  const int size = context.size;
  std::vector<std::string> requests(size);
  if (store != nullptr) {
    requests = store->all_gather(mine);
  } else {  // a backend without peers: all listed ranks have the same request
    for (const int r : ranks_of_split_request(mine)) {
      if (r >= 0 && r < size) requests[r] = mine;
    }
    requests[context.rank] = mine;
  }
  std::vector<std::vector<int>> lists;
  for (int r = 0; r < size; ++r) {
    TORCH_OVERLAP_CHECK(requests[r].empty() || requests[r][0] != '!', kValue, "split: rank ", r,
                        " of '", name(), "' could not take part: ", requests[r].substr(1));
    lists.push_back(ranks_of_split_request(requests[r]));
  }
  for (int r = 0; r < size; ++r) {
    const std::string fault = invalid_ranks_reason(lists[r], r, size);
    TORCH_OVERLAP_CHECK(fault.empty(), kValue, "split: ", fault, " (on rank ", r, " of '", name(),
                        "')");
  }
  for (int r = 0; r < size; ++r) {
    for (const int member : lists[r]) {
      TORCH_OVERLAP_CHECK(requests[member] == requests[r], kValue,
                          "split: expected the same ranks, name, timeout and hints on all members "
                          "of a part, got '",
                          requests[r], "' on rank ", r, " and '", requests[member], "' on rank ",
                          member);
    }
  }
}

std::shared_ptr<TorchComm> TorchComm::split_checked(const Membership& members,
                                                    StoreBootstrap* store, uint64_t sequence,
                                                    const std::vector<int>& ranks,
                                                    const std::optional<std::string>& child_name,
                                                    const OpOptions& options) {
  // All ranks exchange their requests, valid or not, before anything is made: an invalid list on
  // one rank is then an error on every rank, and no rank waits for a communicator that cannot be
  // made.
  agree_on_split(members, store, encode_split_request(ranks, child_name, options));

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
          make_prefix_store(members.context.store, concat("split/", sequence, "/", color));
    }
    if (options.timeout.count() > 0) {
      request.child.options.timeout = std::min(options.timeout, kMaxTimeout);
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

}  // namespace torch_overlap
