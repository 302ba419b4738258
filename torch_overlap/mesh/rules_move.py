"""Rules of operators that move elements: reshape, transpose, slice, take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch_overlap.mesh._core import OpRule
from torch_overlap.mesh.aten_call import AtenCall
from torch_overlap.mesh.sparse_gradients import has_sparse_gradient

__all__ = ["MOVES", "RESHAPES", "dims_of_argument", "equation", "names_of", "taken_index"]

Shape = tuple[int, ...]

RESHAPES = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "squeeze_copy",
            "unsqueeze_copy", "view_copy", "_reshape_copy", "_reshape_alias", "ravel", "view_as"}  # fmt: skip


def names_of(shape: Sequence[int], whole: Sequence[int] = ()) -> list[str]:
    """Returns the factors of an operand for OpRule.einsum: d0 d1 ...; a ! suffix if it must be whole, 1 for size 1."""
    return ["1" if n == 1 else f"d{i}{'!' if i in whole else ''}" for i, n in enumerate(shape)]


def equation(inputs: Sequence[Sequence[str]], outputs: Sequence[Sequence[str]]) -> str:
    return " -> ".join(", ".join(" ".join(dims) for dims in side) for side in (inputs, outputs))


def dims_of_argument(call: AtenCall, index: int, name: str, default: Any) -> list[int]:
    """Returns the dimensions of the first operand that an argument names, counted from 0; all if it names none."""
    rank = len(call.inputs[0].shape)
    dims = call.argument(index, name, default)
    if isinstance(dims, bool):  # var(x, unbiased)
        dims = None
    dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
    return [d % rank for d in dims] if rank else []


def _reshape(call: AtenCall) -> OpRule | None:
    if len(call.inputs) != 1:
        return None
    return OpRule.reshape(call.inputs[0].shape, call.outputs[0].shape)


def _transpose(call: AtenCall) -> OpRule | None:
    shape = call.inputs[0].shape
    order = list(range(len(shape)))
    if call.name == "permute":
        order = [d % len(shape) for d in call.args[1]]
    elif call.name == "numpy_T":
        order.reverse()
    elif call.name == "movedim":
        source, target = ([x] if isinstance(x, int) else list(x) for x in call.args[1:3])
        rank = len(shape)
        moved = {t % rank: s % rank for s, t in zip(source, target, strict=True)}
        rest = iter(d for d in range(rank) if d not in moved.values())
        order = [moved[d] if d in moved else next(rest) for d in range(rank)]
    elif len(order) > 1:
        fixed = {"t": (0, 1), "mT": (-2, -1), "mH": (-2, -1), "adjoint": (-2, -1)}
        a, b = fixed[call.name] if call.name in fixed else call.args[1:3]
        order[a], order[b] = order[b], order[a]
    return OpRule.transpose(shape, order)


def _broadcast(call: AtenCall) -> OpRule | None:
    return OpRule.broadcast(call.inputs[0].shape, call.outputs[0].shape) if len(call.inputs) == 1 else None


def _slice(call: AtenCall) -> OpRule | None:
    dim = int(call.argument(1, "dim", 0))
    return _parts(call, dim)


def _parts(call: AtenCall, dim: int) -> OpRule | None:
    """Returns the rule of a slice, from the sizes of its parts: their positions do not matter."""
    shape = call.inputs[0].shape
    parts, at = [], 0
    for out in call.outputs:
        begin = at if at + out.shape[dim] <= shape[dim] else 0
        parts.append((begin, begin + out.shape[dim]))
        at = begin + out.shape[dim]
    return OpRule.slice(shape, dim, parts)


def _split(call: AtenCall) -> OpRule | None:
    return _parts(call, int(call.argument(2, "dim", 0)))


def _take(call: AtenCall) -> OpRule | None:
    if call.name == "embedding":
        if call.argument(3, "scale_grad_by_freq", False) or has_sparse_gradient(call):
            return None  # counts of the whole batch
        dim = 0
    else:
        dim = int(call.args[1])
    if len(call.inputs) != 2 or (call.name == "index_select" and len(call.inputs[1].shape) != 1):
        return None
    return OpRule.take(call.inputs[0].shape, call.inputs[1].shape, dim)


def taken_index(call: AtenCall) -> int | None:
    """Returns the dimension of x[:, index] with one tensor of integers; None for other indices."""
    indices = call.args[1]
    given = [d for d, index in enumerate(indices) if index is not None]
    if len(given) != 1 or len(call.inputs) != 2 or call.inputs[1].dtype.itemsize < 4:
        return None
    return given[0]


def _index(call: AtenCall) -> OpRule | None:
    dim = taken_index(call)
    return None if dim is None else OpRule.take(call.inputs[0].shape, call.inputs[1].shape, dim)


def _gather(call: AtenCall) -> OpRule | None:
    """Returns the rule of out[i, j] = x[i, index[i, j]]. If sharded along the dimension, every rank gathers from its
    own part."""
    x, index = (list(operand.shape) for operand in call.inputs)
    if not x or len(x) != len(index) or has_sparse_gradient(call):
        return None
    dim = int(call.args[1]) % len(x)
    x_names, index_names = names_of(x), names_of(index)
    for d in range(len(x)):
        if d == dim:
            x_names[d] = "1" if x[d] == 1 else "taken"
        elif x[d] != index[d]:  # fewer elements are taken, and they are not the first ones of every part
            x_names[d] = "1" if x[d] == 1 else f"d{d}!"
            index_names[d] = "1" if index[d] == 1 else f"e{d}!"
    return OpRule.einsum("gather", equation([x_names, index_names], [index_names]), [x, index])


def _scatter(call: AtenCall) -> OpRule | None:
    """Returns the rule of x[i, index[i, j]] = source[i, j], or +=: whole along the dimension, parallel along others."""
    x = call.inputs[0].shape
    if not x or len(call.inputs) == 1:
        return None
    dim = int(call.args[1]) % len(x)
    names, taken = names_of(x, whole=[dim]), names_of(x)
    taken[dim] = "taken!"
    others = []
    for operand in call.inputs[1:]:
        if len(operand.shape) != len(x) or any(n != x[d] for d, n in enumerate(operand.shape) if d != dim):
            return None
        others.append(["1" if n == 1 else name for name, n in zip(taken, operand.shape, strict=True)])
    if len({operand.shape[dim] for operand in call.inputs[1:]}) > 1:
        return None
    return OpRule.einsum(call.name, equation([names, *others], [names]), [x.shape for x in call.inputs])


def _index_add(call: AtenCall) -> OpRule | None:
    if len(call.inputs) != 3 or len(call.inputs[1].shape) != 1 or not call.inputs[0].shape:
        return None
    x, _, source = (operand.shape for operand in call.inputs)
    dim = int(call.args[1]) % len(x)
    names, added = names_of(x, whole=[dim]), names_of(x)
    added[dim] = "1" if source[dim] == 1 else "taken!"
    return OpRule.einsum(call.name, equation([names, [added[dim]], added], [names]), [x.shape for x in call.inputs])


def _cat(call: AtenCall) -> OpRule | None:
    dim = int(call.argument(1, "dim", 0))
    if any(len(x.shape) != len(call.outputs[0].shape) for x in call.inputs):
        return None  # empty vectors, which torch skips
    if len({x.dtype for x in call.inputs}) > 1:
        return None
    return OpRule.concat([x.shape for x in call.inputs], dim)


def _along(call: AtenCall) -> OpRule | None:
    dims = call.argument(2 if call.name == "roll" else 1, "dims", None)
    shape = call.inputs[0].shape
    return OpRule.along(call.name, shape, [dims] if isinstance(dims, int) else list(dims or range(len(shape))))


def _triangle(call: AtenCall) -> OpRule | None:
    return OpRule.along(call.name, call.inputs[0].shape, [-2, -1])


MOVES: dict[str, Callable[[AtenCall], OpRule | None]] = {
    **dict.fromkeys(sorted(RESHAPES), _reshape),
    **dict.fromkeys(("t", "transpose", "permute", "mT", "numpy_T", "swapaxes", "swapdims", "movedim", "moveaxis"),
                    _transpose),
    **dict.fromkeys(("expand", "broadcast_to", "expand_copy"), _broadcast),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("slice", "narrow"), _slice),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), _split),
    **dict.fromkeys(("embedding", "index_select"), _take),
    "index": _index,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), _scatter),
    **dict.fromkeys(("index_add", "index_copy"), _index_add),
    **dict.fromkeys(("flip", "roll"), _along),
    **dict.fromkeys(("tril", "triu"), _triangle),
}  # fmt: skip
