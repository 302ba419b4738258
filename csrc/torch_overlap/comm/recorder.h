#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/call_record.h"

namespace torch_overlap {

// The last calls of this process, over all its communicators, for whoever wants to know what hung.
// Every call that reaches a backend is written down in TorchComm::issue, and goes on being updated
// by the backend for as long as it runs; reading looks at no device and takes no lock of a
// communicator or of Python.
//
// Threads: any. add() takes a lock for the time of a pointer's copy, records() for that of all.
class TORCH_OVERLAP_API FlightRecorder {
 public:
  // Keeps the last `capacity` calls; 0: none at all.
  explicit FlightRecorder(size_t capacity);

  // The one that records every call. Its capacity is Env::recorder_size, read when it is first
  // needed; it is never destroyed.
  static FlightRecorder& of_process();

  bool is_enabled() const { return capacity_ > 0; }
  size_t capacity() const { return capacity_; }
  size_t size() const;

  void add(CallRecordPtr record) noexcept;
  // The oldest first.
  std::vector<CallRecordPtr> records() const;
  // Forgets all records; the numbers in traces start again.
  void reset();
  // The number that a trace shows for a record: counts from the last reset.
  uint64_t record_id(const CallRecord& record) const;

 private:
  const size_t capacity_;
  mutable ForkSafeMutex mutex_;      // all below
  std::vector<CallRecordPtr> ring_;  // the next one takes the place of the oldest
  uint64_t added_ = 0;
  TraceCounts first_ids_;
};

enum class TraceFormat {
  // Everything that is known, for people and scripts.
  kJson,
  // The pickle that torch.distributed.flight_recorder.fr_trace reads, in its vocabulary. Calls for
  // which it has no word are left out.
  kAnalyzer,
};

struct TraceOptions {
  TraceFormat format = TraceFormat::kJson;
  bool include_completed = true;
  // Stacks, where they were kept. Turning addresses into names takes seconds for C++ and Python's
  // lock for Python.
  bool include_stacks = true;
  // The trace of one rank of those that are threads; nullopt: of the process.
  std::optional<int> thread_rank = std::nullopt;
  // With what belongs to no thread, in a process that has both.
  bool with_process = false;
  // All ranks of the process in one trace.
  bool all_ranks = false;
  // Only communicators of which there are records; else all that are alive.
  bool only_recorded = false;
  // Why it is written.
  std::string reason = {};
};

TORCH_OVERLAP_API std::string trace(const FlightRecorder& recorder, const TraceOptions& options);

}  // namespace torch_overlap
