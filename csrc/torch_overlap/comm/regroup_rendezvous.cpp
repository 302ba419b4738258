#include "torch_overlap/comm/regroup_rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <optional>
#include <random>
#include <tuple>

#include "torch_overlap/base/env.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/interrupt.h"
#include "torch_overlap/comm/bootstrap.h"
#include "torch_overlap/comm/store_access.h"

namespace torch_overlap {
namespace {

using Clock = std::chrono::steady_clock;

// Maximum time for which a wait in the store delays the next check_aborted.
constexpr Milliseconds kStoreWaitSlice{200};

// Returns a member's entry: its fields, then its list, one per line.
std::string encode_member_entry(const RegroupRendezvousRequest& request) {
  std::string text =
      concat("=", request.me.generation, "\n", request.me.old_rank, "\n", request.me.old_size, "\n",
             request.me.formation, "\n", request.digest, "\n", request.ordered ? "list" : "set");
  for (const auto& handle : request.handles) text += "\n" + handle;
  return text;
}

struct MemberEntry {
  Candidate who;
  std::string request;  // must be equal on all members: digest, list or set, handles
};

MemberEntry decode_member_entry(const std::string& handle, const std::string& text) {
  const auto lines = split_string(text, '\n');
  TORCH_OVERLAP_CHECK(lines.size() > 6 && text[0] == '=', kRuntime,
                      "reconfigure: expected what a member says in the store, got '", text, "'");
  MemberEntry entry;
  entry.who = {.handle = handle,
               .generation = static_cast<uint64_t>(parse_int(lines[0].substr(1), "reconfigure")),
               .old_rank = static_cast<int>(parse_int(lines[1], "reconfigure")),
               .old_size = static_cast<int>(parse_int(lines[2], "reconfigure")),
               .formation = lines[3]};
  for (size_t i = 4; i < lines.size(); ++i) entry.request += concat(i == 4 ? "" : ", ", lines[i]);
  return entry;
}

class MemberRendezvous {
 public:
  MemberRendezvous(c10::intrusive_ptr<c10d::Store> place, const RegroupRendezvousRequest& request)
      : place_(std::move(place)), request_(request) {}

  // Returns the entries, by handle.
  std::map<std::string, MemberEntry> run(Milliseconds timeout,
                                         const std::function<void()>& check_aborted) {
    const auto deadline = Clock::now() + std::min(timeout, kMaxTimeout);
    const std::string text = encode_member_entry(request_);
    mine_ = decode_member_entry(request_.me.handle, text).request;
    with_store_errors([&] { place_->set(request_.me.handle, to_bytes(text)); });
    std::vector<std::string> missing = request_.handles;
    while (true) {
      read_new_entries(missing);
      if (missing.empty()) return std::move(entries_);
      const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());
      try {
        check_aborted();
        check_interrupt();
        TORCH_OVERLAP_CHECK(
            left.count() > 0, kTimeout, "reconfigure: expected all ", request_.handles.size(),
            " members of '", request_.name, "' under uuid ", request_.uuid, " within ",
            (timeout + request_.aborting).count(), " ms", after_abort(timeout), ", got none of ",
            list_string(missing), "; leave out those that are lost and use another uuid");
      } catch (const Error&) {
        // A late member must not assume that this rank is present.
        with_store_errors([&] { (void)place_->deleteKey(request_.me.handle); });
        throw;
      }
      try {
        place_->wait(missing, std::min(left, kStoreWaitSlice));
      } catch (const std::exception&) {  // not all yet; read_new_entries() reports a failed store
      }
    }
  }

 private:
  // Reads new entries, and compares them with this rank's request.
  void read_new_entries(std::vector<std::string>& missing) {
    std::erase_if(missing, [&](const std::string& handle) {
      std::optional<std::string> text;
      with_store_errors([&] { text = try_get(*place_, handle); });
      if (!text) return false;
      MemberEntry entry = decode_member_entry(handle, *text);
      TORCH_OVERLAP_CHECK(entry.request == mine_, kValue,
                          "reconfigure: expected the same request under uuid ", request_.uuid,
                          " on all members of '", request_.name, "', got (", mine_, ") here and (",
                          entry.request, ") on ", handle);
      entries_.emplace(handle, std::move(entry));
      return true;
    });
  }

  // Returns the text that explains a timeout in which the abort used a large share of the time.
  std::string after_abort(Milliseconds timeout) const {
    if (request_.aborting * 4 < timeout) return "";
    return concat(", of which the abort of what was under way took ", request_.aborting.count());
  }

  template <typename Body>
  void with_store_errors(const Body& body) const {
    try {
      body();
    } catch (const std::exception& error) {
      fail(ErrorKind::kRuntime, "reconfigure: expected the store of '", request_.name,
           "' to answer, got: ", error.what(),
           "; the store must outlive the ranks that are lost: let torchrun's agent or the launcher "
           "serve it");
    }
  }

  const c10::intrusive_ptr<c10d::Store> place_;
  const RegroupRendezvousRequest& request_;
  std::string mine_;
  std::map<std::string, MemberEntry> entries_;
};

}  // namespace

void sort_candidates(std::vector<Candidate>& candidates) {
  const auto key = [](const Candidate& one) {
    return std::tuple(-static_cast<int64_t>(one.generation), -one.old_size,
                      std::string_view(one.formation), one.old_rank, std::string_view(one.handle));
  };
  std::sort(candidates.begin(), candidates.end(),
            [&](const Candidate& a, const Candidate& b) { return key(a) < key(b); });
}

RegroupRendezvous rendezvous_members(const c10::intrusive_ptr<c10d::Store>& store,
                                     const RegroupRendezvousRequest& request, Milliseconds timeout,
                                     const std::function<void()>& check_aborted) {
  const auto place = make_prefix_store(
      store, concat(name_prefix(Env::read(), "reconfigure", request.name), "/", request.uuid));
  const auto entry =
      MemberRendezvous(make_prefix_store(place, "members"), request).run(timeout, check_aborted);

  std::vector<Candidate> members;
  for (const auto& handle : request.handles) members.push_back(entry.at(handle).who);
  if (!request.ordered) sort_candidates(members);

  RegroupRendezvous meeting;
  bool together = true;
  for (size_t r = 0; r < members.size(); ++r) {
    if (members[r].handle == request.me.handle) meeting.rank = static_cast<int>(r);
    together = together && members[r].formation == request.me.formation;
    meeting.handles.push_back(members[r].handle);
    meeting.old_ranks.push_back(members[r].old_rank);
    meeting.generation = std::max(meeting.generation, members[r].generation + 1);
  }
  if (!together) meeting.old_ranks.clear();
  // Rank 0 uses a uuid once, so no rank has written under its handle, also not in another life of
  // the name.
  meeting.store = make_prefix_store(place, concat("store/", meeting.handles[0]));
  return meeting;
}

std::string make_handle(int rank) {
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) host[0] = '?';
  std::random_device device;
  const uint64_t number = (static_cast<uint64_t>(device()) << 32) | device();
  std::ostringstream text;
  text << host.data() << ':' << getpid() << "/rank" << rank << '/' << std::hex << number;
  return text.str();
}

}  // namespace torch_overlap
