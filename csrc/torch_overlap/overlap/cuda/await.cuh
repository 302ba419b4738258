#pragma once

#include "torch_overlap/overlap/cuda/words.h"
#include "torch_overlap/symm/cuda/wait_device.h"

// How kernels of overlapped operations wait for a word of another rank. For .cu files.
namespace torch_overlap::cuda {

// Whether `seen` is not before `epoch`, also when the count has wrapped.
__device__ __forceinline__ bool reached(uint32_t seen, uint32_t epoch) {
  return static_cast<int32_t>(seen - epoch) >= 0;
}

// How often a word is looked at without naps: it comes soon as a rule.
inline constexpr int kLooksWithoutNaps = 64;

// Whether it does. The looks are at the word alone: whether a rank has gone, or a wait has failed,
// would be another trip to memory between two of them.
__device__ __forceinline__ bool comes_soon(const uint32_t* word, uint32_t epoch) {
#pragma unroll 1
  for (int look = 0; look < kLooksWithoutNaps; ++look) {
    if (reached(load_acquire(word), epoch)) return true;
  }
  return false;
}

// Of a word that has been looked at so often.
inline __device__ void await_late_word(const ChannelWords& words, const uint32_t* word,
                                       uint32_t epoch, WaitKind kind, int peer,
                                       const WaitControl& control,
                                       uint64_t look_at_host_ns = kLookAtHostNs) {
  WaitRecord what{};
  what.kind = kind;
  what.window = words.id;
  what.peer = peer;
  what.expected = epoch;
  const uint32_t* const gone = words.gone;
  const bool is_there = wait_until(
      control, word,
      [epoch, gone](uint32_t seen) { return reached(seen, epoch) || load_acquire(gone) != 0; },
      what, look_at_host_ns);
  // A rank that has gone since then has done its part of this.
  if (!is_there || reached(load_acquire(word), epoch)) return;
  what.kind = WaitKind::gone;
  give_up(control, what, 0);
}

inline __device__ void await_word(const ChannelWords& words, const uint32_t* word, uint32_t epoch,
                                  WaitKind kind, int peer, const WaitControl& control,
                                  uint64_t look_at_host_ns = kLookAtHostNs) {
  if (comes_soon(word, epoch)) return;
  await_late_word(words, word, epoch, kind, peer, control, look_at_host_ns);
}

}  // namespace torch_overlap::cuda
