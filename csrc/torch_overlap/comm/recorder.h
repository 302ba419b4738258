#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/call_record.h"

namespace torch_overlap {

// The last calls of this process, over all its communicators, for finding out what hung.
// TorchComm::issue_recorded records every call that reaches a backend, and the backend updates the
// record while the call runs. Reading accesses no device and acquires no lock of a communicator or
// of Python.
//
// Threads: any. add() holds a lock while it copies one pointer, records() while it copies all.
class TORCH_OVERLAP_API FlightRecorder {
 public:
  // Keeps the last `capacity` calls; none if it is 0.
  explicit FlightRecorder(size_t capacity);

  // Returns the recorder of every call. Its capacity is Env::recorder_size, read at the first use;
  // it is never destroyed.
  static FlightRecorder& of_process();

  bool is_enabled() const { return capacity_ > 0; }
  size_t capacity() const { return capacity_; }
  size_t size() const;

  void add(CallRecordPtr record) noexcept;
  // Returns the records, the oldest first.
  std::vector<CallRecordPtr> records() const;
  // Drops all records; the numbers in traces restart.
  void reset();
  // Returns the number of a record in a trace, counted from the last reset.
  uint64_t record_id(const CallRecord& record) const;

 private:
  const size_t capacity_;
  mutable ForkSafeMutex mutex_;      // guards all members below
  std::vector<CallRecordPtr> ring_;  // the next record replaces the oldest
  uint64_t added_ = 0;
  TraceCounts first_ids_;
};

enum class TraceFormat {
  // All fields, for people and scripts.
  kJson,
  // The pickle that torch.distributed.flight_recorder.fr_trace reads, with its names. Calls for
  // which it has no name are left out.
  kAnalyzer,
};

struct TraceOptions {
  TraceFormat format = TraceFormat::kJson;
  bool include_completed = true;
  // Include stacks, if they were kept. Symbolizing takes seconds for C++, and needs Python's lock
  // for Python.
  bool include_stacks = true;
  // Selects the trace of one rank if ranks are threads; nullopt selects that of the process.
  std::optional<int> thread_rank = std::nullopt;
  // Adds the communicators that belong to no thread, in a process that has both kinds.
  bool with_process = false;
  // Writes all ranks of the process into one trace.
  bool all_ranks = false;
  // Only communicators that have records; otherwise all live ones.
  bool only_recorded = false;
  // Reason for writing the trace.
  std::string reason = {};
};

TORCH_OVERLAP_API std::string trace(const FlightRecorder& recorder, const TraceOptions& options);

}  // namespace torch_overlap
