#include "torch_overlap/comm/backends/nccl/deferred_deleter.h"

#include <atomic>
#include <cstdlib>
#include <thread>

#include "torch_overlap/comm/shutdown.h"
#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/thread_device.h"

namespace torch_overlap {

// A lock-free list of deferred objects, and the thread that deletes them. Never destroyed.
class DeferredDeleter {
 public:
  static DeferredDeleter& instance() {
    static auto* const deleter = new DeferredDeleter;
    return *deleter;
  }

  void add(PendingDelete* pending) noexcept {
    pending->deferred_at_ = PendingDelete::Clock::now();
    pending->next_ = head_.load(std::memory_order_relaxed);
    while (!head_.compare_exchange_weak(pending->next_, pending, std::memory_order_release,
                                        std::memory_order_relaxed)) {
    }
    head_.notify_one();
  }

 private:
  static constexpr auto kPeriod = std::chrono::milliseconds(20);
  static constexpr auto kMaxDeferral = std::chrono::minutes(10);

  DeferredDeleter() {
    // For programs without Python. Registered after CUDA's own exit handler, so it runs before it:
    // afterwards CUDA must not be called.
    (void)std::atexit(begin_process_exit);
    std::thread([this] { run(); }).detach();
  }

  void run() {
    std::vector<PendingDelete*> waiting;
    while (true) {
      if (waiting.empty()) {
        head_.wait(nullptr, std::memory_order_acquire);
      } else {
        std::this_thread::sleep_for(kPeriod);
      }
      PendingDelete* pending = head_.exchange(nullptr, std::memory_order_acquire);
      for (; pending != nullptr; pending = pending->next_) waiting.push_back(pending);
      std::erase_if(waiting, [](PendingDelete* pending) { return try_delete(pending); });
    }
  }

  static bool try_delete(PendingDelete* pending) {
    const Permit permit;
    if (!permit) return true;  // leaked
    try {
      if (pending->device_ >= 0) cuda::use_device(pending->device_);
    } catch (const std::exception&) {
      return true;  // CUDA is broken: leaked
    }
    const cuda::RelaxedCapture relaxed;
    if (!pending->can_delete())
      return PendingDelete::Clock::now() - pending->deferred_at_ > kMaxDeferral;
    delete pending;
    return true;
  }

  std::atomic<PendingDelete*> head_{nullptr};
};

void defer(PendingDelete* pending) noexcept { DeferredDeleter::instance().add(pending); }

void start_deferred_deleter() { DeferredDeleter::instance(); }

class EndedWorks::PendingWorks final : public PendingDelete {
 public:
  using PendingDelete::PendingDelete;
  ~PendingWorks() override {
    for (const auto& work : works) work->release_all();
  }
  bool can_delete() noexcept override { return true; }
  std::vector<std::shared_ptr<CudaWork>> works;
};

EndedWorks::~EndedWorks() {
  if (pending_ != nullptr) defer(pending_);
}

void EndedWorks::push_back(std::shared_ptr<CudaWork> work) {
  if (pending_ == nullptr) pending_ = new PendingWorks(device_);
  pending_->works.push_back(std::move(work));
}

// NCCL has an object of its own in each graph, which must be destroyed before this one but may be
// released slightly later.
bool GraphResources::can_delete() noexcept {
  return Clock::now() - deferred_at() > std::chrono::milliseconds(200);
}

GraphResources::~GraphResources() {
  for (const auto& work : works_) work->release_all();
  handle_->remove_graph();
}

GraphResources* GraphResources::attach(cudaGraph_t graph, std::shared_ptr<NcclHandle> handle,
                                       at::Tensor workspace,
                                       std::shared_ptr<GraphMonitor> monitor) {
  start_deferred_deleter();
  auto* resources = new GraphResources(std::move(handle), std::move(workspace), std::move(monitor));
  const auto on_destroyed = [](void* pending) { defer(static_cast<GraphResources*>(pending)); };
  cuda::on_graph_destroyed(graph, on_destroyed, resources);
  return resources;
}

}  // namespace torch_overlap
