#pragma once

#include <cstdint>

namespace torch_overlap::cuda {

// What a wait was for; `window`, `peer`, `expected` and `seen` mean another thing in each.
enum class WaitKind : uint32_t {
  signal,  // of rank `peer` in the window
  begin,   // of operation `expected` of an overlap buffer, on rank `peer`
  chunk,   // of operation `expected` of an overlap buffer, by rank `peer`
  gone,    // as begin or chunk, but another rank has given up meanwhile
  rows,    // rank `peer` has begun with the word `seen`, this one with `expected` (symm/begin.h)
  step,    // `expected` of rank `peer` in a block of a direct collective
  apart,   // none: two operations that must follow one another ran at once
};

// What a kernel needs to wait; of one communicator, or of one that has none.
struct WaitRecord;
struct WaitControl {
  uint32_t* failed;    // device memory; not 0: a wait expired or was stopped
  WaitRecord* record;  // mapped host memory
  uint64_t timeout_ns;
};

// What a communicator's waits on the device and its host tell each other: in mapped host memory, so
// that a write of either side is seen by the other while kernels run.
struct WaitRecord {
  // Host to device: no wait goes on.
  uint32_t stopped;
  // Device to host: 1 once the rest is written. Only the first wait that expires writes.
  uint32_t expired;
  WaitKind kind;
  uint64_t window;  // SymmetricMemory::id()
  int32_t peer;
  uint64_t expected;
  uint64_t seen;
  uint64_t timeout_ns;
  uint32_t block;
  // Device to host: 1 once `late` is written: a wait has been longer than its time, but goes on for
  // a moment. Later ones overwrite it.
  uint32_t is_late;
  struct Late {
    int32_t peer;
    uint32_t block;
    uint64_t expected;
    uint64_t seen;
  } late;
};

}  // namespace torch_overlap::cuda
