#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include <optional>

#include "torch_overlap/collectives/cuda/kernels.h"
#include "torch_overlap/collectives/select.h"
#include "torch_overlap/comm/call.h"

// Converts a call to parameters of the kernels of custom collectives (collectives/cuda/kernels.h).
namespace torch_overlap {

std::optional<CollectiveKind> collective_kind(Primitive primitive);
// Returns an empty value if no kernel supports the call.
std::optional<CollectiveProblem> collective_problem(const Call& call, int size);

// Sets the parts to send and to receive. `params` already has the rank and the size of the group.
void set_parts(cuda::CollectiveParams& params, const Call& call);
// True if all parts are aligned to vectors.
bool is_aligned(const cuda::CollectiveParams& params);
// Returns the tensor that peers write to or, in a reduction, read. Undefined if it is not one
// tensor.
const at::Tensor& shared_tensor(const Call& call);

// Launches the kernels of a plan on `stream`, which is the current stream. `all` has all fields
// except those that follow from the plan and the operation. `window` is for a zero-copy plan.
// `is_dependent`: by programmatic dependent launch. `has_launched` is set once the peers can see
// the operation.
void launch_plan(const Call& call, const CollectivePlan& plan, const cuda::CollectiveParams& all,
                 const cuda::WindowPlacement& window, bool is_dependent, cudaStream_t stream,
                 bool& has_launched);
// Launches the norm of a call whose sum is complete on `stream`, which is the current stream.
void launch_rms_norm(const Call& call, cudaStream_t stream);
// True if kernels of this project normalize rows of `row_bytes` bytes.
bool has_norm_kernels(at::ScalarType dtype, size_t row_bytes);

}  // namespace torch_overlap
