#include "torch_overlap/comm/peer_failure.h"

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "torch_overlap/base/strings.h"
#include "torch_overlap/comm/bounded.h"

namespace torch_overlap {
namespace {

using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr milliseconds kMinPeriod(300);
constexpr milliseconds kPeriodPerRank(1);
constexpr milliseconds kMaxPeriod(5000);
constexpr milliseconds kStoreTimeout(5000);
constexpr char kKey[] = "failed";

StorePtr clone_store_with_timeout(const StorePtr& store) {
  auto own = store->clone();
  own->setTimeout(kStoreTimeout);
  return own;
}

}  // namespace

// Shared with the threads that use it, which may outlive the PeerFailure.
struct PeerFailure::Shared {
  Shared(StorePtr store, int rank) : store(std::move(store)), rank(rank) {}

  const StorePtr store;
  const int rank;

  std::mutex mutex;  // guards all members below
  bool is_asking = false;
  std::optional<Clock::time_point> asked;
  std::optional<std::string> peer_error;
};

PeerFailure::PeerFailure(StorePtr store, int rank, int size)
    : period_(kMinPeriod + size * kPeriodPerRank),
      shared_(store == nullptr ? nullptr : std::make_shared<Shared>(std::move(store), rank)) {}

void PeerFailure::publish(const std::string& message, milliseconds limit) noexcept {
  if (shared_ == nullptr) return;
  try {
    run_with_timeout(
        [store = shared_->store, text = concat("rank ", shared_->rank, ": ", message)] {
          const auto own = clone_store_with_timeout(store);
          if (!own->check({kKey})) own->set(kKey, std::vector<uint8_t>(text.begin(), text.end()));
        },
        limit);
  } catch (const std::exception&) {  // the peers then rely on their own timeouts
  }
}

std::optional<std::string> PeerFailure::peer_error(Clock::time_point begin,
                                                   Clock::time_point now) noexcept {
  if (shared_ == nullptr) return std::nullopt;
  const std::lock_guard lock(shared_->mutex);
  if (shared_->peer_error || shared_->is_asking) return shared_->peer_error;
  const auto last = shared_->asked ? std::max(*shared_->asked, begin) : begin;
  const auto pause = std::clamp<Clock::duration>(last - begin, period_, kMaxPeriod);
  if (now - last < pause) return std::nullopt;
  try {
    std::thread([shared = shared_] {
      std::optional<std::string> peer_error;
      try {
        const auto own = clone_store_with_timeout(shared->store);
        if (own->check({kKey})) {
          const auto text = own->get(std::string(kKey));
          peer_error.emplace(text.begin(), text.end());
        }
      } catch (const std::exception&) {  // a store that has ended reports nothing
      }
      const std::lock_guard done(shared->mutex);
      shared->is_asking = false;
      shared->peer_error = std::move(peer_error);
    }).detach();
    shared_->is_asking = true;
    shared_->asked = now;
  } catch (const std::exception&) {  // no thread could be started: retry at the next call
  }
  return std::nullopt;
}

}  // namespace torch_overlap
