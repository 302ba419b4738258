#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "torch_overlap/comm/call.h"
#include "torch_overlap/comm/work.h"

namespace torch_overlap {

class TorchComm;

// Argument of the hooks. `call` is null for split, new_window and finalize; `ranks` and
// `split_name` are for split.
struct HookEvent {
  OpName name;
  uint64_t id;
  const Call* call = nullptr;
  const std::vector<int>* ranks = nullptr;
  const std::string* split_name = nullptr;
  // For the post-hook: the operation's work, or a null work if it could not be issued. The pointer
  // is null without `call`.
  const std::shared_ptr<TorchWork>* work = nullptr;
  // For the post-hook of a split: the new communicator, null if this rank is not a member.
  const std::shared_ptr<TorchComm>* child = nullptr;
};

// An ordered list of callbacks that may change while it runs. A call runs the callbacks that were
// in the list when it began, in the order in which they were added. Threads: any.
template <typename Signature>
class HookList;

template <typename... Args>
class HookList<void(Args...)> {
 public:
  using Hook = std::function<void(Args...)>;

  uint64_t add(Hook hook) {
    std::lock_guard lock(mutex_);
    auto next = std::make_shared<Entries>(*entries_);
    next->emplace_back(++last_, std::make_shared<Hook>(std::move(hook)));
    entries_ = std::move(next);
    active_.store(true, std::memory_order_release);
    return last_;
  }

  // Returns false if it was removed already.
  bool remove(uint64_t id) {
    std::shared_ptr<const Entries> old;  // destroyed after the lock is released, with its callbacks
    std::lock_guard lock(mutex_);
    old = entries_;
    auto next = std::make_shared<Entries>();
    for (const auto& entry : *old) {
      if (entry.first != id) next->push_back(entry);
    }
    const bool removed = next->size() != old->size();
    active_.store(!next->empty(), std::memory_order_release);
    entries_ = std::move(next);
    return removed;
  }

  bool empty() const { return !active_.load(std::memory_order_acquire); }

  void operator()(Args... args) const {
    if (empty()) return;
    std::shared_ptr<const Entries> entries;
    {
      std::lock_guard lock(mutex_);
      entries = entries_;
    }
    for (const auto& [id, hook] : *entries) (*hook)(args...);
  }

 private:
  using Entries = std::vector<std::pair<uint64_t, std::shared_ptr<Hook>>>;
  mutable std::mutex mutex_;
  std::shared_ptr<const Entries> entries_ = std::make_shared<Entries>();
  std::atomic<bool> active_{false};
  uint64_t last_ = 0;
};

// The hooks of one communicator. An exception in a pre-hook stops the operation before anything is
// sent. The post-hook runs once for each pre-hook round that succeeded, also if the operation
// itself then threw (`error` is set).
struct Hooks {
  HookList<void(const HookEvent&)> pre;
  HookList<void(const HookEvent&, std::exception_ptr error)> post;
  HookList<void()> abort;
  // Runs after the pre-hooks for every operation that is about to be issued. The call has its
  // record.
  HookList<void(const Call&)> record;
  // Runs when a split has made a communicator, before it is returned.
  HookList<void(const std::shared_ptr<TorchComm>& child)> split;

  // Runs `body`, then the post-hooks with the exception that the body threw, if any, and rethrows
  // it.
  template <typename Body>
  auto run_with_post_hook(const HookEvent& event, const Body& body) -> decltype(body()) {
    std::exception_ptr error;
    std::conditional_t<std::is_void_v<decltype(body())>, bool, decltype(body())> result{};
    try {
      if constexpr (std::is_void_v<decltype(body())>) {
        body();
      } else {
        result = body();
      }
    } catch (...) {
      error = std::current_exception();
    }
    post(event, error);
    if (error) std::rethrow_exception(error);
    if constexpr (!std::is_void_v<decltype(body())>) return result;
  }
};

}  // namespace torch_overlap
