#pragma once

#include "torch_overlap/overlap/cuda/fused.h"
#include "torch_overlap/overlap/cuda/operation.cuh"

// A product that is an operation of a channel by itself, as its threads see it. All is inlined:
// beside products of wgmma ptxas finds no registers for calls. For .cu files.
namespace torch_overlap::cuda {

class ProductOperation {
 public:
  __device__ __forceinline__ ProductOperation(const OperationParams& operation,
                                              const BegunWords& begun)
      : operation_(operation),
        begun_(begun),
        start_(start_of(operation.words, operation.control)) {}

  __device__ __forceinline__ uint32_t epoch() const { return start_.epoch; }

  // Of one thread of block 0, before its block ends the operation: whether another such kernel
  // runs.
  __device__ __forceinline__ void check_alone() const {
    if (atomicExch(operation_.busy, 1U) != 0) fail(WaitKind::apart, 0, 0, 0);
  }

  // Of a warp of block 0: tells the others that this rank has begun.
  __device__ __forceinline__ void tell_begun(int lane) const {
    if (is_peer(operation_.words, lane) && !start_.has_failed) {
      tell_entry(begun_.tell[lane], operation_.rows, epoch());
    }
    __syncwarp();
  }

  // Returns the entry, which has not come to the epoch if this wait has failed.
  __device__ __forceinline__ BegunEntry await_begun(int peer) const {
    return await_word(operation_.words, begun_.told[peer] + entry_at(epoch()), epoch(),
                      WaitKind::begin, peer, operation_.control, kManyLookAtHostNs);
  }

  // Before anything is sent to a rank: it is done with what came for the operation before. False: a
  // wait has failed.
  __device__ __forceinline__ bool may_send(int peer) const {
    const BegunEntry entry = await_begun(peer);
    // A rank that goes on behind a failure, with the epoch of before, finds the entries of before.
    if (start_.has_failed || !reached(entry, epoch())) return false;
    if (said_of(entry) == operation_.rows) return true;
    fail(WaitKind::rows, peer, operation_.rows, said_of(entry));
    return false;
  }

  // Of one thread of the block, which is done: the others have read the epoch, or do not use it.
  __device__ __forceinline__ void end() const {
    const bool is_good = !has_failed(operation_.control);
    for (int peer = 0; peer < operation_.words.size && !is_good; ++peer) {
      if (peer != operation_.words.rank) tell_gone(operation_, peer);
    }
    if (atomicAdd(operation_.words.ticket, 1U) + 1 == gridDim.x) {
      leave_operation(operation_, epoch(), is_good);
    }
  }

 private:
  __device__ __forceinline__ void fail(WaitKind kind, int peer, uint32_t expected,
                                       uint32_t seen) const {
    WaitRecord what{};
    what.kind = kind;
    what.window = operation_.words.id;
    what.peer = peer;
    what.expected = expected;
    give_up(operation_.control, what, seen);
  }

  const OperationParams& operation_;
  const BegunWords& begun_;
  const Start start_;
};

}  // namespace torch_overlap::cuda
