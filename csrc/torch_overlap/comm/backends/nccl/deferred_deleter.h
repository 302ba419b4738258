#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <set>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/backends/nccl/graph_monitor.h"
#include "torch_overlap/comm/backends/nccl/handle.h"
#include "torch_overlap/comm/backends/nccl/work.h"

namespace torch_overlap {

// An object that is deleted on the deferred deleter's thread, of which a process has one. The last
// reference to a tensor may wait for the GIL, which a thread can hold while it waits for the
// device; and the driver reports that a CUDA graph was destroyed on a thread where no CUDA call is
// allowed. The watchdog and the driver's callback therefore defer objects, and release nothing
// themselves.
class TORCH_OVERLAP_API PendingDelete {
 public:
  using Clock = std::chrono::steady_clock;

  // `device` is made current for can_delete() and the destructor; -1 for none.
  explicit PendingDelete(c10::DeviceIndex device) : device_(device) {}
  virtual ~PendingDelete() = default;
  PendingDelete(const PendingDelete&) = delete;
  PendingDelete& operator=(const PendingDelete&) = delete;

  // Polled after defer(); true once the object may be deleted. An object that is not ready within
  // ten minutes is leaked: the device may still use what it holds.
  virtual bool can_delete() noexcept = 0;

 protected:
  Clock::time_point deferred_at() const { return deferred_at_; }

 private:
  friend class DeferredDeleter;
  const c10::DeviceIndex device_;
  Clock::time_point deferred_at_;
  PendingDelete* next_ = nullptr;
};

// Gives the object to the deferred deleter. May be called on any thread; takes no lock.
TORCH_OVERLAP_API void defer(PendingDelete* pending) noexcept;
// Starts the thread, which defer() must not do on a thread of the driver.
TORCH_OVERLAP_API void start_deferred_deleter();

// Works that the watchdog has seen end. Filled under the launch lock; destroyed on any thread.
class EndedWorks {
 public:
  explicit EndedWorks(c10::DeviceIndex device) : device_(device) {}
  ~EndedWorks();
  EndedWorks(const EndedWorks&) = delete;
  EndedWorks& operator=(const EndedWorks&) = delete;

  void push_back(std::shared_ptr<CudaWork> work);

 private:
  class PendingWorks;
  const c10::DeviceIndex device_;
  PendingWorks* pending_ = nullptr;
};

// Resources of one communicator that one CUDA graph keeps alive: the native communicator, its
// memory, and the works that were captured, with their tensors. The graph owns it, from the capture
// until the graph and everything instantiated from it are destroyed.
class GraphResources final : public PendingDelete {
 public:
  // Attaches a new object to `graph`, which is being captured. The pointer stays valid during that
  // capture. `monitor` is null if replays are not watched.
  static GraphResources* attach(cudaGraph_t graph, std::shared_ptr<NcclHandle> handle,
                                at::Tensor workspace, std::shared_ptr<GraphMonitor> monitor);

  // Keeps the work's tensors until the graph is destroyed, or wait() releases them.
  void keep(std::shared_ptr<CudaWork> work) { works_.push_back(std::move(work)); }
  // Keeps the memory of custom collectives, which nodes of the graph use.
  void keep(std::shared_ptr<void> memory) { memory_ = std::move(memory); }
  // Keeps this project's memory that NCCL maps into the peers in captures. NCCL looks a mapping up
  // by address until the graph is destroyed: nothing else may be mapped at that address before.
  void keep_mapped(std::shared_ptr<void> memory) { mapped_.insert(std::move(memory)); }
  // Drops the last work, of which nothing was captured.
  void drop_last() { works_.pop_back(); }

  bool can_delete() noexcept override;

 private:
  GraphResources(std::shared_ptr<NcclHandle> handle, at::Tensor workspace,
                 std::shared_ptr<GraphMonitor> monitor)
      : PendingDelete(workspace.device().index()),
        handle_(std::move(handle)),
        workspace_(std::move(workspace)),
        monitor_(std::move(monitor)) {
    handle_->add_graph();
  }
  ~GraphResources() override;

  std::shared_ptr<NcclHandle> handle_;
  at::Tensor workspace_;
  std::shared_ptr<GraphMonitor> monitor_;
  std::shared_ptr<void> memory_;
  std::set<std::shared_ptr<void>> mapped_;
  std::vector<std::shared_ptr<CudaWork>> works_;
};

}  // namespace torch_overlap
