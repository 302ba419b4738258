#pragma once

#include "torch_overlap/overlap/cuda/await.cuh"
#include "torch_overlap/overlap/cuda/direct.h"

// What kernels that begin and end operations share. For .cu files.
namespace torch_overlap::cuda {

inline constexpr int kWordsInLine = 32;  // ChannelLayout::kLine bytes

// Not part of the code that a kernel runs through, which is mostly cold.
inline __noinline__ __device__ void give_up(const ChannelWords& words, const WaitControl& control,
                                            WaitKind kind, int peer, uint32_t expected,
                                            uint32_t seen) {
  WaitRecord what{};
  what.kind = kind;
  what.window = words.id;
  what.peer = peer;
  what.expected = expected;
  give_up(control, what, seen);
}

// What a peer that has begun said of its rows: the same as this rank, or both fail. It does not
// begin another operation before this rank has done its part of this one, so its word stays.
inline __device__ bool check_rows(const ChannelWords& words, uint32_t seen, uint32_t rows, int peer,
                                  const WaitControl& control) {
  if (seen == rows) return true;
  give_up(words, control, WaitKind::rows, peer, rows, seen);
  return false;
}

// Tells the rows of the operation, then its epoch, behind all that was read and written before.
inline __device__ void tell_entry(uint32_t* word, uint32_t rows, uint32_t epoch) {
  *static_cast<volatile uint32_t*>(word + 1) = rows;
  store_release(word, epoch);
}

// --- Kernels that are operations by themselves ---------------------------------------------------

// Whether the thread of this number waits for the rank of that.
inline __device__ bool is_peer(const ChannelWords& words, int thread) {
  return thread < words.size && thread != words.rank;
}
inline __device__ bool is_peer(const ChannelWords& words) {
  return is_peer(words, static_cast<int>(threadIdx.x));
}

struct OperationEntry {
  uint32_t epoch;     // of the operation
  uint32_t was_busy;  // for one thread of the kernel: another such kernel runs
};

// Asks for both at once; neither is waited for before it is used. The thread that asks whether
// another one runs waits for no rank, so it can say so while the others wait.
inline __device__ OperationEntry enter_operation(const OperationParams& p) {
  OperationEntry entry{};
  entry.epoch = *static_cast<const volatile uint32_t*>(p.words.epoch) + 1;
  if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) == p.words.rank) {
    entry.was_busy = atomicExch(p.busy, 1U);
  }
  return entry;
}

inline __device__ bool is_alone(const OperationParams& p, const OperationEntry& entry) {
  if (entry.was_busy == 0) return true;
  give_up(p.words, p.control, WaitKind::apart, 0, 0, 0);
  return false;
}

// Of a word that has been looked at for a while.
inline __noinline__ __device__ bool comes_late(const ChannelWords& words,
                                               const WaitControl& control, const uint32_t* word,
                                               uint32_t epoch, WaitKind kind, int peer,
                                               uint64_t look_at_host_ns) {
  await_late_word(words, word, epoch, kind, peer, control, look_at_host_ns);
  return !has_failed(control);
}

// Waits until the word of a peer has come to the epoch. False: a wait has failed.
inline __device__ bool comes(const ChannelWords& words, const WaitControl& control,
                             const uint32_t* word, uint32_t epoch, WaitKind kind, int peer,
                             uint64_t look_at_host_ns) {
  if (comes_soon(word, epoch)) return true;
  return comes_late(words, control, word, epoch, kind, peer, look_at_host_ns);
}

// The same in a kernel that is an operation by itself.
inline __device__ bool comes(const OperationParams& p, const uint32_t* word, uint32_t epoch,
                             WaitKind kind, int peer) {
  return comes(p.words, p.control, word, epoch, kind, peer, kManyLookAtHostNs);
}

// To a peer: this rank has given up.
inline __device__ void tell_gone(const OperationParams& p, int peer) {
  store_release(p.gone.at[peer], 1);
}

// Of one thread, when all blocks have read the epoch. `is_good`: it is taken.
inline __device__ void leave_operation(const OperationParams& p, uint32_t epoch, bool is_good) {
  *p.words.ticket = 0;
  *p.busy = 0;
  if (is_good) *p.words.epoch = epoch;
}

}  // namespace torch_overlap::cuda
