#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "torch_overlap/base/env.h"
#include "torch_overlap/base/export.h"

namespace torch_overlap {

class FlightRecorder;
struct CommRecord;

// The process's flight recorder on disk. Each file is written under another name first and then
// renamed, so a reader never sees half of one.
//
// Threads: any.

// Writes the trace now and returns the files, one; or one for each rank where ranks are threads.
// Without a path: Env::recorder_file and the rank, as the analyzer reads it. A path that ends in
// ".json" gets all ranks of the process, as JSON. Any other path gets the analyzer's form; where
// ranks are threads each adds its number to it. Throws (kRuntime) if a file cannot be written.
TORCH_OVERLAP_API std::vector<std::string> dump_trace(
    const std::optional<std::string>& path = std::nullopt, const std::string& reason = {});

// The trace of `recorder`, of whatever rank is recorded there, in the analyzer's form, to
// Env::recorder_file and `rank`; returns that path.
TORCH_OVERLAP_API std::string dump_trace_of(const FlightRecorder& recorder, int rank,
                                            bool include_completed);

// As dump_trace() without a path, on a thread of its own. Returns at once. A file that cannot be
// written is one warning in the life of the process.
TORCH_OVERLAP_API void dump_trace_soon(const std::string& reason) noexcept;
// Waits until what was asked for is written, `limit` at most. For a process that is about to end.
TORCH_OVERLAP_API void wait_for_dumps(std::chrono::milliseconds limit) noexcept;

// By a backend, once its communicator can no longer be used because of a timeout or an error, and
// before anything else follows from that: notes the reason, and dumps soon. `comm` may be null.
TORCH_OVERLAP_API void report_failure(CommRecord* comm, const std::string& why) noexcept;

// From now on the signal makes a dump, as dump_trace_soon() does, and then calls the handler that
// it had before; its default action does not happen any more. Throws (kValue) if the system
// refuses.
TORCH_OVERLAP_API void dump_trace_on_signal(int signal);
// For a process that makes a communicator: where its dumps at failures go, and once in its life the
// signal that Env asks for.
void prepare_dumps(const Env& env);

}  // namespace torch_overlap
