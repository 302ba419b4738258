#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch_overlap/comm/backend.h"
#include "torch_overlap/comm/backends/nccl/direct_kernels.h"
#include "torch_overlap/comm/backends/nccl/runtime.h"
#include "torch_overlap/comm/direct.h"
#include "torch_overlap/symm/bootstrap.h"
#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap {

// The collectives of one communicator that our kernels do (comm/direct.h says which): the memory
// that its ranks map from each other, and the launches.
//
// Life. The first eligible operation outside of a capture makes the memory; all ranks come to it,
// and where one of them cannot, or cannot reach another, all leave everything to NCCL. A graph
// keeps what memory() returns.
//
// Captured and eager operations have a channel each, so that they need no order between them. Of
// one channel's operations no two may run at once: the launch path sees to that for eager ones, and
// the streams of the replays for captured ones. Replays that overlap end the communicator with an
// error.
//
// Windows. Once the ranks have come to make one, calls of some sizes are launched as kernels that
// find out by themselves whether the tensors of all ranks lie in one window
// (DirectPlan::zero_copy). That they have come all ranks know alike; what has come of it, which are
// left, and where a tensor lies, they need not.
//
// Threads: under the launch lock.
class DirectCollectives {
 public:
  // Loads the kernels and makes the words of the waits, for a group that will use them: later that
  // could have to wait for what the device does.
  DirectCollectives(const BackendContext& context, std::shared_ptr<CommRuntime> runtime);

  // Which of our kernels does the call; none: NCCL. Blocks where it makes the memory, at most the
  // communicator's timeout; if that runs out it is the communicator's failure, and thrown.
  DirectPlan plan(const Call& call, bool is_capturing);
  // Of a plan that is not empty. Reads and writes the call's tensors on `stream`, which is the
  // current one. `has_begun` is set once the peers will hear of it.
  void launch(const Call& call, const DirectPlan& plan, bool is_capturing, cudaStream_t stream,
              bool& has_begun);

  // Behind it all ranks plan alike.
  void begin_window() { has_windows_ = true; }
  // Memory that all ranks can reach, of a window that all have made as their `number`th.
  void add_window(uint64_t number, const std::shared_ptr<SymmetricMemory>& memory);
  void remove_window(const SymmetricMemory& memory);
  // The window in which the tensor of the call lies that peers would write to or read; or null. It
  // has to live until the call is done.
  std::shared_ptr<SymmetricMemory> window_of(const Call& call) const;

  // Nothing is issued any more: leaves the memory to the graphs that keep it.
  void release() {
    memory_.reset();
    state_ = State::refused;
  }
  // What a graph with captured launches needs. Null before there is any.
  std::shared_ptr<void> memory() const { return memory_; }

 private:
  struct Memory;
  enum class State : uint8_t { untried, ready, refused };
  struct Window {
    uint32_t number;  // from 1 on
    std::weak_ptr<SymmetricMemory> memory;
    const SymmetricMemory* key;
    const char* begin;  // of this rank's part
    size_t bytes;
  };

  void load_norm() const;
  void ask_device();
  void load();
  void prepare();
  cuda::DirectWindow window_params(const Call& call, const cuda::DirectParams& params) const;

  const BackendContext& context_;
  const std::shared_ptr<CommRuntime> runtime_;
  State state_ = State::untried;
  Fault fault_;                   // why this rank cannot take part
  bool has_hopper_code_ = false;  // dependent launches, clusters, bulk copies
  int most_bulk_blocks_ = 0;      // DirectProblem's: a block has an SM, of half of them at most
  bool has_few_blocks_ = false;   // because of a hint
  bool has_ll128_ = false;        // DirectProblem's, once the ranks have met
  std::shared_ptr<Memory> memory_;
  bool has_windows_ = false;  // or has had, or tried to have
  std::vector<Window> windows_;
};

}  // namespace torch_overlap
