#pragma once

#include <ATen/core/Tensor.h>

#include <string>

// Casts between what a value may be along a group: replicated (R), invariant (I), pending (P).
namespace torch_overlap::ops {

// Replicated and invariant values, and pending ones: what a rank has stays or becomes neutral, what
// its gradient means changes. `mine`: this rank is the one whose value counts.
//   I -> R  the same value; the gradients are summed
at::Tensor invariant_to_replicated(const at::Tensor& x, const std::string& comm, int64_t size);
//   R -> I  the same value; of the gradients, which are equal, only one counts
at::Tensor replicated_to_invariant(const at::Tensor& x, bool mine);
//   R -> P, I -> P  the value on one rank, `fill` on the others
at::Tensor replicated_to_pending(const at::Tensor& x, bool mine, double fill);
at::Tensor invariant_to_pending(const at::Tensor& x, bool mine, double fill);

}  // namespace torch_overlap::ops
