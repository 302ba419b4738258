// TorchComm::split: the ranks tell each other what they want before anything is made.

#include <set>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/meeting.h"
#include "torch_overlap/comm/registry.h"
#include "torch_overlap/comm/store_bootstrap.h"
#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap {
namespace {

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
  const auto store = bootstrap(*members, concat("split #", sequence, " of '", name(), "'"));
  SplitArguments arguments;
  HookEvent event{.name = OpName::split, .id = take_op_id(), .ranks = &arguments.ranks};
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
    if (store) store->publish(concat("!", error.what()));
    throw;
  }
  return hooks_->around(event, [&] {
    return split_checked(*members, store.get(), sequence, arguments.ranks, arguments.name,
                         arguments.options);
  });
}

void TorchComm::agree_on_split(const Membership& members, StoreBootstrap* store,
                               const std::string& mine) const {
  const auto& context = members.context;
  const int size = context.size;
  std::vector<std::string> wishes(size);
  if (store != nullptr) {
    wishes = store->all_gather(mine);
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

std::shared_ptr<TorchComm> TorchComm::split_checked(const Membership& members,
                                                    StoreBootstrap* store, uint64_t sequence,
                                                    const std::vector<int>& ranks,
                                                    const std::optional<std::string>& child_name,
                                                    const OpOptions& options) {
  // All ranks tell all others what they want, good or bad, before anything is made: so a bad list
  // on one rank is an error on every rank, and nobody waits for a communicator that cannot come.
  agree_on_split(members, store, encode_wish(ranks, child_name, options));

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

}  // namespace torch_overlap
