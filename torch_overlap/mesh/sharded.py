"""Sharded: a tensor whose parts lie on the ranks of a mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from torch_overlap._C import InvalidTypeError, InvalidValueError, MeshComms, StateError
from torch_overlap.mesh._core import Layout
from torch_overlap.mesh.refused import REFUSED
from torch_overlap.mesh.tracing import asked, is_argument, is_dynamo_compiling, layout_in_trace
from torch_overlap.mesh.value_spec import (
    Spec,
    expect_connected,
    gradient_of,
    layout_of,
    ranks_of,
    spec_of,
    target_of,
)

if TYPE_CHECKING:
    from torch_overlap.mesh.products import PendingProduct

__all__ = ["Sharded", "from_local", "maker_of"]

_reshard = torch.ops.torch_overlap.reshard


def maker_of(spec: Spec) -> int:
    """Who makes a value now: 2 in the capture of a CUDA graph, else 1. (0: the caller, who may change it.)"""
    if is_dynamo_compiling() or spec.device.type != "cuda":
        return 1
    return 2 if torch.cuda.is_current_stream_capturing() else 1


def _version_of(value: Tensor | Sharded | None) -> int:
    """How often its memory was written to, as a view of something else too; -1 where torch does not count."""
    local = value._local if isinstance(value, Sharded) else value
    return -1 if local is None or is_dynamo_compiling() or local.is_inference() else local._version


def _is_inference() -> bool:
    return not is_dynamo_compiling() and torch.is_inference_mode_enabled()


class Sharded:
    """A tensor of global shape `shape`, of which this rank has `local`.

    Ordinary torch functions, methods and operators take it: each finds the cheapest way to run on what lies where
    (`propagate`), brings its operands there, and runs on local tensors. Pending sums are reduced where somebody needs
    them. All ranks call the same functions in the same order. It is no torch.Tensor: local tensors carry the autograd
    graph, and `grad` is that of `local`.

    Not for functions that change a tensor in place (they raise), nor for random ones: work on `local` there. A
    function's result keeps what it was moved to; where either was changed since, by all ranks, it is moved again.

    Attributes:
        local: This rank's part. Of a pending value: its term.
        layout: Where the parts lie.
        mesh: The connected mesh.
    """

    __slots__ = ("__weakref__", "_copies", "_ended", "_local", "_maker", "_product", "spec")

    def __init__(self, local: Tensor | None, spec: Spec, product: PendingProduct | None = None, maker: int = 0) -> None:
        self._local, self.spec, self._product, self._maker = local, spec, product, maker
        self._copies: dict[tuple[str, bool, bool], tuple[int, Any, int]] | None = None
        self._ended: tuple[Tensor, Spec, bool, int] | None = None

    # --- What it is

    @property
    def local(self) -> Tensor:
        """This rank's part, of shape spec.local_shape; of a pending value its term. A product that waits is computed.

        Valid on the current stream; it carries the autograd graph. Assigning one replaces the value's part.
        """
        if self._local is None:
            assert self._product is not None
            self._local = self._product.compute()
        return self._local

    @local.setter
    def local(self, value: Tensor) -> None:
        self._local, self._product, self._copies, self._ended, self._maker = value, None, None, None, 0

    @property
    def layout(self) -> Layout:
        """Where the parts lie."""
        return layout_in_trace(self.spec) if is_dynamo_compiling() else self.spec.layout

    @property
    def mesh(self) -> MeshComms:
        """The connected mesh."""
        return self.spec.mesh

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every rank's part."""
        return self.spec.dtype

    @property
    def device(self) -> torch.device:
        """The device of this rank's part."""
        return self.spec.device

    @property
    def ndim(self) -> int:
        """How many dimensions."""
        return len(self.spec.shape)

    @property
    def requires_grad(self) -> bool:
        """Whether this rank's part requires a gradient."""
        local = self._local
        return local.requires_grad if local is not None else bool(self._product and self._product.requires_grad)

    @property
    def is_leaf(self) -> bool:
        """Whether this rank's part is a leaf of the autograd graph."""
        return self.local.is_leaf

    @property
    def grad(self) -> Sharded | None:
        """The gradient, as it lies: see gradient_layout."""
        if self.local.grad is None:
            return None
        layout = gradient_of(self.spec).layout
        return Sharded(self.local.grad, spec_of(self.mesh, layout, self.shape, self.local.grad.dtype))

    @grad.setter
    def grad(self, value: None) -> None:
        if value is not None:
            raise InvalidTypeError("Sharded.grad: expected None, got a value; set local.grad")
        self.local.grad = None

    def dim(self) -> int:
        """How many dimensions."""
        return len(self.spec.shape)

    def size(self, dim: int | None = None) -> Any:
        """The global shape, or of it one dimension."""
        return self.spec.shape if dim is None else self.spec.shape[dim]

    def numel(self) -> int:
        """How many elements the whole value has."""
        return self.spec.shape.numel()

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.spec.dtype.itemsize

    def is_floating_point(self) -> bool:
        """Whether the dtype is one of floating point."""
        return self.spec.dtype.is_floating_point

    def get_device(self) -> int:
        """The index of the device; -1 for a CPU."""
        return -1 if self.device.index is None else self.device.index

    def type(self, dtype: Any = None, non_blocking: bool = False) -> Any:
        """The name of the tensor type, as torch.Tensor.type; with `dtype` the value in another one."""
        if dtype is None:
            return torch.empty(0, dtype=self.dtype, device=self.device).type()
        return dispatch.call(Tensor.type, (self, dtype, non_blocking), {})

    def cpu(self) -> Sharded:
        """Itself on a mesh of CPUs; elsewhere an error."""
        out: Sharded = dispatch.call(Tensor.to, (self, "cpu"), {})
        return out

    def cuda(self) -> Sharded:
        """Itself on a mesh of GPUs; elsewhere an error."""
        out: Sharded = dispatch.call(Tensor.to, (self, "cuda"), {})
        return out

    def __len__(self) -> int:
        if not self.shape:
            raise InvalidTypeError("len, iter: expected one or more dimensions, got a scalar Sharded")
        return self.shape[0]

    def __iter__(self) -> Iterator[Sharded]:
        return iter(dispatch.call(Tensor.unbind, (self,), {}) if len(self) else ())

    def __repr__(self) -> str:
        return f"Sharded({self.spec}, local {tuple(self.spec.local_shape)})"

    # --- Moving it

    def reshard(self, spec: Any) -> Sharded:
        """The same value in another layout: any spelling of one. Costs what `mesh.plan(...)` says; differentiable."""
        return self._to(asked(target_of, self.spec, spec))

    def shard(self, mesh: MeshComms, spec: Any = None, replicated_axes: Sequence[str] = (),
              partial_sum_axes: Sequence[str] = ()) -> Sharded:  # fmt: skip
        """`torch_overlap.mesh.shard` of it."""
        from torch_overlap.mesh.communication.shard import shard

        return shard(self, mesh, spec, replicated_axes, partial_sum_axes)

    def anchor(self) -> Sharded:
        """The same value, which stays where it lies, and so does what a function makes of it alone, of as many
        elements (a cast, a transpose; a slice does not): an operator moves its other operands, also where it would be
        cheaper to move this one, unless there is no other way. For split weights."""
        return Sharded(self.local, asked(_anchored, self.spec))

    def _reshard(self, layout: Layout) -> Sharded:
        return self._to(spec_of(self.mesh, layout, self.shape, self.dtype))

    def _to(self, target: Spec) -> Sharded:
        return self if target.text == self.spec.text else Sharded(self._moved(target), target, None, maker_of(target))

    def _moved(self, target: Spec) -> Tensor:
        """The local tensor under another layout.

        Results of functions keep what they were moved to, so that each move is made once; what others made (a leaf, a
        buffer) may change, and is moved each time. Which it is depends on nothing that may differ between ranks. A
        pending result that was reduced once is moved on from there.
        """
        spec = self.spec
        if target.text == spec.text:
            return self.local
        moved: Tensor | None = self._copy(target.text)
        if moved is not None:
            return moved
        grad = torch.is_grad_enabled()
        if self._ended is not None and self._ended[2:] == (grad, _version_of(self._ended[0])):
            moved = _moved(self._ended[0], self._ended[1], target)
        elif self._product is not None:
            moved = self._product.ended(spec, target)
        if moved is None:
            moved = _moved(self.local, spec, target)
        if self._remember(target.text, moved) and self._ended is None and target.is_whole and not spec.is_whole:
            self._ended = moved, target, grad, _version_of(moved)
        return moved

    def _operand(self, target: Spec) -> Tensor:
        """The local tensor under another layout, to compute with. Without a gradient a cast is nothing."""
        spec = self.spec
        if target.values == spec.values:
            local = self.local
            if target.text == spec.text:
                return local
            # Under vmap it is the tensor inside that requires a gradient.
            if not is_batchedtensor(local) and not (local.requires_grad and torch.is_grad_enabled()):
                return local
        return self._moved(target)

    def _keeps(self) -> bool:
        """Does the value keep what it is moved to? One that was made in a capture only there, others only outside."""
        if is_dynamo_compiling():
            return not is_argument(self)  # what it was moved to before guards no compiled function
        return self._maker != 0 and self._maker == maker_of(self.spec)

    def _copy(self, what: str) -> Any:
        """What it became before: the local tensor under a layout, or a Sharded of a dtype."""
        if self._copies is None or not self._keeps():
            return None
        found = self._copies.get((what, torch.is_grad_enabled(), _is_inference()))
        if found is None or found[0] != _version_of(self._local) or found[2] != _version_of(found[1]):
            return None
        return found[1]

    def _remember(self, what: str, made: Any) -> bool:
        if not self._keeps():
            return False
        if self._copies is None:
            self._copies = {}
        self._copies[what, torch.is_grad_enabled(), _is_inference()] = _version_of(self._local), made, _version_of(made)
        return True

    def full(self) -> Tensor:
        """The whole tensor, on every rank; with the same gradient on every rank."""
        return self.reshard(None).local

    full_tensor = full

    def to_local(self) -> Tensor:
        """This rank's part. Of a pending value it is an error: take `local`, or reshard."""
        if self.layout.partial:
            raise StateError(
                f"to_local: expected a value that is not pending, got {self.layout}; reshard it, or take .local"
            )
        return self.local

    # --- Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        """On the same mesh; of leaves only, as with tensors."""
        return Sharded(copy.deepcopy(self.local, memo), self.spec)

    def __reduce__(self) -> NoReturn:
        self.spec.__reduce__()

    # --- Autograd

    def requires_grad_(self, requires_grad: bool = True) -> Sharded:
        """Changes this rank's part, as torch.Tensor.requires_grad_; returns itself."""
        self.local = self.local.requires_grad_(requires_grad)
        return self

    def detach(self) -> Sharded:
        """The same part without its graph, lying alike."""
        return Sharded(self.local.detach(), self.spec)

    def retain_grad(self) -> None:
        """torch.Tensor.retain_grad of this rank's part: backward() then leaves `grad` on a value that is no leaf."""
        self.local.retain_grad()

    def backward(self, gradient: Sharded | None = None, retain_graph: bool | None = None,
                 create_graph: bool = False) -> None:  # fmt: skip
        """Of a scalar, or with a gradient of its shape, which is brought where the gradient belongs."""
        local, own = autograd.begin(self, gradient)
        local.backward(own, retain_graph, create_graph)

    # --- Numbers

    def item(self) -> Any:
        """The number of a value of one element. Collective where it is sharded or pending; waits for the device."""
        return self.full().item()

    def tolist(self) -> Any:
        """full().tolist(): collective where parts differ; waits for the device."""
        return self.full().tolist()

    def numpy(self) -> Any:
        """full().numpy(): on a mesh of CPUs. Collective where parts differ."""
        return self.full().numpy()

    def __bool__(self) -> bool:
        return bool(self.full())

    def __float__(self) -> float:
        return float(self.full())

    def __int__(self) -> int:
        return int(self.full())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def __array__(self, *_: Any) -> NoReturn:
        raise TypeError("Sharded: expected a plain tensor for numpy, got a Sharded; take .full() or .local")

    __hash__ = object.__hash__

    # --- Torch

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:  # fmt: skip
        return dispatch.call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(Tensor, name, None)
        is_view = name in ("T", "mT", "H", "mH")  # other attributes would be those of a tensor without data
        if attribute is None or name.startswith("__") or not (callable(attribute) or is_view):
            raise AttributeError(f"'Sharded' object has no attribute '{name}'; .local has those of this rank's part")
        if not callable(attribute):
            return dispatch.call(attribute.__get__, (self,), {})  # T, mT
        return _method(attribute).__get__(self)


def _anchored(spec: Spec) -> Spec:
    return spec_of(spec.mesh, spec.layout, spec.shape, spec.dtype, anchored=True)


def _moved(local: Tensor, spec: Spec, target: Spec) -> Tensor:
    moved: Tensor = _reshard(local, spec.name, spec.text, target.text, spec.shape)
    return moved


def _method(function: Callable[..., Any]) -> Any:
    def method(self: Sharded, *args: Any, **kwargs: Any) -> Any:
        return dispatch.call(function, (self, *args), kwargs)

    method.__name__ = function.__name__
    method.__doc__ = f"torch.Tensor.{function.__name__} of the value, brought where that is cheapest."
    return method


for _name, _refused in REFUSED.items():
    setattr(Sharded, _name, _refused)

_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs
    eq ne lt le gt ge and or xor rand ror rxor invert getitem
"""
for _name in [*(f"__{name}__" for name in _OPERATORS.split()), *(n for n in dir(Tensor) if not n.startswith("_"))]:
    if _name not in vars(Sharded) and callable(getattr(Tensor, _name)):
        setattr(Sharded, _name, _method(getattr(Tensor, _name)))


def from_local(local: Tensor, mesh: MeshComms, spec: Any, shape: Sequence[int] | None = None) -> Sharded:
    """A Sharded of what each rank has already; nothing is sent.

    `spec`: how it lies, any spelling of a layout. `shape`: global; needed where parts are uneven, else it is that of
    equal parts. A `local` that requires a gradient keeps doing so.

    Raises:
        InvalidValueError: `local` has not the shape of this rank's part.
    """
    expect_connected("from_local", mesh)
    return Sharded(local, asked(_spec_of_local, local.shape, local.dtype, mesh, spec, shape))


def _spec_of_local(
    local: Sequence[int], dtype: torch.dtype, mesh: MeshComms, spec: Any, shape: Sequence[int] | None
) -> Spec:
    layout = layout_of(spec, mesh, len(local))
    if shape is None:
        shape = [n * ranks_of(layout.mesh, axes) for n, axes in zip(local, layout.dims, strict=True)]
    expected = layout.local_shape(shape, mesh.rank)
    if tuple(local) != expected:
        raise InvalidValueError(
            f"from_local: expected {expected}, this rank's part of {tuple(shape)} under {layout}, got "
            f"{tuple(local)}; give the global shape"
        )
    return spec_of(mesh, layout, shape, dtype)


from torch_overlap.mesh import autograd, dispatch  # noqa: E402 (they need what is above)
