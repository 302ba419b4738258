#pragma once

#include <ATen/core/Tensor.h>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/work.h"

// Results that are still being written. An `_async` operator returns its result at once and notes
// here which work writes it; wait_tensor() waits for that work.
//
// The table holds works, never tensors: a work keeps its own tensors alive until it is done, so a
// result that dies unwaited is written to the end, in memory that nobody else has, and is then
// freed. Its entry goes with it. Threads: any.
namespace torch_overlap::ops {

// `tensor` is fresh memory that `work` writes. A null work (nothing was sent) is not noted.
void note_work(const at::Tensor& tensor, WorkPtr work);
// Waits for the work that writes this tensor's memory (views too); at once if there is none. Any
// number of streams and threads may wait for the same one. Throws what went wrong in it, once.
void wait_for_work(const at::Tensor& tensor);
// Works that are not known to be done and whose result still lives. For tests.
TORCH_OVERLAP_API int64_t pending_works();

// True for a tensor that an `_async` operator may start on: a plain one, outside any tracing.
// Otherwise (fake and meta tensors, torch.compile, vmap, tensor subclasses) the `_async` form is
// the plain one: a compiler that reorders and re-uses memory never sees a result that is not there
// yet.
bool can_start_async(const at::Tensor& x);
// True if autograd wants to see an operation on `x`.
bool needs_autograd(const at::Tensor& x);

}  // namespace torch_overlap::ops
