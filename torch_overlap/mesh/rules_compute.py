"""Rules of operators that compute: products, reductions, softmax, norms, convolutions, attention."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch_overlap.mesh._core import OpRule
from torch_overlap.mesh.aten_call import AtenCall
from torch_overlap.mesh.rules_move import dims_of_argument, equation, names_of

__all__ = ["COMPUTE", "OF_IMAGES"]


def _matmul(call: AtenCall) -> OpRule:
    return OpRule.matmul(call.inputs[0].shape, call.inputs[1].shape)


def _linear(call: AtenCall) -> OpRule:
    return OpRule.linear(call.inputs[0].shape, call.inputs[1].shape, len(call.inputs) > 2)


def _reduction(call: AtenCall) -> OpRule | None:
    name = {"max": "amax", "min": "amin"}.get(call.name, call.name)
    x = call.inputs[0]
    if call.name in ("max", "min") and (len(call.outputs) == 2 or len(call.inputs) == 2):
        return _extreme(call)
    dims = call.argument(1, "dim", None)
    keepdim = bool(call.argument(2, "keepdim", False))
    if name in ("amax", "amin") and math.prod(x.shape) == 0 and math.prod(call.outputs[0].shape) > 0:
        return None  # torch's operator raises
    if name == "prod" and call.outputs[0].dtype.is_complex:
        return _whole_along(call)  # no communicator multiplies complex numbers
    return OpRule.reduction(name, x.shape, [dims] if isinstance(dims, int) else list(dims or []), keepdim)


def _extreme(call: AtenCall) -> OpRule | None:
    if len(call.inputs) == 2:  # two tensors
        return OpRule.elementwise(call.name, [x.shape for x in call.inputs])
    return _whole_along(call)


def _whole_along(call: AtenCall) -> OpRule | None:
    """Returns the rule of operators that need some dimensions whole, and leave size 1, none, or the same size there:
    argmax, logsumexp, sort."""
    shape = call.inputs[0].shape
    index, name, default = _DIMS.get(call.name, (1, "dim", None))
    dims = dims_of_argument(call, index, name, default)
    inside = names_of(shape, whole=dims)
    outs = []
    for out in call.outputs:
        if out.shape == shape:
            outs.append(inside)
        elif len(out.shape) == len(shape):
            outs.append(["1" if d in dims else inside[d] for d in range(len(shape))])
        else:
            outs.append([inside[d] for d in range(len(shape)) if d not in dims])
    return _einsum_rule(call, [inside], outs)


# Position of the argument with the dimensions, if not 1.
_DIMS: dict[str, tuple[int, str, Any]] = {
    "linalg_vector_norm": (2, "dim", None),
    "norm": (2, "dim", None),
    "kthvalue": (2, "dim", -1),
    "sort": (1, "dim", -1),
    "argsort": (1, "dim", -1),
    "cummax": (1, "dim", -1),
    "cummin": (1, "dim", -1),
}


def _einsum_rule(call: AtenCall, inputs: Sequence[Sequence[str]], outputs: Sequence[Sequence[str]]) -> OpRule:
    return OpRule.einsum(call.name, equation(inputs, outputs), [x.shape for x in call.inputs])


def _of_images(call: AtenCall) -> OpRule | None:
    """Returns the rule of operators that compute each image by itself: pooling, interpolation, padding by pixels."""
    if len(call.inputs) != 1:
        return None
    pads = call.argument(1, "pad", ()) if call.name == "pad" else None
    ndim = int(_NDIM.findall(call.name)[0]) if pads is None else len(pads) // 2
    return OpRule.along(call.name, call.inputs[0].shape, list(range(-ndim, 0)), [out.shape for out in call.outputs])


def _along(call: AtenCall) -> OpRule | None:
    if len(call.outputs) != 1 or len(call.inputs) != 1:
        return None
    dims = call.argument(1, "dim", -1)
    name = call.name.removeprefix("_")
    return OpRule.along(name, call.inputs[0].shape, [dims] if isinstance(dims, int) else list(dims))


def _topk(call: AtenCall) -> OpRule | None:
    return OpRule.along("topk", call.inputs[0].shape, [call.argument(2, "dim", -1)], [x.shape for x in call.outputs])


def _norm(call: AtenCall) -> OpRule | None:
    normalized = call.args[1]
    dims = len(normalized) if isinstance(normalized, list | tuple) else 1
    shape = call.inputs[0].shape
    if len(call.outputs) == 1:
        return OpRule.norm(shape, dims, len(call.inputs) - 1)
    first = len(shape) - dims
    names = names_of(shape, whole=range(first, len(shape)))
    statistics = [*names[:first], *["1"] * dims]
    return _einsum_rule(call, [names, *[names[first:]] * (len(call.inputs) - 1)], [names, statistics, statistics])


def _group_norm(call: AtenCall) -> OpRule | None:
    names = names_of(call.inputs[0].shape, whole=range(1, len(call.inputs[0].shape)))
    return _einsum_rule(call, [names, *[[names[1]]] * (len(call.inputs) - 1)], [names])


def _batch_norm(call: AtenCall) -> OpRule | None:
    if call.argument(5, "training", False) or len(call.inputs[0].shape) < 2:
        return None  # needs the statistics of the whole batch, or has no channel dimension
    names = names_of(call.inputs[0].shape)
    return _einsum_rule(call, [names, *[[names[1]]] * (len(call.inputs) - 1)], [names])


def _conv(call: AtenCall) -> OpRule | None:
    x, weight = call.inputs[0].shape, call.inputs[1].shape
    if call.name == "convolution":
        if call.argument(6, "transposed", False):
            return None
        groups = int(call.argument(8, "groups", 1))
    else:
        groups = int(call.argument(6, "groups", 1))
    return OpRule.conv(x, weight, call.outputs[0].shape, groups, len(call.inputs) > 2)


def _attention(call: AtenCall) -> OpRule | None:
    if float(call.argument(4, "dropout_p", 0.0)) != 0:
        return None
    query, key, value, *mask = (x.shape for x in call.inputs)
    is_causal = bool(call.argument(5, "is_causal", False))
    if not mask:
        return OpRule.attention(query, key, value, is_causal)
    rank = len(query)
    if rank < 3 or query[: rank - 3] != key[: rank - 3] or len(mask[0]) > rank:
        return None
    batch = [f"b{d}" for d in range(rank - 3)]
    heads, kv_heads = query[-3], key[-3]
    kv = "1" if kv_heads == 1 else "h"
    joined = kv if heads == kv_heads else "r" if kv_heads == 1 else "(h r)"
    full = [*batch, joined, "s", "t!"]
    sizes = [*query[:-1], key[-2]]
    masked = []
    for d, n in enumerate(mask[0]):
        at = rank - len(mask[0]) + d
        masked.append("1" if n == 1 and sizes[at] != 1 else full[at])
    return _einsum_rule(
        call,
        [[*batch, joined, "s", "d!"], [*batch, kv, "t!", "d!"], [*batch, kv, "t!", "e"], masked],
        [[*batch, joined, "s", "e"]],
    )


def _einsum(call: AtenCall) -> OpRule | None:
    text = str(call.args[0]).replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if "." in text or any(len(set(term)) != len(term) for term in terms):
        return None  # an ellipsis, a diagonal
    if not arrow:
        right = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    shapes = [x.shape for x in call.inputs]
    ins = [["1" if n == 1 else c for c, n in zip(term, s, strict=True)] for term, s in zip(terms, shapes, strict=True)]
    out = ["1" if n == 1 else c for c, n in zip(right, call.outputs[0].shape, strict=True)]
    return _einsum_rule(call, ins, [out])


def _whole_matrices(call: AtenCall) -> OpRule | None:
    """Returns the rule for batches of matrices that must be whole."""
    return OpRule.along(call.name, call.inputs[0].shape, [-2, -1]) if len(call.inputs) == 1 else None


_NDIM = re.compile("([123])d")
OF_IMAGES = (
    *(f"{name}{n}d" for n in (1, 2, 3) for name in (
        "max_pool", "avg_pool", "adaptive_avg_pool", "_adaptive_avg_pool", "adaptive_max_pool", "upsample_nearest",
        "_upsample_nearest_exact", "reflection_pad", "replication_pad")),
    "max_pool2d_with_indices", "max_pool3d_with_indices", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "pad",
)  # fmt: skip

COMPUTE: dict[str, Callable[[AtenCall], OpRule | None]] = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "vdot"), _matmul),
    "linear": _linear,
    **dict.fromkeys(("sum", "mean", "amax", "amin", "prod", "max", "min"), _reduction),
    **dict.fromkeys(
        ("argmax", "argmin", "logsumexp", "sort", "argsort", "median", "nanmedian", "mode", "kthvalue", "cummax",
         "cummin", "var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm", "any", "all", "nansum",
         "aminmax", "count_nonzero"),
        _whole_along,
    ),
    **dict.fromkeys(
        ("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp"), _along
    ),
    "topk": _topk,
    **dict.fromkeys(("layer_norm", "rms_norm", "native_layer_norm"), _norm),
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _conv),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(OF_IMAGES, _of_images),
    "einsum": _einsum,
    "cholesky": _whole_matrices,
}  # fmt: skip
