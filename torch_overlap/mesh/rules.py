"""The rules of ATen operators."""

from __future__ import annotations

import cmath

import torch

from torch_overlap.mesh._core import OpRule
from torch_overlap.mesh.aten_call import AtenCall
from torch_overlap.mesh.expand import EXPANSIONS
from torch_overlap.mesh.rules_compute import COMPUTE
from torch_overlap.mesh.rules_move import MOVES

__all__ = ["known_operators", "rule_of", "widens"]

# Behaviour of elementwise operators on partial inputs. An operator with a scalar and a tensor may behave differently:
# see _elementwise.
_LINEAR = {"neg", "dropout", "native_dropout", "alpha_dropout", "feature_dropout", "zeros_like", "real", "imag"}
_MOVE = {"clone", "contiguous", "detach", "alias", "lift_fresh_copy", "lift_fresh", "positive", "resolve_conj",
         "resolve_neg"}  # fmt: skip
_ADD = {"add", "sub"}
_NONLINEAR = {
    "relu", "relu6", "gelu", "silu", "sigmoid", "tanh", "exp", "exp2", "log", "log2", "log10", "log1p",
    "expm1", "sqrt", "rsqrt", "reciprocal", "pow", "square", "abs", "sin", "cos", "tan", "asin", "acos", "atan",
    "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "softplus", "leaky_relu",
    "elu", "selu", "celu", "hardswish", "hardsigmoid", "hardtanh", "hardshrink", "softshrink", "threshold", "mish",
    "_prelu_kernel", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin", "where",
    "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not",
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift", "__and__",
    "__or__", "__xor__", "__lshift__", "__rshift__", "isnan", "isinf", "isfinite", "isclose", "nan_to_num", "floor",
    "ceil", "round", "trunc", "frac", "sign", "sgn", "signbit", "remainder", "fmod", "floor_divide", "rsub",
    "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "log_sigmoid", "addcmul", "addcdiv", "lerp",
    "logaddexp", "logaddexp2", "hypot", "xlogy", "heaviside", "copysign", "lgamma", "digamma", "sinc", "rad2deg",
    "deg2rad", "copy", "fill", "logit", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "soft_margin_loss",
}  # fmt: skip
_CASTS = {"to", "_to_copy"}
_REINTERPRETED = {"view.dtype", "view_copy.dtype"}
_IN_PLACE = {"add_", "sub_", "mul_", "div_", "relu_", "silu_", "detach_"}  # in graphs that other tools traced
_LOSSES = {"mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
           "binary_cross_entropy_with_logits"}  # fmt: skip


def known_operators() -> list[str]:
    """Returns the names of the ATen operators that have a rule, or are rewritten with others that have. All others run
    on whole tensors."""
    elementwise = _LINEAR | _MOVE | _ADD | _NONLINEAR | _CASTS | _REINTERPRETED | _IN_PLACE | {"mul", "div", "type_as"}
    return sorted(elementwise | set(COMPUTE) | set(MOVES) | set(EXPANSIONS))


def rule_of(call: AtenCall) -> OpRule | None:
    """Returns the rule of an operator on these operands.

    None if there is no rule: then the operands must be whole (OpRule.opaque), which is correct and slow. A known name
    may still have no rule for some arguments.
    """
    if not call.inputs:
        return None
    rule = _find(call)
    if rule is None or rule.inputs != [x.shape for x in call.inputs]:
        return None
    return rule if rule.outputs == [x.shape for x in call.outputs] else None


def _find(call: AtenCall) -> OpRule | None:
    name = call.name
    make = MOVES.get(name) or COMPUTE.get(name)
    try:
        if make is not None:
            return make(call)
        if name in _IN_PLACE:
            name = name.removesuffix("_")
        how = _elementwise(name, call)
        return OpRule.elementwise(name, [x.shape for x in call.inputs], how) if how else None
    except ValueError:  # operands that torch accepts, in a form that the rule does not know
        return None


def _elementwise(name: str, call: AtenCall) -> str | None:
    has_scalar = len(call.inputs) < 2
    if name == "mul":
        return _scaling(call) if has_scalar else "multiply"
    if name == "div":
        rounds = call.argument(2, "rounding_mode") is not None
        if rounds or call.args[0] is not call.inputs[0]:
            return "nonlinear"
        return _scaling(call) if has_scalar else "divide"
    if name in _CASTS or name == "type_as":
        if len(call.inputs) != 1 and name != "type_as":
            return None
        return "move" if len(call.inputs) == 1 and widens(call.inputs[0].dtype, call.outputs[0].dtype) else "nonlinear"
    if name in _REINTERPRETED:
        return "nonlinear" if call.inputs[0].dtype.itemsize == call.outputs[0].dtype.itemsize else None
    if name in _LINEAR:
        trains = "dropout" in name and bool(call.argument(2, "train", True))
        return "nonlinear" if trains else "linear"  # ranks would drop different elements
    if name in _MOVE:
        return "move"
    if name in _ADD:
        return "nonlinear" if has_scalar else "add"  # a scalar would be added once per rank
    if name in _LOSSES and len(call.outputs[0].shape) == 0:
        return "nonlinear" if all(not x.shape for x in call.inputs) else None
    return "nonlinear" if name in _NONLINEAR else None


def _scaling(call: AtenCall) -> str:
    """Returns the behaviour of a product with a scalar. An infinite factor, or a division by 0, gives NaN if the terms
    of a partial sum have different signs."""
    number = next(arg for arg in (*call.args, *call.kwargs.values()) if isinstance(arg, int | float | complex))
    return "linear" if cmath.isfinite(number) and (number != 0 or call.name == "mul") else "nonlinear"


def widens(before: torch.dtype, after: torch.dtype) -> bool:
    """Returns True if terms of a value in `before` may be converted to `after` before they are added up: it has all
    their values. Terms of integers do not add up in other integers, in which they wrap around elsewhere."""
    if before == after:
        return True
    if not (before.is_floating_point and after.is_floating_point):
        return False
    small, large = torch.finfo(before), torch.finfo(after)
    return large.eps <= small.eps and large.max >= small.max and large.tiny <= small.tiny
