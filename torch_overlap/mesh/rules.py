"""Which rule an operator of torch has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torch_overlap.mesh._core import OpRule

__all__ = ["known_operators", "rule_of"]

Shape = tuple[int, ...]
Shapes = Sequence[Shape]

# How elementwise operators treat pending inputs. An operator with a scalar beside a tensor is in _SCALAR as well.
_LINEAR = {"neg", "dropout", "native_dropout"}
_MOVE = {"clone", "contiguous", "detach", "detach_", "alias", "lift_fresh_copy"}
_ADD = {"add", "sub", "add_", "sub_"}
_NONLINEAR = {
    "relu", "gelu", "silu", "sigmoid", "tanh", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal", "pow",
    "abs", "sin", "cos", "erf", "softplus", "leaky_relu", "elu", "hardswish", "hardtanh", "mish", "clamp", "clamp_min",
    "clamp_max", "maximum", "minimum", "where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_and",
    "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "isnan", "isinf", "floor", "ceil",
    "round", "sign", "remainder", "fmod", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "relu_",
    "silu_", "logsigmoid", "rsub", "floor_divide",
}  # fmt: skip
_RESHAPE = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "squeeze_copy"}
_REDUCTION = {"sum", "mean", "amax", "amin", "prod"}


def known_operators() -> list[str]:
    """Names of the ATen operators that have a rule; others run on whole tensors."""
    elementwise = _LINEAR | _MOVE | _ADD | _NONLINEAR | {"mul", "div", "mul_", "div_", "to", "_to_copy", "type_as"}
    products = {"addmm", "baddbmm"}
    return sorted(elementwise | products | _RESHAPE | _REDUCTION | set(_OTHERS))


def rule_of(name: str, node: fx.Node, tensors: Sequence[fx.Node], shapes: Shapes, out_shapes: Shapes) -> OpRule | None:
    """The rule of an ATen operator on these tensors; None where there is none."""
    if name in _RESHAPE:
        return OpRule.reshape(shapes[0], out_shapes[0])
    if name in _REDUCTION:
        dims = _argument(node, 1, "dim", [])
        keepdim = bool(_argument(node, 2, "keepdim", False))
        return OpRule.reduction(name, shapes[0], [dims] if isinstance(dims, int) else list(dims or []), keepdim)
    if name in _OTHERS:
        return _OTHERS[name](node, shapes, out_shapes)
    how = _elementwise(name, node, tensors)
    return OpRule.elementwise(name, shapes, how) if how else None


def _argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _elementwise(name: str, node: fx.Node, tensors: Sequence[fx.Node]) -> str | None:
    has_scalar = len(tensors) < 2
    if name in ("mul", "mul_"):
        return "linear" if has_scalar else "multiply"
    if name in ("div", "div_"):
        rounds = node.kwargs.get("rounding_mode") is not None
        starts_with_tensor = node.args[0] in tensors
        if rounds or not starts_with_tensor:
            return "nonlinear"
        return "linear" if has_scalar else "divide"
    if name in ("to", "_to_copy", "type_as"):
        before, after = tensors[0].meta["val"].dtype, node.meta["val"].dtype
        return "move" if _widens(before, after) else "nonlinear"
    if name in _LINEAR:
        trains = name != "neg" and bool(_argument(node, 2, "train", True))
        return "nonlinear" if trains else "linear"  # ranks would drop other elements
    if name in _MOVE:
        return "move"
    if name in _ADD:
        return "nonlinear" if has_scalar else "add"  # a scalar would be added once a rank
    return "nonlinear" if name in _NONLINEAR else None


def _widens(before: torch.dtype, after: torch.dtype) -> bool:
    """Is every value of `before` one of `after`?"""
    if before == after:
        return True
    if not (before.is_floating_point and after.is_floating_point):
        return False
    small, large = torch.finfo(before), torch.finfo(after)
    return large.eps <= small.eps and large.max >= small.max and large.tiny <= small.tiny


def _transpose(node: fx.Node, shapes: Shapes, out_shapes: Shapes) -> OpRule:
    order = list(range(len(shapes[0])))
    name = str(node.target).removeprefix("aten.").split(".")[0]
    if name == "permute":
        order = list(node.args[1])  # type: ignore[arg-type]
    elif len(order) > 1:
        a, b = (0, 1) if name == "t" else (-2, -1) if name == "mT" else node.args[1:3]
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
    return OpRule.transpose(shapes[0], order)


def _slice(node: fx.Node, shapes: Shapes, out_shapes: Shapes) -> OpRule | None:
    dim = int(_argument(node, 1, "dim", 0))
    begin, end = _argument(node, 2, "start", 0) or 0, _argument(node, 3, "end", None)
    size = shapes[0][dim]
    begin = max(begin + size, 0) if begin < 0 else min(begin, size)
    end = size if end is None else max(end + size, 0) if end < 0 else min(end, size)
    if int(_argument(node, 4, "step", 1)) != 1:
        return None
    return OpRule.slice(shapes[0], dim, [(begin, max(begin, end))])


def _split(node: fx.Node, shapes: Shapes, out_shapes: Shapes) -> OpRule:
    dim = int(_argument(node, 2, "dim", 0))
    parts, at = [], 0
    for shape in out_shapes:
        parts.append((at, at + shape[dim]))
        at += shape[dim]
    return OpRule.slice(shapes[0], dim, parts)


def _take(node: fx.Node, shapes: Shapes, out_shapes: Shapes) -> OpRule:
    name = str(node.target)
    dim = 0 if "embedding" in name else int(node.args[1])  # type: ignore[arg-type]
    return OpRule.take(shapes[0], shapes[1], dim)


def _along(node: fx.Node, shapes: Shapes, out_shapes: Shapes) -> OpRule | None:
    dims = _argument(node, 1, "dim", -1)
    name = str(node.target).removeprefix("aten.").split(".")[0]
    if len(out_shapes) != 1:
        return None
    return OpRule.along(name.removeprefix("_"), shapes[0], [dims] if isinstance(dims, int) else list(dims))


def _norm(node: fx.Node, shapes: Shapes, out_shapes: Shapes) -> OpRule | None:
    normalized = node.args[1]
    dims = len(normalized) if isinstance(normalized, list | tuple) else 1
    return OpRule.norm(shapes[0], dims, len(shapes) - 1) if len(out_shapes) == 1 else None


def _conv(node: fx.Node, shapes: Shapes, out_shapes: Shapes) -> OpRule:
    groups = int(_argument(node, 6, "groups", 1))
    return OpRule.conv(shapes[0], shapes[1], out_shapes[0], groups, len(shapes) > 2)


def _attention(node: fx.Node, shapes: Shapes, out_shapes: Shapes) -> OpRule | None:
    if len(shapes) != 3 or float(_argument(node, 4, "dropout_p", 0.0)) != 0:
        return None  # a mask may depend on any position
    return OpRule.attention(shapes[0], shapes[1], shapes[2], bool(_argument(node, 5, "is_causal", False)))


_Rule = Callable[[fx.Node, Shapes, Shapes], "OpRule | None"]
_OTHERS: dict[str, _Rule] = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), lambda n, s, o: OpRule.matmul(s[0], s[1])),
    "linear": lambda n, s, o: OpRule.linear(s[0], s[1], len(s) > 2),
    **dict.fromkeys(("t", "transpose", "permute", "mT", "numpy_T"), _transpose),
    "expand": lambda n, s, o: OpRule.broadcast(s[0], o[0]),
    "broadcast_to": lambda n, s, o: OpRule.broadcast(s[0], o[0]),
    "cat": lambda n, s, o: OpRule.concat(list(s), int(_argument(n, 1, "dim", 0))),
    "slice": _slice,
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("embedding", "index_select"), _take),
    **dict.fromkeys(
        ("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "flip", "logcumsumexp"), _along
    ),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _conv),
    "scaled_dot_product_attention": _attention,
}
