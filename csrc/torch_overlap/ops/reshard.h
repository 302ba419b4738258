#pragma once

#include <ATen/core/Tensor.h>

#include "torch_overlap/mesh/plan.h"
#include "torch_overlap/spmd/mesh_comms.h"

// Runs a plan on local tensors. Each step uses the operators of this library, so that autograd,
// vmap, tracing and graph capture need no special support.
namespace torch_overlap::ops {

// Runs one step of a plan for a tensor of global `shape`. Uneven parts are padded for
// communication.
at::Tensor run_step(const at::Tensor& x, const mesh::Step& step, const mesh::Shape& shape,
                    spmd::MeshComms& comms);

}  // namespace torch_overlap::ops
