#pragma once

#include <functional>
#include <string>

#include "torch_overlap/base/env.h"
#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/work.h"

namespace torch_overlap {

// Ends the process with SIGABRT. This is the only place where the library does so: a communicator
// with abort_process_on_timeout_or_error has failed, and what waits for it cannot raise. Writes
// `message`, waits for the flight recorder's dump (at most 10 s), runs the abort hooks (`on_abort`,
// at most 10 s: one may need a lock that a stuck thread holds, such as Python's), waits for
// Env::health_check_wait, writes the stacks of set_stack_writer, then "Aborting process due to
// timeout" or "due to error" (`status`) with the option that disables this, and aborts. The first
// caller of the process does it; later callers wait for that.
//
// Called by the watcher of an operation: NCCL's watchdog, or the thread of a host operation. Never
// called by abort().
[[noreturn]] TORCH_OVERLAP_API void abort_process(WorkStatus status, const std::string& message,
                                                  const std::function<void()>& on_abort);

// Reads the settings of abort_process(). Called when a communicator is made, because a process that
// is ending must not read its environment.
void prepare_process_abort(const Env& env);

// Writes the stacks of a language that the library does not know to stderr. It runs on a separate
// thread with a limit of two seconds, because it may need a lock that a stuck thread holds.
using StackWriter = void (*)();
TORCH_OVERLAP_API void set_stack_writer(StackWriter writer);

}  // namespace torch_overlap
