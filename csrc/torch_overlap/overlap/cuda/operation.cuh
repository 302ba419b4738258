#pragma once

#include "torch_overlap/overlap/cuda/await.cuh"
#include "torch_overlap/overlap/cuda/low_latency.h"

// Device code shared by kernels that begin and end operations. For .cu files.
namespace torch_overlap::cuda {

inline constexpr int kWordsPerLine = 32;  // ChannelLayout::kLineBytes in words.
inline constexpr int kEntriesPerLine = kWordsPerLine * sizeof(uint32_t) / sizeof(EntryFlag);

// Not inlined, to keep this cold code out of the path that a kernel executes.
inline __noinline__ __device__ void record_failure(const ChannelWords& words,
                                                   const WaitControl& control, WaitKind kind,
                                                   int peer, uint32_t expected, uint32_t seen) {
  WaitRecord what{};
  what.kind = kind;
  what.memory_id = words.id;
  what.peer = peer;
  what.expected = expected;
  record_failure(control, what, seen);
}

// Returns true if a peer has entered with the same rows and signature as this rank. If not, the
// operation fails on both ranks.
inline __device__ bool check_payload(const ChannelWords& words, uint32_t seen, uint32_t payload,
                                     int peer, const WaitControl& control) {
  if (seen == payload) return true;
  record_failure(words, control, WaitKind::signature_mismatch, peer, payload, seen);
  return false;
}

// State that an operation reads first.
struct Start {
  uint32_t epoch;   // Epoch of the operation.
  bool has_failed;  // A wait has failed: nothing is signaled to the peers.
};

// Issues both loads before it waits for either.
__device__ __forceinline__ Start start_of(const ChannelWords& words, const WaitControl& control) {
  uint32_t epoch;
  uint32_t failed;
  asm volatile(
      "ld.volatile.global.u32 %0, [%2];\n"
      "ld.volatile.global.u32 %1, [%3];"
      : "=&r"(epoch), "=&r"(failed)
      : "l"(words.epoch), "l"(control.failed)
      : "memory");
  return {epoch + 1, failed != kNoWaitFailed};
}

// Signals to a peer that the operation has begun. `entries` is the first of this rank's entry flags
// there. The release orders everything that was read and written before it.
__device__ __forceinline__ void signal_entry(EntryFlag* entries, uint32_t payload, uint32_t epoch) {
  store_release(entries + entry_slot(epoch), make_entry_flag(epoch, payload));
}

// --- Kernels that are operations by themselves ---------------------------------------------------

// True if `thread` polls the rank of the same index.
inline __device__ bool is_peer(const ChannelWords& words, int thread) {
  return thread < words.size && thread != words.rank;
}
inline __device__ bool is_peer(const ChannelWords& words) {
  return is_peer(words, static_cast<int>(threadIdx.x));
}

struct OperationStart : Start {
  uint32_t was_busy;  // Nonzero if another such kernel runs. Set in one thread of the kernel.
};

// The thread that checks for another kernel waits for no rank, so it can report one while the other
// threads wait.
inline __device__ OperationStart start_operation(const OperationParams& p) {
  OperationStart start{start_of(p.words, p.control), 0};
  if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) == p.words.rank) {
    start.was_busy = atomicExch(p.busy, 1U);
  }
  return start;
}

inline __device__ bool try_exclusive(const OperationParams& p, const OperationStart& start) {
  if (start.was_busy == 0) return true;
  record_failure(p.words, p.control, WaitKind::concurrent_ops, 0, 0, 0);
  return false;
}

// Slow path of comes(), not inlined.
template <typename Word>
__noinline__ __device__ Word wait_late(const ChannelWords& words, const WaitControl& control,
                                       const Word* word, uint32_t epoch, WaitKind kind, int peer,
                                       uint64_t host_poll_interval_ns) {
  return await_late_word(words, word, epoch, kind, peer, control, host_poll_interval_ns);
}

// Waits until a peer's word has reached the epoch; `seen` is its value then. Returns false if this
// wait has failed, or if another one has failed during the slow path.
template <typename Word>
__device__ bool wait_for_epoch(const ChannelWords& words, const WaitControl& control,
                               const Word* word, uint32_t epoch, WaitKind kind, int peer,
                               uint64_t host_poll_interval_ns, Word& seen) {
  if (spin_until_epoch(word, epoch, seen)) return true;
  seen = wait_late(words, control, word, epoch, kind, peer, host_poll_interval_ns);
  return has_arrived(seen, epoch) && !has_failed(control);
}

// Waits until a peer has entered the operation. `entries` is the first of its entry flags here.
// Also returns false if the peer has entered a different operation.
inline __device__ bool wait_for_entry(const ChannelWords& words, const WaitControl& control,
                                      const EntryFlag* entries, uint32_t epoch, uint32_t payload,
                                      int peer, uint64_t host_poll_interval_ns) {
  EntryFlag seen;
  return wait_for_epoch(words, control, entries + entry_slot(epoch), epoch, WaitKind::begin, peer,
                        host_poll_interval_ns, seen) &&
         check_payload(words, payload_of(seen), payload, peer, control);
}

// Overloads for kernels that are operations by themselves.
inline __device__ bool wait_for_epoch(const OperationParams& p, const uint32_t* word,
                                      uint32_t epoch, WaitKind kind, int peer) {
  uint32_t seen;
  return wait_for_epoch(p.words, p.control, word, epoch, kind, peer, kAllBlocksHostPollIntervalNs,
                        seen);
}
inline __device__ bool wait_for_entry(const OperationParams& p, const EntryFlag* entries,
                                      uint32_t epoch, int peer) {
  return wait_for_entry(p.words, p.control, entries, epoch, p.payload, peer,
                        kAllBlocksHostPollIntervalNs);
}

// Signals to a peer that this rank has aborted.
inline __device__ void signal_abort(const OperationParams& p, int peer) {
  store_release(p.peer_abort_flags.at[peer], 1);
}

// Called by one thread after all blocks have read the epoch. Advances the epoch if `is_good`.
inline __device__ void leave_operation(const OperationParams& p, uint32_t epoch, bool is_good) {
  *p.words.ticket = 0;
  *p.busy = 0;
  if (is_good) *p.words.epoch = epoch;
}

}  // namespace torch_overlap::cuda
