#pragma once

#include "torch_overlap/overlap/cuda/fused.h"
#include "torch_overlap/overlap/cuda/operation.cuh"

// Device-side view of a product that is an operation of a channel by itself. Everything is inlined:
// ptxas finds no registers for calls next to wgmma. For .cu files.
namespace torch_overlap::cuda {

class ProductOperation {
 public:
  __device__ __forceinline__ ProductOperation(const OperationParams& operation,
                                              const EntryFlags& entry_flags)
      : operation_(operation),
        entry_flags_(entry_flags),
        start_(start_of(operation.words, operation.control)) {}

  __device__ __forceinline__ uint32_t epoch() const { return start_.epoch; }

  // Called by one thread of block 0, before its block ends the operation. Fails if another such
  // kernel runs.
  __device__ __forceinline__ void mark_busy() const {
    if (atomicExch(operation_.busy, 1U) != 0) fail(WaitKind::concurrent_ops, 0, 0, 0);
  }

  // Called by a warp of block 0. Signals to the peers that this rank has begun.
  __device__ __forceinline__ void signal_begin(int lane) const {
    if (is_peer(operation_.words, lane) && !start_.has_failed) {
      signal_entry(entry_flags_.peer_flags[lane], operation_.payload, epoch());
    }
    __syncwarp();
  }

  // Returns the peer's entry flag, which has not reached the epoch if this wait has failed.
  __device__ __forceinline__ EntryFlag wait_begin(int peer) const {
    return await_word(operation_.words, entry_flags_.notified[peer] + entry_slot(epoch()), epoch(),
                      WaitKind::begin, peer, operation_.control, kAllBlocksHostPollIntervalNs);
  }

  // Waits, before anything is sent to a peer, until the peer is done with the data of the previous
  // operation. Returns false if a wait has failed or the signatures differ.
  __device__ __forceinline__ bool wait_ready_to_send(int peer) const {
    const EntryFlag entry = wait_begin(peer);
    // A rank that continues after a failure keeps the old epoch, and finds the old entry flags.
    if (start_.has_failed || !has_entered(entry, epoch())) return false;
    if (payload_of(entry) == operation_.payload) return true;
    fail(WaitKind::signature_mismatch, peer, operation_.payload, payload_of(entry));
    return false;
  }

  // Called by one thread of a block that is done: its other threads have read the epoch, or do not
  // use it.
  __device__ __forceinline__ void end() const {
    const bool is_good = !has_failed(operation_.control);
    for (int peer = 0; peer < operation_.words.size && !is_good; ++peer) {
      if (peer != operation_.words.rank) signal_abort(operation_, peer);
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
    what.memory_id = operation_.words.id;
    what.peer = peer;
    what.expected = expected;
    record_failure(operation_.control, what, seen);
  }

  const OperationParams& operation_;
  const EntryFlags& entry_flags_;
  const Start start_;
};

}  // namespace torch_overlap::cuda
