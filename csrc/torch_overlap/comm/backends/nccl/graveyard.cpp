#include "torch_overlap/comm/backends/nccl/graveyard.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "torch_overlap/common/cuda/capture.h"

namespace torch_overlap {

// A lock-free list of the dead, and the thread that frees them. One a process; made by the first
// capture, never destroyed.
class Graveyard {
 public:
  static Graveyard& instance() {
    static auto* const graveyard = new Graveyard;
    return *graveyard;
  }

  // On the driver's thread: one atomic exchange.
  static void bury(void* body) {
    auto* hold = static_cast<GraphHold*>(body);
    auto& head = instance().head_;
    hold->next_ = head.load(std::memory_order_relaxed);
    while (!head.compare_exchange_weak(hold->next_, hold, std::memory_order_release,
                                       std::memory_order_relaxed)) {
    }
    head.notify_one();
  }

 private:
  // NCCL has an object of its own in each graph, which may die a moment after ours: its turn first.
  static constexpr auto kRest = std::chrono::milliseconds(200);

  Graveyard() {
    // Registered after CUDA's own handler, so run before it: from then on CUDA must not be called.
    // A burial that is under way may end, within reason.
    (void)std::atexit([] {
      instance().leaving_ = true;
      (void)instance().working_.try_lock_for(std::chrono::seconds(2));
    });
    std::thread([this] { run(); }).detach();
  }

  void run() {
    while (true) {
      head_.wait(nullptr, std::memory_order_acquire);
      std::this_thread::sleep_for(kRest);
      std::lock_guard lock(working_);
      GraphHold* dead = head_.exchange(nullptr, std::memory_order_acquire);
      while (dead != nullptr) {
        if (leaving_) return;
        delete std::exchange(dead, dead->next_);
      }
    }
  }

  std::atomic<GraphHold*> head_{nullptr};
  std::atomic<bool> leaving_{false};
  std::timed_mutex working_;
};

GraphHold::~GraphHold() {
  for (const auto& work : works_) work->release();
  handle_->remove_graph();
}

GraphHold* GraphHold::attach(cudaGraph_t graph, std::shared_ptr<NcclHandle> handle,
                             at::Tensor workspace) {
  Graveyard::instance();  // its thread must not be started from the driver's callback
  auto* hold = new GraphHold(std::move(handle), std::move(workspace));
  cuda::on_graph_death(graph, Graveyard::bury, hold);
  return hold;
}

}  // namespace torch_overlap
