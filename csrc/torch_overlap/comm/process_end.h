#pragma once

#include <functional>
#include <string>

#include "torch_overlap/base/env.h"
#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/work.h"

namespace torch_overlap {

// The one place where the library ends the process: a communicator with
// abort_process_on_timeout_or_error has failed, and what waits for it cannot raise. Writes
// `message`, waits for the flight recorder's dump (10 s at most), runs the abort hooks (`on_abort`,
// 10 s at most: one may need a lock that a stuck thread holds, such as Python's), waits for
// Env::health_check_wait, writes the stacks of set_stack_writer, then "Aborting process due to
// timeout" or "due to error" (`status`) with the option that turns this off, and ends with SIGABRT.
// The first caller of the process does it; another one waits for that.
//
// Called by whoever watches operations: NCCL's watchdog, the thread of a host operation. Never by
// abort().
[[noreturn]] TORCH_OVERLAP_API void end_process(WorkStatus status, const std::string& message,
                                                const std::function<void()>& on_abort);

// For a process that makes a communicator: a process that ends does not read its environment.
void prepare_process_end(const Env& env);

// Writes the stacks of a language that the library does not know to stderr. It runs on a thread of
// its own, which is waited for two seconds: it may need a lock that a stuck thread holds.
using StackWriter = void (*)();
TORCH_OVERLAP_API void set_stack_writer(StackWriter writer);

}  // namespace torch_overlap
