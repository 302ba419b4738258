#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include <optional>

#include "torch_overlap/comm/backends/nccl/direct_kernels.h"
#include "torch_overlap/comm/call.h"
#include "torch_overlap/comm/direct.h"

// What a call is to the kernels of direct collectives (direct_kernels.h).
namespace torch_overlap {

// Empty where the call has a form that is not done directly.
std::optional<DirectProblem> direct_problem(const Call& call, int size);

// What goes where, of parameters with the rank and the size of the group.
void set_parts(cuda::DirectParams& params, const Call& call);
// Whether a vector of any part is a vector in memory.
bool is_aligned(const cuda::DirectParams& params);
// What the peers write to, or in a reduction read. Undefined where it is not one tensor.
const at::Tensor& shared_tensor(const Call& call);

// Launches the kernels of a plan on `stream`, which is the current one; `params` has all but what
// follows from the plan and the operation. `window`: of a plan without copies. `has_begun` is set
// once the peers will hear of it.
void launch_plan(const Call& call, const DirectPlan& plan, const cuda::DirectParams& params,
                 const cuda::DirectWindow& window, bool is_dependent, cudaStream_t stream,
                 bool& has_begun);
// The norm of a call whose sum is there, on `stream`, which is the current one.
void launch_rms_norm(const Call& call, cudaStream_t stream);

}  // namespace torch_overlap
