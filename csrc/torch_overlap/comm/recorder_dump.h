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

// The process's flight recorder on disk. Each file is written under a temporary name and then
// renamed, so a reader never sees a partial one.
//
// Threads: any.

// Writes the trace now and returns the file names: one, or one per rank if ranks are threads.
// Without a path the name is Env::recorder_file followed by the rank, as the analyzer expects it. A
// path that ends in ".json" gets all ranks of the process, as JSON. Any other path gets the
// analyzer's format; if ranks are threads, each appends its number to the path. Throws kRuntime if
// a file cannot be written.
TORCH_OVERLAP_API std::vector<std::string> dump_trace(
    const std::optional<std::string>& path = std::nullopt, const std::string& reason = {});

// Writes the trace of `recorder`, whichever ranks it recorded, in the analyzer's format to
// Env::recorder_file followed by `rank`. Returns that path.
TORCH_OVERLAP_API std::string dump_trace_of(const FlightRecorder& recorder, int rank,
                                            bool include_completed);

// Runs dump_trace() without a path on a separate thread. Returns at once. Files that cannot be
// written cause one warning in the life of the process.
TORCH_OVERLAP_API void dump_trace_async(const std::string& reason) noexcept;
// Waits at most `limit` until all requested dumps are written. For a process that is about to end.
TORCH_OVERLAP_API void wait_for_dumps(std::chrono::milliseconds limit) noexcept;

// Records the reason of a failure, and requests a dump. A backend calls it once its communicator
// can no longer be used because of a timeout or an error, before any other consequence. `comm` may
// be null.
TORCH_OVERLAP_API void report_failure(CommRecord* comm, const std::string& why) noexcept;

// Installs a handler that requests a dump, as dump_trace_async() does, and then calls the signal's
// previous handler; the default action of the signal no longer happens. Throws kValue if the system
// refuses.
TORCH_OVERLAP_API void dump_trace_on_signal(int signal);
// Called when a communicator is made: reads where dumps at failures go and, once per process,
// installs the signal that Env selects.
void prepare_dumps(const Env& env);

}  // namespace torch_overlap
