#include "torch_overlap/comm/backends/nccl/watchdog.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "torch_overlap/comm/backends/nccl/backend.h"

namespace torch_overlap {
namespace {

constexpr auto kPeriod = std::chrono::milliseconds(50);

// Never destroyed: its thread runs until the process ends.
class Watchdog {
 public:
  static Watchdog& instance() {
    static auto* const watchdog = new Watchdog;
    return *watchdog;
  }

  void add(std::weak_ptr<NcclBackend> backend) {
    {
      std::lock_guard lock(mutex_);
      watched_.push_back(std::move(backend));
    }
    changed_.notify_one();
  }

 private:
  Watchdog() {
    // Registered after CUDA's own exit handler, so it runs before it: once this returns, no tick is
    // running, and none starts. A tick that hangs is not waited for.
    (void)std::atexit([] { (void)instance().ticking_.try_lock_for(std::chrono::seconds(1)); });
    std::thread([this] { run(); }).detach();
  }

  void run() {
    std::vector<std::shared_ptr<NcclBackend>> alive;
    while (true) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !watched_.empty(); });
        std::erase_if(watched_, [](const auto& weak) { return weak.expired(); });
        for (const auto& weak : watched_) {
          if (auto strong = weak.lock()) alive.push_back(std::move(strong));
        }
      }
      {
        std::lock_guard lock(ticking_);
        for (const auto& one : alive) one->tick();
        alive.clear();
      }
      std::this_thread::sleep_for(kPeriod);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<NcclBackend>> watched_;
  std::timed_mutex ticking_;
};

}  // namespace

void watch(std::weak_ptr<NcclBackend> backend) { Watchdog::instance().add(std::move(backend)); }

}  // namespace torch_overlap
