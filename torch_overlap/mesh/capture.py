"""Captures a torch function as ATen operators on tensors of global shape."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torch_overlap._C import InvalidValueError, UnsupportedError
from torch_overlap.mesh._core import Layout
from torch_overlap.mesh.aten_call import AtenCall, Operand
from torch_overlap.mesh.expand import EXPANSIONS
from torch_overlap.mesh.expand_sharded import SHARDED
from torch_overlap.mesh.fast_calls import fast_call
from torch_overlap.mesh.list_index import without_lists
from torch_overlap.mesh.program import Program, Recorded, Ref
from torch_overlap.mesh.random_ops import refuse_random
from torch_overlap.mesh.rules import rule_of
from torch_overlap.mesh.unsupported import refuse_strides

__all__ = ["capture"]

# torch keeps modes of this kind in state that all threads share.
_LOCK = threading.RLock()
# Operators that read elements.
_READ_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


class _ReadsElements(RuntimeError):
    """Raised by an operator whose result depends on elements, or that has no kernel for meta tensors."""


def capture(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
    layouts: Sequence[Layout | None] = (),
) -> Program:
    """Returns the ATen operators of `func(*args, **kwargs)`, where tensors are Operands. Nothing is computed.

    Operators that have a rule stay whole (linear, layer_norm, reshape). Composite operators are recorded as their
    parts; some are rewritten so that each part has a rule (a mean loss: a sum, a count, a division).

    Any thread may call it. A lock serializes the captures of several threads.

    Args:
        func: a function of torch, torch.nn.functional or torch.Tensor, including dunders.
        args: its arguments. Plain tensors among them are constants.
        kwargs: its keyword arguments.
        device: the device of the operands. An argument that names it means the device of each rank; other devices are
            refused.
        layouts: the layouts of the Operands, in order; without them the result is valid for any layout. Softmax, norms
            and losses along a sharded dimension are then captured as reductions, which send less than a gather of the
            dimension.

    Raises:
        UnsupportedError: random numbers, writes to a part of a tensor, `out=`, another device, as_strided, a result
            that depends on elements (item, nonzero, a mask as index).
        Exception: those of torch, for invalid operands.
    """
    kwargs = kwargs or {}
    if not kwargs:
        call = fast_call(func, args)
        if call is not None:
            count = len(call.inputs)
            return Program(call.inputs, {}, [Recorded(call, tuple(range(count)), (count,))], {}, Ref(count))
    if func is Tensor.__getitem__ and isinstance(args[0], Operand):
        args = (args[0], without_lists(args[1], args[0].shape))
    recorder = _Recorder(layouts)
    leaves, spec = pytree.tree_flatten(_with_devices(func, args, kwargs))
    leaves = [recorder.argument(leaf, device) for leaf in leaves]
    recorder.close_operands()
    inner_args, inner_kwargs = pytree.tree_unflatten(leaves, spec)
    try:
        with _LOCK, torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            result = recorder.run(lambda: func(*inner_args, **inner_kwargs))
    except _ReadsElements as error:
        text = str(error).partition("\n")[0].partition(". ")[0]
        name = getattr(func, "__name__", str(func))
        raise UnsupportedError(
            f"{name}: expected a function whose operators and shapes follow from shapes, got one that reads elements "
            f"({text}); run it on local or gathered tensors"
        ) from error
    program = recorder.program
    if isinstance(result, Iterator):
        result = tuple(result)
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
        result = pytree.tree_map_only(Tensor, recorder.ref, result)
    program.result = result
    return program


def _with_devices(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the arguments with device strings converted to torch.device."""
    named = dict(kwargs)
    if isinstance(named.get("device"), str):
        named["device"] = torch.device(named["device"])
    if func is Tensor.to:
        args = [torch.device(arg) if isinstance(arg, str) else arg for arg in args]
    return tuple(args), named


class _Recorder(SchemaCheckMode):
    """Sees operators before composite ones are decomposed: torch allows this only for its own kinds of modes."""

    def __init__(self, layouts: Sequence[Layout | None]) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self.program = Program([])
        self._arguments: list[tuple[Tensor, Tensor | None]] = []
        self._next = 0
        self._alive: list[Tensor] = []  # keeps tensors alive, so that no id is reused
        self._numbers: dict[int, int] = {}
        self._real: dict[int, Tensor] = {}  # id of a tensor with data -> its meta tensor
        self._layouts = layouts
        self._owner: dict[int, int] = {}  # id of a tensor -> its operand
        self._depth = 0  # number of operators that are being decomposed

    def argument(self, leaf: Any, device: torch.device | None) -> Any:
        if isinstance(leaf, Operand):
            made = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
            self.program.operands.append(leaf)
            self._arguments.append((made, None))
            return made
        if isinstance(leaf, Tensor):
            made = leaf.detach().to("meta")
            self._arguments.append((made, leaf))
            return made
        if isinstance(leaf, torch.device):
            index = leaf.index
            if device is not None and (leaf.type != device.type or index not in (None, device.index)):
                raise UnsupportedError(f"capture: expected the device of the operands, {device}, got {leaf}")
            return torch.device("meta")
        return leaf

    def close_operands(self) -> None:
        """Numbers the arguments, operands first."""
        for made, _ in (a for a in self._arguments if a[1] is None):
            self._owner[id(made)] = self._number(made)
        for made, constant in self._arguments:
            if constant is not None:
                self.program.constants[self._number(made)] = constant

    def run(self, function: Callable[[], Any]) -> Any:
        with enable_python_dispatcher(), self:
            return function()

    def ref(self, tensor: Tensor) -> Ref:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = self._same_as(tensor)
        return Ref(self._numbers[id(tensor)])

    def _same_as(self, tensor: Tensor) -> int:
        """Returns the number of the recorded tensor with the same storage: factories such as torch.arange return
        another object than their operator did."""
        storage = tensor.untyped_storage()._cdata
        for known in reversed(self._alive):
            if known.untyped_storage()._cdata == storage and known.shape == tensor.shape:
                self._alive.append(tensor)
                return self._numbers[id(known)]
        raise UnsupportedError(
            "capture: expected a function that makes tensors of numbers on the CPU, got one that makes them on the "
            "device of its operands; run it on local or gathered tensors"
        )

    def _number(self, tensor: Tensor) -> int:
        self._alive.append(tensor)
        self._numbers[id(tensor)] = self._next
        self._next += 1
        return self._next - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self._without_data, (args, kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:
            return args[0]
        func = _WITH_GRADIENT.get(func, func)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        operands, named = pytree.tree_map_only(Tensor, _operand, (args, kwargs))
        call = AtenCall(func, operands, named, [])
        refuse_random(call)
        if self._depth == 0:
            refuse_strides(call)
        try:
            result = _on_meta(func, args, kwargs)
        except RuntimeError:
            self._refuse_parts_that_read(func, args, kwargs)
            raise
        outputs = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, list | tuple) else []
        outputs = [t for t in outputs if isinstance(t, Tensor)]
        if not outputs:
            return result
        call = AtenCall(
            func, operands, named, [_operand(t) for t in outputs], is_sequence=not isinstance(result, Tensor)
        )
        expansion = self._sharded(call, args) or EXPANSIONS.get(call.name)
        if expansion is not None:
            expanded = self._substitute(lambda: expansion(*args, **kwargs))
            if expanded is not NotImplemented:
                return expanded
        elif call.inputs and _is_composite(func) and rule_of(call) is None:
            expanded = self._substitute(lambda: func.decompose(*args, **kwargs))
            if expanded is not NotImplemented:
                return expanded
        self._record(call, args, kwargs, outputs)
        return result

    def _sharded(self, call: AtenCall, args: Any) -> Callable[..., Any] | None:
        """Returns the replacement of an operator along a sharded dimension, or None."""
        entry = SHARDED.get(call.name)
        number = self._owner.get(id(args[0]), len(self._layouts)) if entry and args else len(self._layouts)
        layout = self._layouts[number] if number < len(self._layouts) else None
        if entry is None or layout is None or not args[0].is_floating_point():
            return None
        if args[0].dim() == 0 or args[0].numel() == 0:
            return None
        dims = entry.dims(*args)
        is_cut = dims is not None and any(layout.dims[d] for d in dims)
        return entry.function if is_cut else None

    def _record(self, call: AtenCall, args: Any, kwargs: Any, outputs: Sequence[Tensor]) -> None:
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        numbers = tuple(self.ref(t).number for t in inputs)
        self.program.steps.append(Recorded(call, numbers, tuple(self._number(t) for t in outputs)))

    def _substitute(self, function: Callable[[], Any]) -> Any:
        """Records the operators of `function`. Records nothing if it writes to parts of tensors or cannot be
        captured."""
        count = len(self.program.steps)
        numbers, writes = dict(self._numbers), dict(self.program.writes)
        self._depth += 1
        try:
            result = self.run(function)
        except UnsupportedError:
            result = NotImplemented
        finally:
            self._depth -= 1
        if result is NotImplemented:
            del self.program.steps[count:]
            self._numbers, self.program.writes = numbers, writes
        return result

    def _refuse_parts_that_read(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raises _ReadsElements if a part of a composite operator reads elements: only the part has the tag."""
        if _is_composite(func):
            try:
                self._substitute(lambda: func.decompose(*args, **kwargs))
            except _ReadsElements:
                raise
            except Exception:  # the caller raises that of the operator
                pass

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Records x.add_(y) as a new value of x."""
        name, target = func._schema.name.removeprefix("aten::"), args[0] if args else None
        if name == "detach_" and id(target) not in self._owner:
            return target
        functional = getattr(getattr(torch.ops.aten, name.removesuffix("_"), None), func._overloadname, None)
        if not isinstance(target, Tensor) or not name.endswith("_") or functional is None or self._has_views(target):
            raise UnsupportedError(
                f"{name}: expected to write to a whole tensor, got a part of one, or out=; make a new tensor with "
                "torch.where, torch.cat or an operator that returns its result"
            )
        value = self.run(lambda: functional(*args, **kwargs))
        if value.dtype != target.dtype:
            value = self.run(lambda: value.to(target.dtype))
        _on_meta(func, args, kwargs)  # raises if the in-place operator refuses what the functional one accepts
        self._numbers[id(target)] = self._numbers[id(value)]
        if id(target) in self._owner:
            self.program.writes[self._owner[id(target)]] = self._numbers[id(target)]
        return target

    def _has_views(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        return any(t is not tensor and t.untyped_storage()._cdata == storage for t in self._alive)

    def _without_data(self, tensor: Tensor) -> Tensor:
        """Returns the meta tensor of a constant; other tensors as they are."""
        if tensor.device.type == "meta":
            return tensor
        if id(tensor) not in self._real:
            self._real[id(tensor)] = made = tensor.detach().to("meta")
            self._alive.append(tensor)
            self.program.constants[self._number(made)] = tensor
        return self._real[id(tensor)]


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    try:
        with torch._C._DisablePythonDispatcher():
            if func._schema.name in _NEAREST and args[0].numel() == 0:
                return _without_images(func, *args, **kwargs)
            result = func(*args, **kwargs)
            return _with_reduced_shape(result, *args, **kwargs) if func is _vector_norm else result
    except NotImplementedError as error:  # no kernel, or a copy of the data
        raise _ReadsElements(str(error)) from error
    except RuntimeError as error:
        if _READ_TAGS.isdisjoint(func.tags) and func is not _split_at_elements:
            raise
        raise _ReadsElements(str(error)) from error


# torch selects these because tensors of a capture require no gradient.
_WITH_GRADIENT = {torch.ops.aten._embedding_bag_forward_only.default: torch.ops.aten._embedding_bag.default}
_split_at_elements = torch.ops.aten.tensor_split.tensor_indices_or_sections
_vector_norm = torch.ops.aten.linalg_vector_norm.default
_NEAREST = frozenset(f"aten::{name}{n}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3))


def _without_images(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Returns the result for a batch of 0 images, from that for one: torch's shape function fails for 0."""
    if 0 in x.shape[1:]:
        raise InvalidValueError("interpolate: expected x [batch, channels, pixels...] with channels and pixels, "
                                f"got shape {list(x.shape)}. Leave images without channels out.")  # fmt: skip
    result: Tensor = func(x.new_empty((1, *x.shape[1:])), *args, **kwargs)
    return result.new_empty((0, *result.shape[1:]))


def _with_reduced_shape(
    result: Tensor, x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """Returns a norm's result. Without keepdim, torch 2.11's shape function keeps dimensions of size 1."""
    return result.new_empty(x.real.sum(dim, keepdim).shape)


def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _operand(tensor: Tensor) -> Operand:
    strides = None if tensor.is_contiguous() else tensor.stride()
    return Operand(tuple(tensor.shape), tensor.dtype, strides)
