#include "torch_overlap/comm/peer_failure.h"

#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "torch_overlap/base/strings.h"

namespace torch_overlap {
namespace {

constexpr std::chrono::milliseconds kShortestPeriod(300);
constexpr std::chrono::milliseconds kPeriodOfARank(1);
constexpr char kKey[] = "failed";

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// A store's client serves one thread at a time, so the communicator's own is not used.
StorePtr connect_again(const StorePtr& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {  // a store written in Python need not have clone()
    return store;
  }
}

}  // namespace

// Lives as long as a thread that uses it.
struct PeerFailure::Shared {
  Shared(StorePtr store, int rank) : store(std::move(store)), rank(rank) {}

  const StorePtr store;
  const int rank;

  std::mutex mutex;  // of all below but `own`
  bool is_asking = false;
  std::optional<Clock::time_point> asked;
  std::optional<std::string> heard;

  StorePtr own;  // of the one thread that asks
};

PeerFailure::PeerFailure(StorePtr store, int rank, int size)
    : period_(kShortestPeriod + size * kPeriodOfARank),
      shared_(store == nullptr ? nullptr : std::make_shared<Shared>(std::move(store), rank)) {}

void PeerFailure::tell(const std::string& message) noexcept {
  if (shared_ == nullptr) return;
  try {
    {
      const std::lock_guard lock(shared_->mutex);
      if (shared_->heard) return;
    }
    std::thread([store = shared_->store, text = concat("rank ", shared_->rank, ": ", message)] {
      try {
        connect_again(store)->set(kKey, std::vector<uint8_t>(text.begin(), text.end()));
      } catch (const std::exception&) {  // then they find out by their own timeouts
      }
    }).detach();
  } catch (const std::exception&) {  // no thread to be had: the same
  }
}

std::optional<std::string> PeerFailure::heard(Clock::time_point now) noexcept {
  if (shared_ == nullptr) return std::nullopt;
  try {
    {
      const std::lock_guard lock(shared_->mutex);
      if (shared_->heard) return shared_->heard;
      if (shared_->is_asking || (shared_->asked && now - *shared_->asked < period_)) {
        return std::nullopt;
      }
      shared_->is_asking = true;
      shared_->asked = now;
    }
    std::thread([shared = shared_] {
      std::optional<std::string> heard;
      try {
        if (shared->own == nullptr) shared->own = connect_again(shared->store);
        if (shared->own->check({kKey})) {
          const auto text = shared->own->get(std::string(kKey));
          heard.emplace(text.begin(), text.end());
        }
      } catch (const std::exception&) {  // a store that is gone tells nothing
      }
      const std::lock_guard lock(shared->mutex);
      shared->is_asking = false;
      shared->heard = std::move(heard);
    }).detach();
  } catch (const std::exception&) {  // no thread to be had: another time
  }
  return std::nullopt;
}

}  // namespace torch_overlap
