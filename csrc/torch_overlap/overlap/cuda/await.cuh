#pragma once

#include "torch_overlap/overlap/cuda/words.h"
#include "torch_overlap/symm/cuda/wait_device.h"
#include "torch_overlap/symm/entry.h"

// How kernels of overlapped operations wait for a word of another rank: a flag, which is an epoch,
// or an entry. For .cu files.
namespace torch_overlap::cuda {

// How often a word is looked at without naps: it comes soon as a rule.
inline constexpr int kLooksWithoutNaps = 64;

// Whether it does, and what was seen last. The looks are at the word alone: whether a rank has
// gone, or a wait has failed, would be another trip to memory between two of them.
template <typename Word>
__device__ __forceinline__ bool comes_soon(const Word* word, uint32_t epoch, Word& seen) {
#pragma unroll 1
  for (int look = 0; look < kLooksWithoutNaps; ++look) {
    seen = load_acquire(word);
    if (reached(seen, epoch)) return true;
  }
  return false;
}

// To which operation a rank has come that has not come to the one of this epoch: for errors.
__device__ __forceinline__ uint32_t come_to(const uint32_t* /*word*/, uint32_t seen,
                                            uint32_t /*epoch*/) {
  return seen;
}
__device__ __forceinline__ uint32_t come_to(const BegunEntry* word, BegunEntry seen,
                                            uint32_t epoch) {
  return later_of(epoch_of(seen), epoch_of(load_acquire(word + to_other_entry(epoch))));
}

// Of a word that has been looked at so often. Returns what was seen last, which has not reached the
// epoch if a wait has failed.
template <typename Word>
__device__ Word await_late_word(const ChannelWords& words, const Word* word, uint32_t epoch,
                                WaitKind kind, int peer, const WaitControl& control,
                                uint64_t look_at_host_ns = kLookAtHostNs) {
  const uint32_t* const gone = words.gone;
  Word seen;
  const WaitEnd end = look_until(
      control, word,
      [epoch, gone](Word now) { return reached(now, epoch) || load_acquire(gone) != 0; },
      look_at_host_ns, seen);
  if (end == WaitEnd::failed) return seen;
  const bool is_late = end == WaitEnd::expired;
  if (!is_late) {
    // A rank that has gone since then has done its part of this.
    seen = load_acquire(word);
    if (reached(seen, epoch)) return seen;
  }
  WaitRecord what{};
  what.kind = is_late ? kind : WaitKind::gone;
  what.window = words.id;
  what.peer = peer;
  what.expected = epoch;
  give_up(control, what, come_to(word, seen, epoch));
  return seen;
}

template <typename Word>
__device__ Word await_word(const ChannelWords& words, const Word* word, uint32_t epoch,
                           WaitKind kind, int peer, const WaitControl& control,
                           uint64_t look_at_host_ns = kLookAtHostNs) {
  Word seen;
  if (comes_soon(word, epoch, seen)) return seen;
  return await_late_word(words, word, epoch, kind, peer, control, look_at_host_ns);
}

}  // namespace torch_overlap::cuda
