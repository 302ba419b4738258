#pragma once

#include <cstdint>

namespace torch_overlap::cuda {

// Kind of a wait, which determines the meaning of `memory_id`, `peer`, `expected` and `seen`.
enum class WaitKind : uint32_t {
  signal,              // signal of rank `peer` in the window
  begin,               // entry of rank `peer` into operation `expected` of an overlap buffer
  chunk,               // chunk of rank `peer` in operation `expected` of an overlap buffer
  peer_aborted,        // begin or chunk, but another rank has given up meanwhile
  signature_mismatch,  // rank `peer` has entered with payload `seen`, this one with `expected`
  step,                // round `expected` of rank `peer` in a block of a custom collective
  concurrent_ops,      // no wait: two operations that must be ordered ran concurrently
};

// Parameters of a kernel's waits, for one communicator or for none.
struct WaitRecord;
struct WaitControl {
  uint32_t* failed;    // device memory; not 0: a wait expired or was stopped
  WaitRecord* record;  // mapped host memory
  uint64_t timeout_ns;
};

// State shared between a communicator's waits on the device and its host. It is in mapped host
// memory, so that each side sees writes of the other while kernels run.
struct WaitRecord {
  // Host to device: all waits end.
  uint32_t stopped;
  // Device to host: 1 once the other fields are written. Only the first wait that expires writes.
  uint32_t expired;
  WaitKind kind;
  uint64_t memory_id;  // SymmetricMemory::id()
  int32_t peer;
  uint64_t expected;
  uint64_t seen;
  uint64_t timeout_ns;
  uint32_t block;
  // Device to host: 1 once `late` is written: a wait has exceeded its timeout, but continues for a
  // moment. Later waits overwrite it.
  uint32_t is_late;
  struct Late {
    int32_t peer;
    uint32_t block;
    uint64_t expected;
    uint64_t seen;
  } late;
};

}  // namespace torch_overlap::cuda
