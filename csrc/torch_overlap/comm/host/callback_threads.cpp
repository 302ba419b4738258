#include "torch_overlap/comm/host/callback_threads.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/shutdown.h"

namespace torch_overlap {
namespace {

// Time that a callback may run before the next one gets another thread.
constexpr auto kMaxCallbackDelay = std::chrono::milliseconds(1);
constexpr auto kKeepAlive = std::chrono::seconds(5);

class CallbackThreads {
 public:
  void run(std::function<void()> callback) {
    auto item = std::make_unique<Item>(std::move(callback));
    std::unique_lock lock(mutex_);
    queue_.push_back(std::move(item));
    // One thread runs callbacks. An idle one starts the next callback if the running one is slow.
    if (num_idle_ == 0 && !add_thread() && num_running_ == 0) {
      // No thread exists or can be created: the caller runs the callback.
      item = std::move(queue_.back());
      queue_.pop_back();
      lock.unlock();
      return run_item(std::move(item));
    }
    changed_.notify_one();
  }

 private:
  struct Item {
    explicit Item(std::function<void()> callback) : callback(std::move(callback)) {}
    BackgroundTask until_done;
    std::function<void()> callback;
  };

  // The lock must be held. Returns false if no thread can be created.
  bool add_thread() noexcept {
    try {
      std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
      return false;
    }
    ++num_idle_;
    return true;
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      if (!changed_.wait_for(lock, kKeepAlive, [this] { return !queue_.empty(); })) break;
      if (num_running_ > 0) {
        const uint64_t before = num_started_;
        changed_.wait_for(lock, kMaxCallbackDelay,
                          [&] { return num_running_ == 0 || queue_.empty(); });
        if (queue_.empty() || (num_running_ > 0 && num_started_ != before)) continue;
      }
      auto item = std::move(queue_.front());
      queue_.pop_front();
      --num_idle_;
      ++num_running_;
      ++num_started_;
      if (!queue_.empty() && num_idle_ == 0) (void)add_thread();
      lock.unlock();
      run_item(std::move(item));
      lock.lock();
      --num_running_;
      ++num_idle_;
      changed_.notify_all();
    }
    --num_idle_;
  }

  static void run_item(std::unique_ptr<Item> item) {
    const Permit permit;
    if (permit) {
      item->callback();
    } else {
      [[maybe_unused]] const Item* const kept = item.release();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Item>> queue_;
  int num_idle_ = 0;     // threads that wait for a callback, or for the running one
  int num_running_ = 0;  // threads inside a callback
  uint64_t num_started_ = 0;
};

// Never destroyed, because its threads run until the process ends. A forked child has none of the
// threads and creates its own instance.
struct Holder {
  ForkSafeMutex mutex;
  CallbackThreads* threads = nullptr;
  ProcessStamp made_in;
};

}  // namespace

void run_callback(std::function<void()> callback) {
  auto& holder = LeakySingleton<Holder>::get();
  std::unique_lock<std::mutex> lock(holder.mutex);
  if (holder.threads == nullptr || !holder.made_in.is_current()) {
    holder.threads = new CallbackThreads;
    holder.made_in = ProcessStamp();
  }
  CallbackThreads* const threads = holder.threads;
  lock.unlock();
  threads->run(std::move(callback));
}

}  // namespace torch_overlap
