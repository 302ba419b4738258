"""Operators on a rank's own parts of the operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_overlap.mesh._core import Layout, OpRule
from torch_overlap.mesh.aten_call import AtenCall
from torch_overlap.mesh.local_take import IndexedDim, local_gather, local_take
from torch_overlap.mesh.random_ops import refuse_random
from torch_overlap.mesh.rules_compute import OF_IMAGES
from torch_overlap.mesh.rules_move import RESHAPES, dims_of_argument, taken_index

__all__ = ["LocalFunction", "local_call"]

LocalFunction = Callable[[Sequence[Tensor]], Any]


def local_call(
    call: AtenCall,
    rule: OpRule | None,
    input_layouts: Sequence[Layout],
    output_layouts: Sequence[Layout],
    rank: int,
    device: torch.device | None = None,
) -> LocalFunction:
    """Returns the operator on the parts of one rank. It takes the local tensors, in the order of call.inputs, and
    returns a tensor, or a tuple or list if the operator does.

    The layouts are those of a Strategy of `rule` (None: operands are whole). The parts of all ranks together, under the
    output layouts, are the result of the operator on the global tensors. Nothing waits for a device, so the function
    may be captured. It is differentiable if the operator is: the gradient of an input is that of the rank's own part.
    An operator without a rule gets its operands with the strides of its capture.

    Args:
        call: the operator.
        rule: its rule, or None.
        input_layouts: the layouts of the inputs.
        output_layouts: the layouts of the outputs.
        rank: the rank.
        device: the device of the result of an operator without inputs (arange, zeros).

    Raises:
        UnsupportedError: an operator that draws random numbers.
    """
    refuse_random(call)
    parts = _Parts(
        call,
        [layout.local_shape(x.shape, rank) for x, layout in zip(call.inputs, input_layouts, strict=True)],
        [layout.local_shape(x.shape, rank) for x, layout in zip(call.outputs, output_layouts, strict=True)],
        list(input_layouts),
        rank,
    )
    if rule is None:
        return _as_captured(call, _on_device(call, device))
    make = _TABLE.get(call.name)
    local = make(parts) if make is not None and parts.is_sharded_or_view() else None
    return _on_device(call, device) if local is None else local


class _Parts(NamedTuple):
    call: AtenCall
    inputs: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    layouts: list[Layout]
    rank: int

    def is_sharded_or_view(self) -> bool:
        """Returns True if a tensor is sharded, or if the operator is a view, which local strides may not allow."""
        call = self.call
        return call.name in RESHAPES or any(
            local != operand.shape
            for local, operand in zip([*self.inputs, *self.outputs], [*call.inputs, *call.outputs], strict=True)
        )

    def offset(self, index: int, dim: int) -> int:
        """Returns the offset of this rank's part of an input."""
        return self.layouts[index].offsets(self.call.inputs[index].shape, self.rank)[dim]


def _on_device(call: AtenCall, device: torch.device | None) -> LocalFunction:
    """Returns the operator, with devices among its arguments replaced by the device of the inputs."""
    places = [i for i, arg in enumerate(call.args) if isinstance(arg, torch.device)]
    names = [name for name, arg in call.kwargs.items() if isinstance(arg, torch.device)]
    if not places and not names:
        return call.as_function()

    def local(tensors: Sequence[Tensor]) -> Any:
        args, kwargs = call.bind(tensors)
        where = tensors[0].device if tensors else device
        for i in places:
            args[i] = where
        kwargs.update(dict.fromkeys(names, where))
        return call.target(*args, **kwargs)

    return local


def _as_captured(call: AtenCall, local: LocalFunction) -> LocalFunction:
    """Returns `local` on operands with the strides of the capture.

    A composite operator of torch selects the operators that it calls by strides, and some of these read memory with
    them (`_weight_norm` calls a kernel for contiguous tensors). The capture decides once; local tensors may be views.
    """
    if not call.inputs:
        return local
    strides = [operand.strides for operand in call.inputs]
    if not any(strides):
        return lambda tensors: local([t.contiguous() for t in tensors])
    return lambda tensors: local([_with_strides(t, s) for t, s in zip(tensors, strides, strict=True)])


def _with_strides(x: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """Returns x with these strides (None: contiguous): itself if it has them, else a copy."""
    if strides is None:
        return x.contiguous()
    if x.stride() == strides:
        return x
    # One element of each dimension with stride 0.
    once = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    made = torch.empty_strided(once.shape, strides, dtype=x.dtype, device=x.device).copy_(once)
    return made.expand(x.shape)


def _zeros_with_gradient(shape: Sequence[int], value: Any, dtype: torch.dtype, tensors: Sequence[Tensor]) -> Tensor:
    """Returns a constant that still depends on the inputs: the backward pass must visit them on every rank."""
    out = tensors[0].new_full(tuple(shape), value, dtype=dtype)
    for t in tensors:
        if t.requires_grad and (dtype.is_floating_point or dtype.is_complex):
            out = out + t.reshape(-1)[:0].sum().to(dtype)
    return out


def _reshape(parts: _Parts) -> LocalFunction:
    shape = parts.outputs[0]
    return lambda tensors: tensors[0].reshape(shape)


def _expand(parts: _Parts) -> LocalFunction:
    shape = parts.outputs[0]
    return lambda tensors: tensors[0].expand(shape)


def _mean(parts: _Parts) -> LocalFunction | None:
    """Sums over this rank's part and divides by the global number of elements."""
    call, (shape,) = parts.call, parts.inputs
    x, out = call.inputs[0], call.outputs[0].dtype
    dims = dims_of_argument(call, 1, "dim", None)
    if all(shape[d] == x.shape[d] for d in dims):
        return None
    keepdim = bool(call.argument(2, "keepdim", False))
    count = math.prod(x.shape[d] for d in dims)
    inside = torch.float32 if out in (torch.float16, torch.bfloat16) else out
    return lambda tensors: (tensors[0].sum(dims, keepdim, dtype=inside) / count).to(out)


def _min_max(parts: _Parts) -> LocalFunction | None:
    """Returns the identity of the maximum or minimum for an empty part."""
    call, dtype = parts.call, parts.call.outputs[0].dtype
    if len(call.inputs) != 1 or len(call.outputs) != 1 or 0 not in parts.inputs[0]:
        return None
    info = None if dtype is torch.bool else torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    is_max = call.name in ("amax", "max")
    if dtype.is_floating_point:
        value: Any = float("-inf") if is_max else float("inf")
    else:
        value = not is_max if info is None else info.min if is_max else info.max
    shape = parts.outputs[0]
    return lambda tensors: _zeros_with_gradient(shape, value, dtype, tensors)


def _whole_slice(parts: _Parts) -> LocalFunction | None:
    """Handles a slice of everything, also along a sharded dimension."""
    call = parts.call
    if len(call.outputs) != 1 or call.outputs[0].shape != call.inputs[0].shape:
        return None
    if call.is_sequence:
        return lambda tensors: [tensors[0].view_as(tensors[0])]
    return lambda tensors: tensors[0].view_as(tensors[0])


def _embedding(parts: _Parts) -> LocalFunction | None:
    taken = _taken(parts, 0)
    return None if taken is None else local_take(taken, padding=int(parts.call.argument(2, "padding_idx", -1)))


def _index_select(parts: _Parts) -> LocalFunction | None:
    taken = _taken(parts, int(parts.call.args[1]))
    return None if taken is None else local_take(taken)


def _index(parts: _Parts) -> LocalFunction | None:
    dim = taken_index(parts.call)
    taken = None if dim is None else _taken(parts, dim, wraps_negative=True)
    return None if taken is None else local_take(taken)


def _gather(parts: _Parts) -> LocalFunction | None:
    taken = _taken(parts, int(parts.call.args[1]))
    return None if taken is None else local_gather(taken)


def _taken(parts: _Parts, dim: int, *, wraps_negative: bool = False) -> IndexedDim | None:
    """Returns the indexed dimension of the first operand; None if this rank has all of it."""
    shape = parts.call.inputs[0].shape
    dim %= len(shape)
    own = parts.inputs[0][dim]
    if own == shape[dim]:
        return None
    return IndexedDim(parts.call.name, dim, shape[dim], own, parts.offset(0, dim), wraps_negative)


def _conv(parts: _Parts) -> LocalFunction | None:
    """Uses the number of local groups. Without local channels, only the bias remains."""
    call, (x, weight) = parts.call, parts.inputs[:2]
    place = 8 if call.name == "convolution" else 6
    dtype, shape = call.outputs[0].dtype, parts.outputs[0]
    if 0 in x or 0 in weight:
        ones = (1,) * (len(shape) - 2)

        def nothing(tensors: Sequence[Tensor]) -> Tensor:
            zeros = _zeros_with_gradient(shape, 0, dtype, tensors[:2])
            return zeros + tensors[2].reshape(-1, *ones) if len(tensors) > 2 else zeros

        return nothing
    groups = int(call.argument(place, "groups", 1))
    here = x[1] // weight[1]
    if here == groups:
        return None
    args = list(call.args)
    args[place] = here
    return call.with_arguments(args).as_function()


def _empty_result(parts: _Parts) -> LocalFunction | None:
    """Handles empty results, which some torch kernels refuse."""
    if any(0 not in shape for shape in parts.outputs):
        return None
    results = [(shape, output.dtype) for shape, output in zip(parts.outputs, parts.call.outputs, strict=True)]

    def nothing(tensors: Sequence[Tensor]) -> Any:
        found = tuple(_zeros_with_gradient(shape, 0, dtype, tensors) for shape, dtype in results)
        return found if len(found) > 1 else found[0]

    return nothing


_TABLE: dict[str, Callable[[_Parts], LocalFunction | None]] = {
    **dict.fromkeys(sorted(RESHAPES), _reshape),
    **dict.fromkeys(("expand", "broadcast_to", "expand_copy"), _expand),
    "mean": _mean,
    **dict.fromkeys(("amax", "amin", "max", "min"), _min_max),
    **dict.fromkeys(("slice", "narrow", "split", "split_with_sizes", "chunk", "tensor_split"), _whole_slice),
    "embedding": _embedding,
    "index_select": _index_select,
    "index": _index,
    "gather": _gather,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _conv),
    **dict.fromkeys(("scaled_dot_product_attention", "batch_norm", *OF_IMAGES), _empty_result),
}
