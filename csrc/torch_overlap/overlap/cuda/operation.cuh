#pragma once

#include "torch_overlap/overlap/cuda/await.cuh"
#include "torch_overlap/overlap/cuda/direct.h"

// What kernels that begin and end operations share. For .cu files.
namespace torch_overlap::cuda {

inline constexpr int kWordsInLine = 32;  // ChannelLayout::kLine bytes
inline constexpr int kEntriesInLine = kWordsInLine * sizeof(uint32_t) / sizeof(BegunEntry);

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

// What a peer that has begun said of its rows: the same as this rank, or both fail.
inline __device__ bool check_rows(const ChannelWords& words, uint32_t seen, uint32_t rows, int peer,
                                  const WaitControl& control) {
  if (seen == rows) return true;
  give_up(words, control, WaitKind::rows, peer, rows, seen);
  return false;
}

// Where an operation begins: what it needs to know first.
struct Start {
  uint32_t epoch;   // of the operation
  bool has_failed;  // a wait has: nothing is told to others
};

// Two loads, of which neither is waited for before the other is asked for.
__device__ __forceinline__ Start start_of(const ChannelWords& words, const WaitControl& control) {
  uint32_t epoch;
  uint32_t failed;
  asm volatile(
      "ld.volatile.global.u32 %0, [%2];\n"
      "ld.volatile.global.u32 %1, [%3];"
      : "=&r"(epoch), "=&r"(failed)
      : "l"(words.epoch), "l"(control.failed)
      : "memory");
  return {epoch + 1, failed != kFine};
}

// Tells a peer, by the first of this rank's entries there, that the operation has begun, behind all
// that was read and written before.
__device__ __forceinline__ void tell_entry(BegunEntry* entries, uint32_t rows, uint32_t epoch) {
  store_release(entries + entry_at(epoch), entry_of(epoch, rows));
}

// --- Kernels that are operations by themselves ---------------------------------------------------

// Whether the thread of this number waits for the rank of that.
inline __device__ bool is_peer(const ChannelWords& words, int thread) {
  return thread < words.size && thread != words.rank;
}
inline __device__ bool is_peer(const ChannelWords& words) {
  return is_peer(words, static_cast<int>(threadIdx.x));
}

struct OperationStart : Start {
  uint32_t was_busy;  // for one thread of the kernel: another such kernel runs
};

// The thread that asks whether another one runs waits for no rank, so it can say so while the
// others wait.
inline __device__ OperationStart start_operation(const OperationParams& p) {
  OperationStart start{start_of(p.words, p.control), 0};
  if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) == p.words.rank) {
    start.was_busy = atomicExch(p.busy, 1U);
  }
  return start;
}

inline __device__ bool is_alone(const OperationParams& p, const OperationStart& start) {
  if (start.was_busy == 0) return true;
  give_up(p.words, p.control, WaitKind::apart, 0, 0, 0);
  return false;
}

// Of a word that has been looked at for a while.
template <typename Word>
__noinline__ __device__ Word await_late(const ChannelWords& words, const WaitControl& control,
                                        const Word* word, uint32_t epoch, WaitKind kind, int peer,
                                        uint64_t look_at_host_ns) {
  return await_late_word(words, word, epoch, kind, peer, control, look_at_host_ns);
}

// Waits until the word of a peer, which is `seen` then, has come to the epoch. False: this wait has
// failed, or another one while this took long.
template <typename Word>
__device__ bool comes(const ChannelWords& words, const WaitControl& control, const Word* word,
                      uint32_t epoch, WaitKind kind, int peer, uint64_t look_at_host_ns,
                      Word& seen) {
  if (comes_soon(word, epoch, seen)) return true;
  seen = await_late(words, control, word, epoch, kind, peer, look_at_host_ns);
  return reached(seen, epoch) && !has_failed(control);
}

// The same of a peer, whose first entry here is given, that is to begin the operation. False also
// where it has begun another one.
inline __device__ bool begins(const ChannelWords& words, const WaitControl& control,
                              const BegunEntry* entries, uint32_t epoch, uint32_t rows, int peer,
                              uint64_t look_at_host_ns) {
  BegunEntry seen;
  return comes(words, control, entries + entry_at(epoch), epoch, WaitKind::begin, peer,
               look_at_host_ns, seen) &&
         check_rows(words, said_of(seen), rows, peer, control);
}

// The same in a kernel that is an operation by itself.
inline __device__ bool comes(const OperationParams& p, const uint32_t* word, uint32_t epoch,
                             WaitKind kind, int peer) {
  uint32_t seen;
  return comes(p.words, p.control, word, epoch, kind, peer, kManyLookAtHostNs, seen);
}
inline __device__ bool begins(const OperationParams& p, const BegunEntry* entries, uint32_t epoch,
                              int peer) {
  return begins(p.words, p.control, entries, epoch, p.rows, peer, kManyLookAtHostNs);
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
