#pragma once

#include <ATen/core/Tensor.h>

#include "torch_overlap/mesh/plan.h"
#include "torch_overlap/spmd/mesh_comms.h"

// How a plan runs on local tensors: each step by the operators of this library, so that autograd,
// vmap, tracing and graph capture see nothing new.
namespace torch_overlap::ops {

// One step of a plan for a tensor of global `shape`. Uneven parts are padded on the wire.
at::Tensor run_step(const at::Tensor& x, const mesh::Step& step, const mesh::Shape& shape,
                    spmd::MeshComms& comms);

}  // namespace torch_overlap::ops
