#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "torch_overlap/comm/backends/nccl/handle.h"
#include "torch_overlap/comm/backends/nccl/work.h"

namespace torch_overlap {

// What one CUDA graph keeps alive of one communicator: the native communicator, the memory behind
// it, and the works that were captured, with their tensors. The graph owns it, from the capture
// until the graph and everything instantiated from it are gone.
//
// CUDA says that on a thread of its own where no CUDA call is allowed, so the body is buried first
// and freed later, by a thread of ours: the graveyard.
class GraphHold {
 public:
  // Gives a new one to `graph`, which is being captured. The pointer stays valid during that
  // capture.
  static GraphHold* attach(cudaGraph_t graph, std::shared_ptr<NcclHandle> handle,
                           at::Tensor workspace);

  // The work's tensors live until the graph dies, or wait() gives them back.
  void keep(std::shared_ptr<CudaWork> work) { works_.push_back(std::move(work)); }

 private:
  friend class Graveyard;
  GraphHold(std::shared_ptr<NcclHandle> handle, at::Tensor workspace)
      : handle_(std::move(handle)), workspace_(std::move(workspace)) {
    handle_->add_graph();
  }
  ~GraphHold();

  std::shared_ptr<NcclHandle> handle_;
  at::Tensor workspace_;
  std::vector<std::shared_ptr<CudaWork>> works_;
  GraphHold* next_ = nullptr;  // in the graveyard
};

}  // namespace torch_overlap
