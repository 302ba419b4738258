#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

// silu(gate) * up, the activation of gated layers, in one kernel each for the result and for both
// gradients. `gate` and `up` have one shape; without `up`, `gate` [..., 2 n] holds both, side by
// side, as one product of joined weights computes them.
namespace torch_overlap::ops {

struct GateAndUp {
  at::Tensor gate;  // [..., n]
  at::Tensor up;
};

// Checks the operands and returns them apart, as views.
GateAndUp gate_and_up(std::string_view op, const at::Tensor& gate,
                      const std::optional<at::Tensor>& up);

// By operators of torch, differentiable: products of wide values, rounded once.
at::Tensor composed_swiglu(const at::Tensor& gate, const std::optional<at::Tensor>& up);
// Returns the gradients of gate and up, side by side.
at::Tensor composed_swiglu_backward(const at::Tensor& grad, const at::Tensor& gate,
                                    const std::optional<at::Tensor>& up);

}  // namespace torch_overlap::ops
