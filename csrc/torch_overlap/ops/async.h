#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/work.h"

// Results that are still being written. An `_async` operator returns its result at once and notes
// here which work writes it; wait_tensor() waits for that work.
//
// The table holds works and version counters, never tensors: a work keeps its own tensors alive
// until it is done, so a result that dies unwaited is written to the end, in memory that nobody
// else has, and is then freed. Its entry goes with it. Threads: any.
//
// The input. The communicator may read it at any time before the first wait, on a CPU in a thread
// of its own, on a GPU on another stream, so a change in between is a race. Such a change is an
// error of the caller, as it is for a tensor that autograd saved, and is found in the same way: by
// the version of the input. A copy of every input would find nothing and cost its time on every
// call.
namespace torch_overlap::ops {

// `out` is fresh memory that `work` writes and `op` made of `input`. A null work sent nothing.
void note_work(std::string_view op, const at::Tensor& input, const at::Tensor& out, WorkPtr work);
// Waits for the work that writes this tensor's memory (views too); at once if there is none. Any
// number of streams and threads may wait for the same one. Throws what went wrong in it, once; and
// each time if the input was changed before the first wait, since the result is of no use then.
void wait_for_work(const at::Tensor& tensor);
// Results that live and were not waited for, or are not there yet. For tests.
TORCH_OVERLAP_API int64_t pending_works();

// `sent`, which an `_async` operator of `x` hands to the communicator. A copy if it is memory of an
// `x` without a version (a tensor of inference mode), whose changes nothing would find.
at::Tensor sent_later(const at::Tensor& sent, const at::Tensor& x);

// True for a tensor that an `_async` operator may start on: a plain one, outside any tracing.
// Otherwise (fake and meta tensors, torch.compile, vmap, tensor subclasses) the `_async` form is
// the plain one: a compiler that reorders and re-uses memory never sees a result that is not there
// yet.
bool can_start_async(const at::Tensor& x);
// True if autograd wants to see an operation on `x`.
bool needs_autograd(const at::Tensor& x);

}  // namespace torch_overlap::ops
