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

constexpr milliseconds kShortestPeriod(300);
constexpr milliseconds kPeriodOfARank(1);
constexpr milliseconds kLongestPeriod(5000);
constexpr milliseconds kStoreTimeout(5000);
constexpr char kKey[] = "failed";

StorePtr connect_again(const StorePtr& store) {
  auto own = store->clone();
  own->setTimeout(kStoreTimeout);
  return own;
}

}  // namespace

// Lives as long as a thread that uses it.
struct PeerFailure::Shared {
  Shared(StorePtr store, int rank) : store(std::move(store)), rank(rank) {}

  const StorePtr store;
  const int rank;

  std::mutex mutex;  // of all below
  bool is_asking = false;
  std::optional<Clock::time_point> asked;
  std::optional<std::string> heard;
};

PeerFailure::PeerFailure(StorePtr store, int rank, int size)
    : period_(kShortestPeriod + size * kPeriodOfARank),
      shared_(store == nullptr ? nullptr : std::make_shared<Shared>(std::move(store), rank)) {}

void PeerFailure::tell(const std::string& message, milliseconds limit) noexcept {
  if (shared_ == nullptr) return;
  try {
    run_bounded(
        [store = shared_->store, text = concat("rank ", shared_->rank, ": ", message)] {
          const auto own = connect_again(store);
          if (!own->check({kKey})) own->set(kKey, std::vector<uint8_t>(text.begin(), text.end()));
        },
        limit);
  } catch (const std::exception&) {  // then they find out by their own timeouts
  }
}

std::optional<std::string> PeerFailure::heard(Clock::time_point begin,
                                              Clock::time_point now) noexcept {
  if (shared_ == nullptr) return std::nullopt;
  const std::lock_guard lock(shared_->mutex);
  if (shared_->heard || shared_->is_asking) return shared_->heard;
  const auto last = shared_->asked ? std::max(*shared_->asked, begin) : begin;
  const auto pause = std::clamp<Clock::duration>(last - begin, period_, kLongestPeriod);
  if (now - last < pause) return std::nullopt;
  try {
    std::thread([shared = shared_] {
      std::optional<std::string> heard;
      try {
        const auto own = connect_again(shared->store);
        if (own->check({kKey})) {
          const auto text = own->get(std::string(kKey));
          heard.emplace(text.begin(), text.end());
        }
      } catch (const std::exception&) {  // a store that is gone tells nothing
      }
      const std::lock_guard done(shared->mutex);
      shared->is_asking = false;
      shared->heard = std::move(heard);
    }).detach();
    shared_->is_asking = true;
    shared_->asked = now;
  } catch (const std::exception&) {  // no thread to be had: another time
  }
  return std::nullopt;
}

}  // namespace torch_overlap
