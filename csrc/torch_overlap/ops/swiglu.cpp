#include "torch_overlap/ops/swiglu.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>

#include "torch_overlap/ops/composed.h"

namespace torch_overlap::ops {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr char kSwiglu[] = "swiglu";
constexpr char kSwigluBackward[] = "_swiglu_backward";
using SwigluForward = Composed<kSwiglu, composed_swiglu>;
using SwigluGradient = Composed<kSwigluBackward, composed_swiglu_backward>;

Tensor swiglu_meta(const Tensor& gate, const OptionalTensor& up) {
  const auto parts = gate_and_up(kSwiglu, gate, up);
  return at::empty_symint(parts.gate.sym_sizes(), gate.options());
}

Tensor swiglu_backward_meta(const Tensor&, const Tensor& gate, const OptionalTensor& up) {
  auto sizes = gate_and_up(kSwiglu, gate, up).gate.sym_sizes().vec();
  sizes.back() = sizes.back() * 2;
  return at::empty_symint(sizes, gate.options());
}

class Swiglu : public Function<Swiglu> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* context, const Tensor& gate, const OptionalTensor& up) {
    context->save_for_backward({gate, up.value_or(Tensor())});
    return SwigluForward::call_below_autograd(gate, up);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto up = saved[1].defined() ? OptionalTensor(saved[1]) : std::nullopt;
    auto both = SwigluGradient::call(grads[0], saved[0], up);
    if (!up) return {std::move(both), Tensor()};
    const auto features = saved[0].sym_size(-1);
    return {both.narrow_symint(-1, 0, features), both.narrow_symint(-1, features, features)};
  }
};

Tensor swiglu_autograd(const Tensor& gate, const OptionalTensor& up) {
  if (has_tangent(gate) || (up && has_tangent(*up))) return composed_swiglu(gate, up);
  if (needs_autograd(gate) || needs_autograd(up)) return Swiglu::apply(gate, up);
  return SwigluForward::call_below_autograd(gate, up);
}

}  // namespace

Tensor composed_swiglu(const Tensor& gate, const OptionalTensor& up) {
  const auto parts = gate_and_up(kSwiglu, gate, up);
  const auto wide = at::toOpMathType(gate.scalar_type());
  const auto product = at::silu(parts.gate.to(wide)) * parts.up.to(wide);
  return product.to(gate.scalar_type()).contiguous();
}

Tensor composed_swiglu_backward(const Tensor& grad, const Tensor& gate, const OptionalTensor& up) {
  const auto parts = gate_and_up(kSwiglu, gate, up);
  const auto wide = at::toOpMathType(gate.scalar_type());
  const auto wide_grad = grad.to(wide);
  const auto wide_gate = parts.gate.to(wide);
  const auto sigmoid = at::sigmoid(wide_gate);
  const auto silu = wide_gate * sigmoid;
  const auto grad_gate = wide_grad * parts.up.to(wide) * (sigmoid + silu * (1 - sigmoid));
  return at::cat({grad_gate, wide_grad * silu}, -1).to(gate.scalar_type()).contiguous();
}

GateAndUp gate_and_up(std::string_view op, const Tensor& gate, const OptionalTensor& up) {
  TORCH_OVERLAP_CHECK(at::isFloatingType(gate.scalar_type()) && gate.element_size() > 1, kType, op,
                      ": expected gate of dtype float32, float16, bfloat16 or float64, got ",
                      gate.scalar_type(), ". Convert it.");
  TORCH_OVERLAP_CHECK(gate.dim() >= 1, kValue, op,
                      ": expected gate [..., features], got a scalar. Use gate.reshape(1).");
  if (!up) {
    const auto features = gate.sym_size(-1) / 2;
    TORCH_OVERLAP_CHECK((features * 2).sym_eq(gate.sym_size(-1)).expect_true(__FILE__, __LINE__),
                        kValue, op, ": expected an even number of features of gate and up in one ",
                        "tensor, got shape ", gate.sym_sizes(), ". Pass up.");
    return {gate.narrow_symint(-1, 0, features), gate.narrow_symint(-1, features, features)};
  }
  TORCH_OVERLAP_CHECK(up->scalar_type() == gate.scalar_type() && up->device() == gate.device(),
                      kType, op, ": expected up of dtype ", gate.scalar_type(), " on ",
                      gate.device(), " as gate, got ", up->scalar_type(), " on ", up->device(),
                      ". Move or convert it.");
  TORCH_OVERLAP_CHECK(up->dim() == gate.dim(), kValue, op, ": expected up of shape ",
                      gate.sym_sizes(), " as gate, got ", up->sym_sizes(), ".");
  for (int64_t dim = 0; dim < gate.dim(); ++dim) {
    TORCH_OVERLAP_CHECK(
        up->sym_size(dim).sym_eq(gate.sym_size(dim)).expect_true(__FILE__, __LINE__), kValue, op,
        ": expected up of shape ", gate.sym_sizes(), " as gate, got ", up->sym_sizes(), ".");
  }
  return {gate, *up};
}

TORCH_OVERLAP_SCHEMAS("swiglu(Tensor gate, Tensor? up=None) -> Tensor",
                      "_swiglu_backward(Tensor grad, Tensor gate, Tensor? up=None) -> Tensor")
TORCH_OVERLAP_COMPOSED(kSwiglu, composed_swiglu, swiglu_meta, swiglu_autograd)
TORCH_OVERLAP_COMPOSED(kSwigluBackward, composed_swiglu_backward, swiglu_backward_meta,
                       SwigluGradient::autograd)

}  // namespace torch_overlap::ops
