#pragma once

#include <cstdint>

#include "torch_overlap/symm/cuda/wait_record.h"

// Waits of kernels for other ranks: bounded in time, and stopped by the host. The first one that
// expires records what it waited for. For .cu files.
namespace torch_overlap::cuda {

// Values of `failed`: no failure, a thread is recording a failure, the failure is recorded.
inline constexpr uint32_t kNoWaitFailed = 0;
inline constexpr uint32_t kRecordingFailure = 1;
inline constexpr uint32_t kWaitFailed = 2;

// Interval at which a wait polls host memory, which needs a round trip over PCIe.
inline constexpr uint64_t kHostPollIntervalNs = 20'000;
// The same if a thread of every block may wait: many concurrent round trips delay each other.
inline constexpr uint64_t kAllBlocksHostPollIntervalNs = 10'000'000;

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

// Orders this thread's earlier loads and stores, and those of other threads before a barrier with
// it, before its later stores.
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

// Returns true if a wait has failed: what a rank would signal may not be true any more.
__device__ __forceinline__ bool has_failed(const WaitControl& control) {
  return *static_cast<const volatile uint32_t*>(control.failed) != kNoWaitFailed;
}

// The same, or the host has stopped the waits. Reads host memory: a round trip over PCIe.
__device__ __forceinline__ bool has_failed_or_stopped(const WaitControl& control) {
  return has_failed(control) ||
         *static_cast<const volatile uint32_t*>(&control.record->stopped) != 0;
}

// Records `what` and `seen`, if nothing is recorded yet. From then on all waits fail.
__device__ __forceinline__ void record_failure(const WaitControl& control, const WaitRecord& what,
                                               uint64_t seen) {
  const volatile uint32_t* failed = control.failed;
  if (atomicCAS(control.failed, kNoWaitFailed, kRecordingFailure) != kNoWaitFailed) {
    while (*failed == kRecordingFailure) __nanosleep(64);  // until the words below are written
    return;
  }
  volatile WaitRecord* record = control.record;
  record->kind = what.kind;
  record->memory_id = what.memory_id;
  record->peer = what.peer;
  record->expected = what.expected;
  record->seen = seen;
  record->block = what.block;
  record->timeout_ns = control.timeout_ns;
  __threadfence_system();
  record->expired = 1;
  // The host must see the record before it sees another wait end.
  __threadfence_system();
  atomicExch(control.failed, kWaitFailed);
}

enum class WaitResult { ready, expired, failed };

// Polls until `is_ready(seen)`, with seen = load_acquire(address); until the timeout; or until
// another wait has failed, or the host stops the waits.
template <typename Word, typename IsReady>
__device__ WaitResult poll_until(const WaitControl& control, const Word* address,
                                 const IsReady& is_ready, uint64_t host_poll_interval_ns,
                                 Word& seen) {
  const volatile uint32_t* failed = control.failed;
  const volatile uint32_t* stopped = &control.record->stopped;
  seen = load_acquire(address);
  if (is_ready(seen)) return WaitResult::ready;
  const uint64_t begin = now_ns();
  uint64_t next_host_poll_ns = begin + host_poll_interval_ns;
  unsigned int sleep_ns = 32;
  while (!is_ready(seen)) {
    if (*failed == kWaitFailed) return WaitResult::failed;
    const uint64_t now = now_ns();
    if (now >= next_host_poll_ns) {
      if (*stopped != 0) {
        atomicCAS(control.failed, kNoWaitFailed,
                  kWaitFailed);  // later signals must not be sent
        return WaitResult::failed;
      }
      next_host_poll_ns = now + host_poll_interval_ns;
    }
    if (now - begin >= control.timeout_ns) return WaitResult::expired;
    __nanosleep(sleep_ns);
    sleep_ns = min(sleep_ns * 2, 256U);
    seen = load_acquire(address);
  }
  return WaitResult::ready;
}

// Waits until `is_ready(seen)`. Returns false if it expired (then `what` is recorded: kind, window,
// peer and expected), was stopped, or another wait had failed.
template <typename Word, typename IsReady>
__device__ bool wait_until(const WaitControl& control, const Word* address, const IsReady& is_ready,
                           const WaitRecord& what) {
  Word seen;
  const WaitResult end = poll_until(control, address, is_ready, kHostPollIntervalNs, seen);
  if (end == WaitResult::expired) record_failure(control, what, seen);
  return end == WaitResult::ready;
}

}  // namespace torch_overlap::cuda
