// Rendezvous of the ranks of a name, also after some of them gave up.
//
// A name has attempts, numbered in the store. All ranks that look for each other use the open
// attempt. Each attempt is decided once for all ranks, by the first rank that can: "met" by a rank
// that sees every rank, "left" by a rank whose timeout has expired. A rank that sees a decision
// opens the next attempt; after "left" a rank with time remaining continues there. Therefore one
// rank has met if and only if all have, and nothing in one attempt affects the next.
//
//   attempt            number of the open attempt; 0 if there is none yet
//   <n>/who/<rank>     the rank's request
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

// Returns the sizes that the latest ranks with this name reported, if they differ from this rank's.
std::string other_sizes(c10d::Store& sizes, RankAndSize who) {
  std::string text;
  for (int r = 0; r < who.size; ++r) {
    if (!sizes.check({size_key(r)})) continue;
    const auto size = to_text(sizes.get(size_key(r)));
    if (size != concat(who.size)) text += concat("; rank ", r, " came with size ", size);
  }
  return text;
}

// One rank's view of one attempt.
class Attempt {
 public:
  Attempt(c10d::Store& store, std::string number, RankAndSize who)
      : store_(store),
        number_(std::move(number)),
        who_(who),
        parts_(rank_keys(concat(number_, "/who"), who.size)) {}

  static std::string current_number(c10d::Store& store) {
    return store.check({kAttempt}) ? to_text(store.get(kAttempt)) : "0";
  }

  void join(const std::string& mine) { set_part(store_, parts_.keys()[who_.rank], mine); }
  bool is_decided() { return store_.check({decision_key()}); }
  bool have_all_joined() { return parts_.all(store_); }
  std::vector<int> missing() const { return parts_.missing(store_); }

  // Returns true if all have met, according to the first decision; `proposal` is this rank's.
  bool decide(const char* proposal) {
    const auto decision = store_.compareSet(decision_key(), to_bytes(""), to_bytes(proposal));
    const auto next = parse_int(number_, "new_comm") + 1;
    store_.compareSet(kAttempt, to_bytes(next == 1 ? "" : number_), to_bytes(concat(next)));
    return to_text(decision) == kMet;
  }

  // Returns all ranks' requests. The last rank to read deletes the keys.
  std::vector<std::string> read() {
    auto all = try_get_all(store_, parts_.keys());
    TORCH_OVERLAP_CHECK(all, kRuntime, "expected what all ranks ask for under ", number_,
                        ", got less");
    auto keys = parts_.keys();
    keys.push_back(decision_key());
    release_keys(store_, concat(number_, "/read"), who_.size, keys);
    return *std::move(all);
  }
  void withdraw() { delete_keys(store_, {parts_.keys()[who_.rank]}); }

 private:
  std::string decision_key() const { return concat(number_, "/decision"); }

  c10d::Store& store_;
  const std::string number_;
  const RankAndSize who_;
  StoreKeys parts_;
};

struct AttemptResult {
  std::string attempt;
  std::vector<std::string> asked;  // by rank
};

// Waits for all ranks over as many attempts as needed. Throws kTimeout with the missing ranks.
AttemptResult rendezvous_until(c10d::Store& store, const std::string& what, RankAndSize who,
                               const std::string& mine, Milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  while (true) {
    const auto number = Attempt::current_number(store);
    Attempt attempt(store, number, who);
    attempt.join(mine);
    const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());
    bool all_there = false;
    try {
      (void)poll(left, [&] {
        all_there = attempt.have_all_joined();
        return all_there || attempt.is_decided();
      });
    } catch (const Error&) {  // interrupted: treat as a timeout
      if (attempt.decide(kLeft)) {
        (void)attempt.read();
      } else {
        attempt.withdraw();
      }
      throw;
    }
    if (attempt.decide(all_there ? kMet : kLeft)) return {number, attempt.read()};
    const bool is_over = Clock::now() >= deadline;
    const auto missing = is_over ? attempt.missing() : std::vector<int>();
    attempt.withdraw();
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
  (void)env.unique_id_exchange();  // throws unless the exchange uses the store
  store = open_store(env, store, who, what, timeout);
  // Ranks with different sizes wait for different keys and time out; the size keys tell them why.
  const auto sizes = make_prefix_store(store, name_prefix(env, "sizes", name));
  const auto common = make_prefix_store(store, name_prefix(env, concat(who.size), name));
  const auto mine = concat(digest, " size=", who.size);
  AttemptResult met;
  try {
    met = with_store_errors(what, [&] {
      sizes->set(size_key(who.rank), to_bytes(concat(who.size)));
      return rendezvous_until(*common, what, who, mine, timeout);
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
  return make_prefix_store(common, met.attempt);
}

}  // namespace torch_overlap
