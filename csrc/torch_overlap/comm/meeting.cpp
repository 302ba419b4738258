#include "torch_overlap/comm/meeting.h"

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

// How long a wait in the store may keep give_up from being asked.
constexpr Milliseconds kMeetingSlice{200};

// What a member says: fields, then its list, a line each.
std::string encode_said(const MeetingRequest& request) {
  std::string text =
      concat("=", request.me.generation, "\n", request.me.old_rank, "\n", request.me.old_size, "\n",
             request.me.formation, "\n", request.digest, "\n", request.ordered ? "list" : "set");
  for (const auto& handle : request.handles) text += "\n" + handle;
  return text;
}

struct Said {
  Candidate who;
  std::string wish;  // what must be equal on all: digest, list or set, handles
};

Said decode_said(const std::string& handle, const std::string& text) {
  const auto lines = split_string(text, '\n');
  TORCH_OVERLAP_CHECK(lines.size() > 6 && text[0] == '=', kRuntime,
                      "reconfigure: expected what a member says in the store, got '", text, "'");
  Said said;
  said.who = {.handle = handle,
              .generation = static_cast<uint64_t>(parse_int(lines[0].substr(1), "reconfigure")),
              .old_rank = static_cast<int>(parse_int(lines[1], "reconfigure")),
              .old_size = static_cast<int>(parse_int(lines[2], "reconfigure")),
              .formation = lines[3]};
  for (size_t i = 4; i < lines.size(); ++i) said.wish += concat(i == 4 ? "" : ", ", lines[i]);
  return said;
}

class Meeter {
 public:
  Meeter(c10::intrusive_ptr<c10d::Store> place, const MeetingRequest& request)
      : place_(std::move(place)), request_(request) {}

  // By handle.
  std::map<std::string, Said> run(Milliseconds timeout, const std::function<void()>& give_up) {
    const auto deadline = Clock::now() + std::min(timeout, kLongestTimeout);
    const std::string text = encode_said(request_);
    mine_ = decode_said(request_.me.handle, text).wish;
    in_store([&] { place_->set(request_.me.handle, to_bytes(text)); });
    std::vector<std::string> missing = request_.handles;
    while (true) {
      listen(missing);
      if (missing.empty()) return std::move(said_);
      const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());
      try {
        give_up();
        check_interrupt();
        TORCH_OVERLAP_CHECK(
            left.count() > 0, kTimeout, "reconfigure: expected all ", request_.handles.size(),
            " members of '", request_.name, "' under uuid ", request_.uuid, " within ",
            (timeout + request_.aborting).count(), " ms", after_abort(timeout), ", got none of ",
            list_string(missing), "; leave out those that are lost and use another uuid");
      } catch (const Error&) {
        // Who comes later must not take this rank for present.
        in_store([&] { (void)place_->deleteKey(request_.me.handle); });
        throw;
      }
      try {
        place_->wait(missing, std::min(left, kMeetingSlice));
      } catch (const std::exception&) {  // not all yet; if it is the store, listen() says so
      }
    }
  }

 private:
  // Takes what is new, and compares it with what this rank wants.
  void listen(std::vector<std::string>& missing) {
    std::erase_if(missing, [&](const std::string& handle) {
      std::optional<std::string> text;
      in_store([&] { text = get_if_there(*place_, handle); });
      if (!text) return false;
      Said said = decode_said(handle, *text);
      TORCH_OVERLAP_CHECK(said.wish == mine_, kValue,
                          "reconfigure: expected the same request under uuid ", request_.uuid,
                          " on all members of '", request_.name, "', got (", mine_, ") here and (",
                          said.wish, ") on ", handle);
      said_.emplace(handle, std::move(said));
      return true;
    });
  }

  // What a caller should know who gave time enough for a meeting.
  std::string after_abort(Milliseconds timeout) const {
    if (request_.aborting * 4 < timeout) return "";
    return concat(", of which the abort of what was under way took ", request_.aborting.count());
  }

  template <typename Body>
  void in_store(const Body& body) const {
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
  const MeetingRequest& request_;
  std::string mine_;
  std::map<std::string, Said> said_;
};

}  // namespace

void order_candidates(std::vector<Candidate>& candidates) {
  const auto key = [](const Candidate& one) {
    return std::tuple(-static_cast<int64_t>(one.generation), -one.old_size,
                      std::string_view(one.formation), one.old_rank, std::string_view(one.handle));
  };
  std::sort(candidates.begin(), candidates.end(),
            [&](const Candidate& a, const Candidate& b) { return key(a) < key(b); });
}

Meeting meet(const c10::intrusive_ptr<c10d::Store>& store, const MeetingRequest& request,
             Milliseconds timeout, const std::function<void()>& give_up) {
  const auto place = prefixed_store(
      store, concat(name_prefix(Env::read(), "reconfigure", request.name), "/", request.uuid));
  const auto said = Meeter(prefixed_store(place, "members"), request).run(timeout, give_up);

  std::vector<Candidate> members;
  for (const auto& handle : request.handles) members.push_back(said.at(handle).who);
  if (!request.ordered) order_candidates(members);

  Meeting meeting;
  bool together = true;
  for (size_t r = 0; r < members.size(); ++r) {
    if (members[r].handle == request.me.handle) meeting.rank = static_cast<int>(r);
    together = together && members[r].formation == request.me.formation;
    meeting.handles.push_back(members[r].handle);
    meeting.old_ranks.push_back(members[r].old_rank);
    meeting.generation = std::max(meeting.generation, members[r].generation + 1);
  }
  if (!together) meeting.old_ranks.clear();
  // Rank 0 uses a uuid once: nobody has written there, also not in another life of the name.
  meeting.store = prefixed_store(place, concat("store/", meeting.handles[0]));
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
