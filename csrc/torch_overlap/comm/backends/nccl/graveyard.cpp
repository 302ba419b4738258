#include "torch_overlap/comm/backends/nccl/graveyard.h"

#include <atomic>
#include <cstdlib>
#include <thread>

#include "torch_overlap/comm/shutdown.h"
#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/thread_device.h"

namespace torch_overlap {

// A lock-free list of the buried, and the thread that deletes them. Never destroyed.
class Graveyard {
 public:
  static Graveyard& instance() {
    static auto* const graveyard = new Graveyard;
    return *graveyard;
  }

  void add(Body* body) noexcept {
    body->buried_at_ = Body::Clock::now();
    body->next_ = head_.load(std::memory_order_relaxed);
    while (!head_.compare_exchange_weak(body->next_, body, std::memory_order_release,
                                        std::memory_order_relaxed)) {
    }
    head_.notify_one();
  }

 private:
  static constexpr auto kPeriod = std::chrono::milliseconds(20);
  static constexpr auto kMostWait = std::chrono::minutes(10);

  Graveyard() {
    // For programs without Python. Registered after CUDA's own handler, so run before it: from then
    // on CUDA must not be called.
    (void)std::atexit(begin_process_exit);
    std::thread([this] { run(); }).detach();
  }

  void run() {
    std::vector<Body*> waiting;
    while (true) {
      if (waiting.empty()) {
        head_.wait(nullptr, std::memory_order_acquire);
      } else {
        std::this_thread::sleep_for(kPeriod);
      }
      Body* body = head_.exchange(nullptr, std::memory_order_acquire);
      for (; body != nullptr; body = body->next_) waiting.push_back(body);
      std::erase_if(waiting, [](Body* body) { return is_done_with(body); });
    }
  }

  static bool is_done_with(Body* body) {
    const Permit permit;
    if (!permit) return true;  // leaked
    try {
      if (body->device_ >= 0) cuda::use_device(body->device_);
    } catch (const std::exception&) {
      return true;  // CUDA is broken: leaked
    }
    const cuda::RelaxedCapture relaxed;
    if (!body->may_go()) return Body::Clock::now() - body->buried_at_ > kMostWait;
    delete body;
    return true;
  }

  std::atomic<Body*> head_{nullptr};
};

void bury(Body* body) noexcept { Graveyard::instance().add(body); }

void open_graveyard() { Graveyard::instance(); }

class DeadWorks::Coffin final : public Body {
 public:
  using Body::Body;
  ~Coffin() override {
    for (const auto& work : works) work->release_all();
  }
  bool may_go() noexcept override { return true; }
  std::vector<std::shared_ptr<CudaWork>> works;
};

DeadWorks::~DeadWorks() {
  if (coffin_ != nullptr) bury(coffin_);
}

void DeadWorks::push_back(std::shared_ptr<CudaWork> work) {
  if (coffin_ == nullptr) coffin_ = new Coffin(device_);
  coffin_->works.push_back(std::move(work));
}

// NCCL has an object of its own in each graph, which may die a moment after ours: its turn first.
bool GraphHold::may_go() noexcept {
  return Clock::now() - buried_at() > std::chrono::milliseconds(200);
}

GraphHold::~GraphHold() {
  for (const auto& work : works_) work->release_all();
  handle_->remove_graph();
}

GraphHold* GraphHold::attach(cudaGraph_t graph, std::shared_ptr<NcclHandle> handle,
                             at::Tensor workspace, std::shared_ptr<GraphMonitor> monitor) {
  open_graveyard();
  auto* hold = new GraphHold(std::move(handle), std::move(workspace), std::move(monitor));
  const auto on_death = [](void* body) { bury(static_cast<GraphHold*>(body)); };
  cuda::on_graph_death(graph, on_death, hold);
  return hold;
}

}  // namespace torch_overlap
