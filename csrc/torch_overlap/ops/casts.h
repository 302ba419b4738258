#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

// Casts between the states that a value may have along a group: replicated (R), invariant (I),
// partial (P).
namespace torch_overlap::ops {

// A rank's value stays or becomes the neutral element; the meaning of its gradient changes. `mine`:
// true on the rank whose value counts.
//   I -> R  the same value; the gradients are summed
at::Tensor invariant_to_replicated(const at::Tensor& x, std::string_view comm, int64_t size);
//   R -> I  the same value; the gradients are equal, and only one of them counts
at::Tensor replicated_to_invariant(const at::Tensor& x, bool mine);
//   R -> P, I -> P  the value on one rank, `fill` on the others
at::Tensor replicated_to_partial(const at::Tensor& x, bool mine, double fill);
at::Tensor invariant_to_partial(const at::Tensor& x, bool mine, double fill);

}  // namespace torch_overlap::ops
