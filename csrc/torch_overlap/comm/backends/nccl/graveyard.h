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

// Something that ends on a thread of its own, the graveyard's: one a process. The last reference to
// a tensor may wait for Python's lock, which a thread can hold while it waits for the device; and a
// CUDA graph says that it is gone on a thread where no CUDA call is allowed. So the watchdog and
// the driver's callback bury, and drop nothing.
class TORCH_OVERLAP_API Body {
 public:
  using Clock = std::chrono::steady_clock;

  // `device`: made current while the body is asked and deleted; -1 for none.
  explicit Body(c10::DeviceIndex device) : device_(device) {}
  virtual ~Body() = default;
  Body(const Body&) = delete;
  Body& operator=(const Body&) = delete;

  // Asked again and again after the burial: true once it may be deleted. A body that cannot go
  // within ten minutes is leaked: the device may still use what it holds.
  virtual bool may_go() noexcept = 0;

 protected:
  Clock::time_point buried_at() const { return buried_at_; }

 private:
  friend class Graveyard;
  const c10::DeviceIndex device_;
  Clock::time_point buried_at_;
  Body* next_ = nullptr;
};

// Gives the body away. Any thread; one atomic exchange, no lock.
TORCH_OVERLAP_API void bury(Body* body) noexcept;
// Starts the thread, which bury() must not do on a thread of the driver.
TORCH_OVERLAP_API void open_graveyard();

// Works that the watchdog saw end. Filled under the launch lock; destroyed anywhere.
class DeadWorks {
 public:
  explicit DeadWorks(c10::DeviceIndex device) : device_(device) {}
  ~DeadWorks();
  DeadWorks(const DeadWorks&) = delete;
  DeadWorks& operator=(const DeadWorks&) = delete;

  void push_back(std::shared_ptr<CudaWork> work);

 private:
  class Coffin;
  const c10::DeviceIndex device_;
  Coffin* coffin_ = nullptr;
};

// What one CUDA graph keeps alive of one communicator: the native communicator, the memory behind
// it, and the works that were captured, with their tensors. The graph owns it, from the capture
// until the graph and everything instantiated from it are gone.
class GraphHold final : public Body {
 public:
  // Gives a new one to `graph`, which is being captured. The pointer stays valid during that
  // capture. `monitor`: null where replays are not watched.
  static GraphHold* attach(cudaGraph_t graph, std::shared_ptr<NcclHandle> handle,
                           at::Tensor workspace, std::shared_ptr<GraphMonitor> monitor);

  // The work's tensors live until the graph dies, or wait() gives them back.
  void keep(std::shared_ptr<CudaWork> work) { works_.push_back(std::move(work)); }
  // The memory of direct collectives, which nodes of the graph use.
  void keep(std::shared_ptr<void> memory) { memory_ = std::move(memory); }
  // Memory of ours that NCCL maps into the peers in captures. It looks a mapping up by address,
  // until the graph dies: nothing else may come to lie there before.
  void keep_mapped(std::shared_ptr<void> memory) { mapped_.insert(std::move(memory)); }
  // Nothing of the last one came into the graph.
  void forget_last() { works_.pop_back(); }

  bool may_go() noexcept override;

 private:
  GraphHold(std::shared_ptr<NcclHandle> handle, at::Tensor workspace,
            std::shared_ptr<GraphMonitor> monitor)
      : Body(workspace.device().index()),
        handle_(std::move(handle)),
        workspace_(std::move(workspace)),
        monitor_(std::move(monitor)) {
    handle_->add_graph();
  }
  ~GraphHold() override;

  std::shared_ptr<NcclHandle> handle_;
  at::Tensor workspace_;
  std::shared_ptr<GraphMonitor> monitor_;
  std::shared_ptr<void> memory_;
  std::set<std::shared_ptr<void>> mapped_;
  std::vector<std::shared_ptr<CudaWork>> works_;
};

}  // namespace torch_overlap
