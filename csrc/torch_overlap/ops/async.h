#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/work.h"

// Results that are still being written. An `_async` operator returns its result at once and
// registers here the work that writes it; wait_tensor() waits for that work.
//
// The table holds works and version counters, never tensors. A work keeps its own tensors alive
// until it is done, so a result that is freed without a wait is written to the end, in memory that
// nothing else uses, and is released afterwards. Its entry is removed with it. Threads: any.
//
// Inputs: the communicator may read the input at any time before the first wait (on a CPU in a
// background thread, on a GPU on another stream), so changing it in between is a race. Such a
// change is a caller error, as it is for a tensor saved by autograd, and it is detected in the same
// way: by the version of the input. A copy of every input would detect nothing and would cost time
// on every call.
namespace torch_overlap::ops {

// Registers that `work` writes `out`, fresh memory that `op` computed from `input`. A null work
// sent nothing.
void register_pending_work(std::string_view op, const at::Tensor& input, const at::Tensor& out,
                           WorkPtr work);
// Waits for the work that writes this tensor's memory (views too). Returns at once if there is
// none. Any number of streams and threads may wait for the same work. Throws the error of the work
// once. Throws on every call if the input was changed before the first wait, since the result is
// then invalid.
void wait_for_work(const at::Tensor& tensor);
// Returns the number of live results that were not waited for or are not complete yet. For tests.
TORCH_OVERLAP_API int64_t pending_works();

// Returns `sent`, which an `_async` operator on `x` hands to the communicator. Returns a copy if
// `sent` is memory of an `x` without a version counter (an inference tensor), whose changes cannot
// be detected.
at::Tensor clone_if_unversioned(const at::Tensor& sent, const at::Tensor& x);

// True if an `_async` operator may return before its work is done: a plain tensor, outside any
// tracing. Otherwise (fake and meta tensors, torch.compile, vmap, tensor subclasses) the `_async`
// form is the synchronous one, so a compiler that reorders and reuses memory never sees an
// incomplete result.
bool can_start_async(const at::Tensor& x);
// True if autograd must record an operation on `x`.
bool needs_autograd(const at::Tensor& x);
// True if `x` carries a tangent of forward-mode differentiation.
bool has_tangent(const at::Tensor& x);

}  // namespace torch_overlap::ops
