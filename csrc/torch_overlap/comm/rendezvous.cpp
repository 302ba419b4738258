// How the ranks of a name meet, also after some of them gave up.
//
// A name has attempts, numbered in the store. All who look for each other do it in the one that is
// open, and each attempt is decided once for all ranks, by whoever can first: "met" by a rank that
// sees every rank there, "left" by a rank whose time is over. Whoever sees a decision opens the
// next attempt; after "left" a rank that has time goes on there. So a rank has met if and only if
// all have, and what happened in one attempt is of no consequence for the next.
//
//   attempt            the number of the open one; 0 where there is none yet
//   <n>/who/<rank>     what the rank asks for
//   <n>/decision       met, or left

#include <chrono>

#include "torch_overlap/comm/bootstrap.h"
#include "torch_overlap/comm/store_access.h"

namespace torch_overlap {
namespace {

using Clock = std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr const char* kAttempt = "attempt";
constexpr const char* kMet = "met";
constexpr const char* kLeft = "left";

std::string to_text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string size_key(int rank) { return concat("size/", rank); }

// What the ranks that came last with this name said about its size, where it is not ours.
std::string other_sizes(c10d::Store& sizes, RankAndSize who) {
  std::string text;
  for (int r = 0; r < who.size; ++r) {
    if (!sizes.check({size_key(r)})) continue;
    const auto size = to_text(sizes.get(size_key(r)));
    if (size != concat(who.size)) text += concat("; rank ", r, " came with size ", size);
  }
  return text;
}

// One attempt, as one rank sees it.
class Attempt {
 public:
  Attempt(c10d::Store& store, std::string number, RankAndSize who)
      : store_(store),
        number_(std::move(number)),
        who_(who),
        parts_(part_keys(concat(number_, "/who"), who.size)) {}

  static std::string open_one(c10d::Store& store) {
    return store.check({kAttempt}) ? to_text(store.get(kAttempt)) : "0";
  }

  void take_part(const std::string& mine) { put_part(store_, parts_.keys()[who_.rank], mine); }
  bool is_decided() { return store_.check({decision_key()}); }
  bool all_are_there() { return parts_.all(store_); }
  std::vector<int> missing() const { return parts_.missing(store_); }

  // Whether all have met, as the first to decide said; `proposal` is this rank's.
  bool have_met(const char* proposal) {
    const auto decision = store_.compareSet(decision_key(), to_bytes(""), to_bytes(proposal));
    const auto next = parse_int(number_, "new_comm") + 1;
    store_.compareSet(kAttempt, to_bytes(next == 1 ? "" : number_), to_bytes(concat(next)));
    return to_text(decision) == kMet;
  }

  // What all ask for. The last to read deletes the keys.
  std::vector<std::string> read() {
    auto all = get_parts(store_, parts_.keys());
    TORCH_OVERLAP_CHECK(all, kRuntime, "expected what all ranks ask for under ", number_,
                        ", got less");
    auto keys = parts_.keys();
    keys.push_back(decision_key());
    done_with_keys(store_, concat(number_, "/read"), who_.size, keys);
    return *std::move(all);
  }
  void take_back() { delete_keys(store_, {parts_.keys()[who_.rank]}); }

 private:
  std::string decision_key() const { return concat(number_, "/decision"); }

  c10d::Store& store_;
  const std::string number_;
  const RankAndSize who_;
  KeysThere parts_;
};

struct Met {
  std::string attempt;
  std::vector<std::string> asked;  // by rank
};

// Throws kTimeout with the ranks that did not come.
Met meet_in_time(c10d::Store& store, const std::string& what, RankAndSize who,
                 const std::string& mine, Milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  while (true) {
    const auto number = Attempt::open_one(store);
    Attempt attempt(store, number, who);
    attempt.take_part(mine);
    const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());
    bool all_there = false;
    try {
      (void)poll(left, [&] {
        all_there = attempt.all_are_there();
        return all_there || attempt.is_decided();
      });
    } catch (const Error&) {  // interrupted: as if its time were over
      if (attempt.have_met(kLeft)) {
        (void)attempt.read();
      } else {
        attempt.take_back();
      }
      throw;
    }
    if (attempt.have_met(all_there ? kMet : kLeft)) return {number, attempt.read()};
    const bool is_over = Clock::now() >= deadline;
    const auto missing = is_over ? attempt.missing() : std::vector<int>();
    attempt.take_back();
    if (!is_over) continue;
    fail(ErrorKind::kTimeout, what, ": expected ", who.size, " ranks within ", timeout.count(),
         " ms, got ", missing.empty() ? "the last too late" : "none of ranks ",
         missing.empty() ? "" : list_string(missing));
  }
}

}  // namespace

StorePtr rendezvous(const Env& env, const std::string& name, const std::string& digest,
                    Milliseconds timeout, StorePtr store, RankAndSize who) {
  const std::string what = concat("new_comm '", name, "'");
  (void)env.unique_id_exchange();  // refuses other ways than the store's
  store = open_store(env, store, who, what, timeout);
  // Ranks that do not agree on the size meet nobody: this is how they learn why.
  const auto sizes = prefixed_store(store, name_prefix(env, "sizes", name));
  const auto common = prefixed_store(store, name_prefix(env, concat(who.size), name));
  const auto mine = concat(digest, " size=", who.size);
  Met met;
  try {
    met = in_store(what, [&] {
      sizes->set(size_key(who.rank), to_bytes(concat(who.size)));
      return meet_in_time(*common, what, who, mine, timeout);
    });
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimeout) throw;
    fail(ErrorKind::kTimeout, error.what(), other_sizes(*sizes, who));
  }
  for (int r = 0; r < who.size; ++r) {
    TORCH_OVERLAP_CHECK(met.asked[r] == mine, kValue, "new_comm: expected the same request for '",
                        name, "' on all ranks, got '", mine, "' on rank ", who.rank, " and '",
                        met.asked[r], "' on rank ", r);
  }
  return prefixed_store(common, met.attempt);
}

}  // namespace torch_overlap
