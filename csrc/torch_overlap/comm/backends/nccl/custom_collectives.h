#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <vector>

#include "torch_overlap/collectives/cuda/kernels.h"
#include "torch_overlap/collectives/select.h"
#include "torch_overlap/comm/backend.h"
#include "torch_overlap/comm/backends/nccl/runtime.h"
#include "torch_overlap/symm/bootstrap.h"
#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap {

// The collectives of one communicator that this project's kernels run (collectives/select.h selects
// them): the symmetric memory of its ranks, and the launches.
//
// Lifetime. The first eligible operation outside a capture allocates the memory. All ranks take
// part; if one of them cannot, or cannot reach another one, all ranks leave everything to NCCL. A
// graph keeps the result of memory().
//
// Captured and eager operations have one channel each, so they need no order between them. No two
// operations of one channel may run concurrently: the launch path ensures that for eager
// operations, and the streams of the replays do for captured ones. Replays that overlap end the
// communicator with an error.
//
// Windows. Once the ranks have begun to create a window, calls of some sizes launch kernels that
// find out themselves if the tensors of all ranks are in one window (CollectivePlan::zero_copy).
// All ranks agree that they have begun. They need not agree on the outcome, on the windows that are
// left, or on where a tensor is.
//
// Threads: the caller holds the launch lock.
class CustomCollectives {
 public:
  // Loads the kernels and allocates the control words of device-side waits for a group that will
  // use them: later that might have to wait for work on the device.
  CustomCollectives(const BackendContext& context, std::shared_ptr<CommRuntime> runtime);

  // Returns the kernel that runs the call; an empty plan means NCCL. Blocks if it allocates the
  // memory, for at most the communicator's timeout; if that expires, the communicator fails, and
  // the timeout is thrown.
  CollectivePlan plan(const Call& call, bool is_capturing);
  // See Backend::rms_norm_kernel(). Any thread may call it.
  NormKernel norm_kernel(const Call& call) const;
  // Launches a plan that is not empty. Reads and writes the call's tensors on `stream`, which is
  // the current stream. `has_launched` is set once the peers can see the operation.
  void launch(const Call& call, const CollectivePlan& plan, bool is_capturing, cudaStream_t stream,
              bool& has_launched);

  // Called at the same place in the sequence of operations on all ranks, so that they plan alike.
  void begin_window() { has_windows_ = true; }
  // Adds memory that all ranks can reach, of the window that all created as their `number`th.
  void add_window(uint64_t number, const std::shared_ptr<SymmetricMemory>& memory);
  void remove_window(const SymmetricMemory& memory);
  // Returns the window that contains the tensor of the call that peers would write to or read; null
  // if there is none. It must live until the call is done.
  std::shared_ptr<SymmetricMemory> window_of(const Call& call) const;

  // Leaves the memory to the graphs that keep it. Nothing may be issued afterwards.
  void release() {
    memory_.reset();
    state_ = State::refused;
  }
  // Returns the memory that a graph with captured launches needs; null before it is allocated.
  std::shared_ptr<void> memory() const { return memory_; }

 private:
  struct Memory;
  enum class State : uint8_t { untried, ready, refused };
  struct Window {
    uint32_t number;  // counted from 1
    std::weak_ptr<SymmetricMemory> memory;
    const SymmetricMemory* key;
    const char* begin;  // start of this rank's part
    size_t bytes;
  };

  void load_norm() const;
  CollectivePlan plan_for(const Call& call, State state) const;
  void query_device();
  void load();
  void prepare();
  cuda::WindowPlacement window_params(const Call& call, const cuda::CollectiveParams& params) const;

  const BackendContext& context_;
  const std::shared_ptr<CommRuntime> runtime_;
  std::atomic<State> state_ = State::untried;  // set after what plans depend on
  bool shares_devices_ = false;
  Fault fault_;                   // reason why this rank cannot take part
  bool has_hopper_code_ = false;  // dependent launches, clusters, bulk copies can be used
  int max_bulk_blocks_ = 0;       // CollectiveProblem's: one per SM, at most half of the SMs
  bool has_few_blocks_ = false;   // because of a hint
  bool has_ll128_ = false;        // CollectiveProblem's; set by prepare()
  std::shared_ptr<Memory> memory_;
  std::atomic<bool> has_windows_ = false;  // true from begin_window() on
  std::vector<Window> windows_;
};

}  // namespace torch_overlap
