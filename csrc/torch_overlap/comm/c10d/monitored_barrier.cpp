#include "torch_overlap/comm/c10d/monitored_barrier.h"

#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/bootstrap.h"
#include "torch_overlap/comm/store_access.h"

namespace torch_overlap {
namespace {

using Milliseconds = std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Additional time that the other ranks wait for rank 0's verdict, for round trips of the store.
constexpr Milliseconds kVerdictSlack{5000};

std::string missing_key(const std::string& key) { return key + "/missing"; }
std::string gave_up_key(const std::string& key) { return key + "/gave_up"; }

// Waits until `key` exists. Returns false at the deadline.
bool wait_for_key(c10d::Store& store, const std::string& key, Clock::time_point deadline) {
  const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());  // never early
  return poll(left, [&] { return store.check({key}); });
}

[[noreturn]] void fail_missing(const std::string& missing, int rank, int size,
                               Milliseconds timeout) {
  const bool several = missing.find(',') != std::string::npos;
  fail(ErrorKind::kTimeout, "monitored_barrier: Rank ", rank,
       " timed out in monitoredBarrier: expected all ", size,
       " ranks, got fewer: ", several ? "Ranks " : "Rank ", missing,
       " failed to pass monitoredBarrier in ", timeout.count(), " ms; look at what ",
       several ? "those ranks do" : "that rank does");
}

// Rank 0's part. Returns the missing ranks; empty if all have arrived.
std::string find_missing_ranks(c10d::Store& store, const std::string& key, int size,
                               Milliseconds timeout, bool wait_all_ranks) {
  const auto deadline = Clock::now() + timeout;
  std::string missing;
  for (int peer = 1; peer < size; ++peer) {
    if (wait_for_key(store, concat(key, "/", peer), deadline)) continue;
    missing += concat(missing.empty() ? "" : ", ", peer);
    if (!wait_all_ranks) break;
  }
  return missing;
}

// Called when all ranks have arrived and this rank knows it.
void delete_barrier_keys(c10d::Store& store, const std::string& key, int size) {
  std::vector<std::string> keys{missing_key(key), gave_up_key(key)};
  for (int r = 0; r < size; ++r) keys.push_back(concat(key, "/", r));
  release_keys(store, key + "/done", size, keys);
}

// Returns and publishes rank 0's verdict. The leading character makes the value of a successful
// barrier non-empty.
std::string decide(c10d::Store& store, const std::string& key, int size, Milliseconds timeout,
                   bool wait_all_ranks) {
  std::string missing;
  try {
    missing = find_missing_ranks(store, key, size, timeout, wait_all_ranks);
  } catch (const Error&) {  // interrupted
    store.set(missing_key(key), "=0");
    throw;
  }
  if (missing.empty() && store.check({gave_up_key(key)})) missing = "0";
  store.set(missing_key(key), "=" + missing);
  return missing;
}

// Returns rank 0's verdict on another rank.
std::string await_verdict(c10d::Store& store, const std::string& key, int rank, int size,
                          Milliseconds timeout) {
  // Rank 0's timeout starts at its own arrival, which may be later than this rank's.
  if (!wait_for_key(store, key + "/0", Clock::now() + timeout)) {
    // If rank 0 arrives just now, its verdict holds for all ranks; otherwise it will find that this
    // rank gave up.
    store.set(gave_up_key(key), std::string("1"));
    if (!store.check({key + "/0"})) fail_missing("0", rank, size, timeout);
  }
  const bool decided =
      wait_for_key(store, missing_key(key), Clock::now() + timeout + kVerdictSlack);
  TORCH_OVERLAP_CHECK(decided, kTimeout, "monitored_barrier: expected rank 0 to decide within ",
                      (timeout + kVerdictSlack).count(),
                      " ms, got nothing; it passes a longer timeout or has died");
  return store.get_to_str(missing_key(key)).substr(1);
}

}  // namespace

void monitored_barrier(c10d::Store& store, const std::string& key, int rank, int size,
                       Milliseconds timeout, bool wait_all_ranks) {
  const std::string mine = concat(key, "/", rank);
  store.set(mine, std::string("1"));
  std::string missing;
  try {
    missing = rank == 0 ? decide(store, key, size, timeout, wait_all_ranks)
                        : await_verdict(store, key, rank, size, timeout);
  } catch (const Error& error) {
    // An interrupted rank counts as missing for a rank 0 that has not looked yet.
    if (rank != 0 && error.kind() == ErrorKind::kInterrupted) delete_keys(store, {mine});
    throw;
  }
  if (!missing.empty()) fail_missing(missing, rank, size, timeout);
  delete_barrier_keys(store, key, size);
}

}  // namespace torch_overlap
