#pragma once

#include "torch_overlap/overlap/cuda/channel_words.h"
#include "torch_overlap/symm/cuda/wait_device.h"
#include "torch_overlap/symm/entry.h"

// Waits of the kernels of overlapped operations for a word of another rank: a flag, which is an
// epoch, or an entry flag. For .cu files.
namespace torch_overlap::cuda {

// Number of polls without sleeping, because the word usually arrives soon.
inline constexpr int kSpinPolls = 64;

// Returns true if the rank of a word has come to `epoch`, for both kinds of words.
__device__ __forceinline__ bool has_arrived(uint32_t flag, uint32_t epoch) {
  return has_reached(flag, epoch);
}
__device__ __forceinline__ bool has_arrived(EntryFlag entry, uint32_t epoch) {
  return has_entered(entry, epoch);
}

// Returns true if the word reaches the epoch within kSpinPolls polls. `seen` is the last value.
// Polls only the word: checks for an aborted rank or a failed wait would add a round trip to memory
// between two polls.
template <typename Word>
__device__ __forceinline__ bool spin_until_epoch(const Word* word, uint32_t epoch, Word& seen) {
#pragma unroll 1
  for (int look = 0; look < kSpinPolls; ++look) {
    seen = load_acquire(word);
    if (has_arrived(seen, epoch)) return true;
  }
  return false;
}

// Returns the last epoch that a rank has reached if it has not reached `epoch`: for error messages.
__device__ __forceinline__ uint32_t arrived_epoch(const uint32_t* /*word*/, uint32_t seen,
                                                  uint32_t /*epoch*/) {
  return seen;
}
__device__ __forceinline__ uint32_t arrived_epoch(const EntryFlag* word, EntryFlag seen,
                                                  uint32_t epoch) {
  return later_epoch(epoch_of(seen), epoch_of(load_acquire(word + other_entry_offset(epoch))));
}

// Slow path of await_word(), after it has polled the word. Returns the last value seen, which has
// not reached the epoch if a wait has failed.
template <typename Word>
__device__ Word await_late_word(const ChannelWords& words, const Word* word, uint32_t epoch,
                                WaitKind kind, int peer, const WaitControl& control,
                                uint64_t host_poll_interval_ns = kHostPollIntervalNs) {
  const uint32_t* const abort_flag = words.abort_flag;
  Word seen;
  const WaitResult end = poll_until(
      control, word,
      [epoch, abort_flag](Word now) {
        return has_arrived(now, epoch) || load_acquire(abort_flag) != 0;
      },
      host_poll_interval_ns, seen);
  if (end == WaitResult::failed) return seen;
  const bool is_late = end == WaitResult::expired;
  if (!is_late) {
    // A rank that has aborted since may have signaled this operation before.
    seen = load_acquire(word);
    if (has_arrived(seen, epoch)) return seen;
  }
  WaitRecord what{};
  what.kind = is_late ? kind : WaitKind::peer_aborted;
  what.memory_id = words.id;
  what.peer = peer;
  what.expected = epoch;
  record_failure(control, what, arrived_epoch(word, seen, epoch));
  return seen;
}

template <typename Word>
__device__ Word await_word(const ChannelWords& words, const Word* word, uint32_t epoch,
                           WaitKind kind, int peer, const WaitControl& control,
                           uint64_t host_poll_interval_ns = kHostPollIntervalNs) {
  Word seen;
  if (spin_until_epoch(word, epoch, seen)) return seen;
  return await_late_word(words, word, epoch, kind, peer, control, host_poll_interval_ns);
}

}  // namespace torch_overlap::cuda
