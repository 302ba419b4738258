#pragma once

#include <cstdint>

#include "torch_overlap/symm/cuda/wait_record.h"

// How kernels wait for other ranks: bounded in time, stopped by the host, and of all that expire
// the first one says what it waited for. For .cu files.
namespace torch_overlap::cuda {

// What `failed` holds: nothing has gone wrong, somebody writes down what has, it is written.
inline constexpr uint32_t kFine = 0;
inline constexpr uint32_t kWriting = 1;
inline constexpr uint32_t kFailed = 2;

// How often a wait looks at host memory, which takes a trip over PCIe.
inline constexpr uint64_t kLookAtHostNs = 20'000;
// The same where a thread of every block may wait: many such trips at once hold each other up.
inline constexpr uint64_t kManyLookAtHostNs = 10'000'000;

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_release(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// What this thread has seen or stored, and what others have before a barrier with it, comes before
// what it stores from here on.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ void store_relaxed(uint32_t* address, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void add_release(uint64_t* address, uint64_t value) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

// Whether a wait has failed: what a rank would be told need not be true any more.
__device__ __forceinline__ bool has_failed(const WaitControl& control) {
  return *static_cast<const volatile uint32_t*>(control.failed) != kFine;
}

// The same, or the host has stopped the waits. Looks at host memory: a trip over PCIe.
__device__ __forceinline__ bool has_failed_or_stopped(const WaitControl& control) {
  return has_failed(control) ||
         *static_cast<const volatile uint32_t*>(&control.record->stopped) != 0;
}

// Puts `what` on record, with what was seen, if nothing is yet: from here on all waits fail.
__device__ __forceinline__ void give_up(const WaitControl& control, const WaitRecord& what,
                                        uint64_t seen) {
  const volatile uint32_t* failed = control.failed;
  if (atomicCAS(control.failed, kFine, kWriting) != kFine) {
    while (*failed == kWriting) __nanosleep(64);  // until the few words below are written
    return;
  }
  volatile WaitRecord* record = control.record;
  record->kind = what.kind;
  record->window = what.window;
  record->peer = what.peer;
  record->expected = what.expected;
  record->seen = seen;
  record->block = what.block;
  record->timeout_ns = control.timeout_ns;
  __threadfence_system();
  record->expired = 1;
  // The host must see that before it sees another wait end.
  __threadfence_system();
  atomicExch(control.failed, kFailed);
}

enum class WaitEnd { there, expired, failed };

// Looks until `is_there(seen)`, where seen = load_acquire(address); until the time is over; or
// until another wait has failed, or the host stops the waits.
template <typename Word, typename IsThere>
__device__ WaitEnd look_until(const WaitControl& control, const Word* address,
                              const IsThere& is_there, uint64_t look_at_host_ns, Word& seen) {
  const volatile uint32_t* failed = control.failed;
  const volatile uint32_t* stopped = &control.record->stopped;
  seen = load_acquire(address);
  if (is_there(seen)) return WaitEnd::there;
  const uint64_t begin = now_ns();
  uint64_t look_at_host = begin + look_at_host_ns;
  unsigned int nap = 32;
  while (!is_there(seen)) {
    if (*failed == kFailed) return WaitEnd::failed;
    const uint64_t now = now_ns();
    if (now >= look_at_host) {
      if (*stopped != 0) {
        atomicCAS(control.failed, kFine, kFailed);  // what comes behind must not be signalled
        return WaitEnd::failed;
      }
      look_at_host = now + look_at_host_ns;
    }
    if (now - begin >= control.timeout_ns) return WaitEnd::expired;
    __nanosleep(nap);
    nap = min(nap * 2, 256U);
    seen = load_acquire(address);
  }
  return WaitEnd::there;
}

// Waits until `is_there(seen)`. False if it gave up: expired (then `what` is on record: kind,
// window, peer and expected), stopped, or another wait had failed.
template <typename Word, typename IsThere>
__device__ bool wait_until(const WaitControl& control, const Word* address, const IsThere& is_there,
                           const WaitRecord& what) {
  Word seen;
  const WaitEnd end = look_until(control, address, is_there, kLookAtHostNs, seen);
  if (end == WaitEnd::expired) give_up(control, what, seen);
  return end == WaitEnd::there;
}

}  // namespace torch_overlap::cuda
