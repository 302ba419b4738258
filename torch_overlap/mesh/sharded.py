"""Sharded: a tensor whose parts are distributed over the ranks of a mesh."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from torch_overlap._C import InvalidTypeError, MeshComms, StateError
from torch_overlap.mesh._core import Layout
from torch_overlap.mesh.copies import UNCHANGED, MovedCopies, State, is_hooked, state_of
from torch_overlap.mesh.dynamo import (
    NOT_IN_A_GRAPH,
    as_dynamo_constant,
    cache_in_dynamo,
    is_dynamo_compiling,
    layout_in_dynamo,
)
from torch_overlap.mesh.unsupported import UNSUPPORTED_METHODS, refuse_parameter
from torch_overlap.mesh.value_spec import (
    ValueSpec,
    gradient_of,
    spec_of,
    target_of,
)

if TYPE_CHECKING:
    from torch_overlap.mesh.matmuls import DeferredMatmul

__all__ = ["Provenance", "Sharded", "provenance_of", "register"]

_reshard_op = torch.ops.torch_overlap.reshard


def _unregistered(*args: Any) -> Any:
    raise StateError("Sharded: expected torch_overlap.mesh to be imported, got a part of it alone")


# Modules above this one, which torch_overlap.mesh registers: they construct Sharded values.
_run_function: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any], str], Any] = _unregistered
_shard: Callable[..., Sharded] = _unregistered


def register(run_function: Callable[..., Any], shard: Callable[..., Any]) -> None:
    """Sets what Sharded's methods call: a torch function on Sharded values, and `shard`."""
    global _run_function, _shard
    _run_function, _shard = run_function, shard


class Provenance(enum.IntEnum):
    """The creator of a Sharded value, which decides whether the value keeps copies in other layouts."""

    CALLER = 0  # may change it in place: no copies
    FUNCTION = 1  # a function outside of a capture
    CAPTURE = 2  # a function in the capture of a CUDA graph: copies serve the same capture only


def provenance_of(spec: ValueSpec) -> Provenance:
    """Returns the provenance of a function's result that is made now."""
    if is_dynamo_compiling() or spec.device.type != "cuda":
        return Provenance.FUNCTION
    return Provenance.CAPTURE if torch.cuda.is_current_stream_capturing() else Provenance.FUNCTION


class Sharded:
    """A tensor of global shape `shape`, of which this rank has `local`.

    Torch functions, methods and operators accept it: each finds the cheapest way to run on the operands' layouts
    (`propagate`), moves its operands accordingly, and runs on local tensors. Partial sums are reduced when the value is
    needed. All ranks must call the same functions in the same order. It is not a torch.Tensor: local tensors carry the
    autograd graph, and `grad` is that of `local`.

    Functions that change a tensor in place raise, and so do random ones: apply them to `local`. A function's result
    caches the copies that it was moved to; if either was changed since, it is moved again. A partial product is
    computed when the first function or move uses it, together with its reduction if that is possible.

    One rank alone may read `local`: communication never depends on it. All ranks must change `local` in place, assign
    it, register hooks on it or call `retain_grad` alike, the last two before functions use the value. torch counts no
    writes to tensors made in inference mode: change those results under no_grad.

    Attributes:
        local: This rank's part; the term of a partial value.
        layout: The layout of the parts.
        mesh: The connected mesh.
    """

    __slots__ = (
        "__weakref__",
        "_caches_in_dynamo",
        "_computed_state",
        "_copies",
        "_deferred_matmul",
        "_is_reduced_by_product",
        "_local",
        "_provenance",
        "spec",
    )

    def __init__(
        self,
        local: Tensor | None,
        spec: ValueSpec,
        product: DeferredMatmul | None = None,
        provenance: Provenance = Provenance.CALLER,
    ) -> None:
        self._local, self.spec, self._deferred_matmul, self._provenance = local, spec, product, provenance
        self._is_reduced_by_product = False  # the reduction of the product was fused: gradients bypass `local`
        self._computed_state = UNCHANGED  # that of a product when it was computed
        self._copies: MovedCopies | None = None
        self._caches_in_dynamo = bool(provenance) and is_dynamo_compiling() and cache_in_dynamo(self)

    # --- Properties

    @property
    def local(self) -> Tensor:
        """This rank's part, of shape spec.local_shape; the term of a partial value. Computes a deferred product.

        Valid on the current stream; it carries the autograd graph. Assigning a tensor replaces the value's part.
        """
        if self._local is not None:
            return self._local
        assert self._deferred_matmul is not None
        is_same_capture = self._is_same_capture()
        if not is_same_capture and self._provenance == Provenance.FUNCTION:
            raise StateError(
                f"Sharded: expected a product that is computed before the capture, got the deferred product {self}; "
                "take .local of it before"
            )
        local = self._deferred_matmul.compute()
        if is_same_capture:  # otherwise a replay changes the operands
            self._local, self._computed_state = local, state_of(local)
            if self._is_reduced_by_product:
                self._deferred_matmul = None
        return local

    @local.setter
    def local(self, value: Tensor) -> None:
        self._local, self._deferred_matmul, self._provenance = value, None, Provenance.CALLER
        self._is_reduced_by_product, self._computed_state = False, UNCHANGED
        self._stop_caching()

    @property
    def layout(self) -> Layout:
        """The layout of the parts."""
        return layout_in_dynamo(self.spec) if is_dynamo_compiling() else self.spec.layout

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
    def is_cuda(self) -> bool:
        """True if this rank's part is on a GPU."""
        return self.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:
        """True if this rank's part is on a CPU."""
        return self.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.spec.shape)

    @property
    def requires_grad(self) -> bool:
        """True if this rank's part requires a gradient."""
        source = self._deferred_matmul if self._local is None else self._local
        return source is not None and source.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def is_leaf(self) -> bool:
        """True if this rank's part is a leaf of the autograd graph."""
        return self.local.is_leaf

    @property
    def grad(self) -> Sharded | None:
        """The gradient, in the layout of gradient_layout."""
        if self._local is None or self._local.grad is None:
            return None
        layout = gradient_of(self.spec).layout
        return Sharded(self._local.grad, spec_of(self.mesh, layout, self.shape, self._local.grad.dtype))

    @grad.setter
    def grad(self, value: None) -> None:
        if value is not None:
            raise InvalidTypeError("Sharded.grad: expected None, got a value; set local.grad")
        self.local.grad = None

    def dim(self) -> int:
        """Returns the number of dimensions."""
        return len(self.spec.shape)

    def size(self, dim: int | None = None) -> Any:
        """Returns the global shape, or the size of one dimension."""
        return self.spec.shape if dim is None else self.spec.shape[dim]

    def numel(self) -> int:
        """Returns the number of elements of the whole value."""
        return self.spec.shape.numel()

    def element_size(self) -> int:
        """Returns the bytes of an element."""
        return self.spec.dtype.itemsize

    def is_floating_point(self) -> bool:
        """Returns True if the dtype is a floating point type."""
        return self.spec.dtype.is_floating_point

    def get_device(self) -> int:
        """Returns the index of the device; -1 for a CPU."""
        return -1 if self.device.index is None else self.device.index

    def type(self, dtype: Any = None, non_blocking: bool = False) -> Any:
        """Returns the name of the tensor type, as torch.Tensor.type; with `dtype`, the value in that type."""
        if dtype is None:
            return torch.empty(0, dtype=self.dtype, device=self.device).type()
        return _run_function(Tensor.type, (self, dtype, non_blocking), {}, "type")

    def cpu(self) -> Sharded:
        """Returns itself on a mesh of CPUs; raises on other meshes."""
        out: Sharded = _run_function(Tensor.to, (self, "cpu"), {}, "to")
        return out

    def cuda(self) -> Sharded:
        """Returns itself on a mesh of GPUs; raises on other meshes."""
        out: Sharded = _run_function(Tensor.to, (self, "cuda"), {}, "to")
        return out

    def __len__(self) -> int:
        if not self.shape:
            raise InvalidTypeError("len, iter: expected one or more dimensions, got a scalar Sharded")
        return self.shape[0]

    def __iter__(self) -> Iterator[Sharded]:
        return iter(_run_function(Tensor.unbind, (self,), {}, "unbind") if len(self) else ())

    def __repr__(self) -> str:
        return f"Sharded({self.spec}, local {tuple(self.spec.local_shape)})"

    # --- Moves

    def reshard(self, spec: Any) -> Sharded:
        """Returns the same value in another layout: any spelling of one. The cost is that of `mesh.plan(...)`;
        differentiable. `local` may share memory with this value's if nothing is sent."""
        return self._move_to(as_dynamo_constant(target_of, self.spec, spec))

    def shard(self, mesh: MeshComms, spec: Any = None, replicated_axes: Sequence[str] = (),
              partial_sum_axes: Sequence[str] = ()) -> Sharded:  # fmt: skip
        """Calls `torch_overlap.mesh.shard` on it."""
        return _shard(self, mesh, spec, replicated_axes, partial_sum_axes)

    def anchor(self) -> Sharded:
        """Returns the same value, anchored to its layout. A function's result of only this value, with the same number
        of elements (a cast, a transpose; not a slice), is anchored too. An operator moves its other operands, even if
        it would be cheaper to move this one, unless there is no other way. For sharded weights."""
        return Sharded(self.local, as_dynamo_constant(_anchored, self.spec))

    def _with_local(self, local: Tensor, spec: ValueSpec) -> Sharded:
        return Sharded(local, spec)

    def _reshard(self, layout: Layout) -> Sharded:
        return self._move_to(spec_of(self.mesh, layout, self.shape, self.dtype))

    def _move_to(self, target: ValueSpec) -> Sharded:
        if target.text == self.spec.text:
            return self
        moved = self._local_under(target)
        if not is_dynamo_compiling() and moved.requires_grad and self._should_cache_copies():
            moved = moved.view_as(moved)  # hooks on the result must not see gradients of other users of the copy
        return Sharded(moved, target, None, provenance_of(target))

    def _local_under(self, target: ValueSpec) -> Tensor:
        """Returns the local tensor under another layout.

        Results of functions cache their moved copies, so that each move is made once. Values that the caller made (a
        leaf, a buffer) may change, and are moved each time. The decision depends on nothing that may differ between
        ranks. A partial result that was already reduced is moved on from the reduced copy.
        """
        spec = self.spec
        if target.text == spec.text:
            return self._used_local()
        moved: Tensor | None = self._cached_copy(target.text)
        if moved is not None:
            return moved
        copies = None if spec.is_reduced else self._usable_copies()
        reduced = None if copies is None else copies.find_reduced(self._state())
        product = self._deferred_matmul
        if reduced is not None:
            moved = _move_local(reduced[0], reduced[1], target)
        elif product is not None and self._can_reduce_by_product(product):
            moved = product.reduced_result(spec, target)
            self._is_reduced_by_product = moved is not None
            if self._is_reduced_by_product and self._local is not None:
                self._deferred_matmul = None
        if moved is None:
            moved = _move_local(self._used_local(), spec, target)
        self._cache_copy(target.text, moved, target)
        return moved

    def _operand_under(self, target: ValueSpec) -> Tensor:
        """Returns the local tensor under another layout, to compute with. Without a gradient, layouts with the same
        values need no move."""
        spec = self.spec
        if target.values == spec.values:
            local = self._used_local()
            if target.text == spec.text:
                return local
            # Under vmap the inner tensor is the one that requires a gradient.
            if not is_batchedtensor(local) and not (local.requires_grad and torch.is_grad_enabled()):
                return local
        return self._local_under(target)

    # --- Deferred products and moved copies

    def _used_local(self) -> Tensor:
        """Returns `local` for a function or a move, on all ranks. A product is no longer fused with its reduction."""
        local = self.local
        if self._local is not None:
            self._deferred_matmul = None
        return local

    def _can_reduce_by_product(self, product: DeferredMatmul) -> bool:
        """Returns True if this is the first use of the product, which can be fused with its reduction.

        If this rank alone has computed `local`, the answer is the same. It is False where the overlapped operator would
        miss something that all ranks did alike: a change of `local`, hooks on it, a change of the operands after it was
        computed, gradients of a product that is reduced under no_grad.
        """
        local = self._local
        if self._is_reduced_by_product or (product.requires_grad and not torch.is_grad_enabled()):
            return False
        if is_dynamo_compiling():
            return product.is_traced and local is None
        is_unchanged = local is None or (
            self._state() == UNCHANGED and not is_hooked(local) and not product.has_changed_operands()
        )
        return is_unchanged and self._is_same_capture()

    def _expect_in_graph(self, op: str) -> None:
        """Raises if gradients bypass `local`."""
        if self._is_reduced_by_product and self.requires_grad:
            raise StateError(
                f"{op}: expected a product whose gradient is kept, got one that was fused with its reduction; call "
                "retain_grad() on it before functions use it"
            )

    def _is_same_capture(self) -> bool:
        """Returns True for a function's result that was made in the running capture of a CUDA graph, or outside if none
        runs."""
        if is_dynamo_compiling():
            return True
        return self._provenance != Provenance.CALLER and self._provenance == provenance_of(self.spec)

    def _state(self) -> State:
        """Returns the state of `local`; of a product, the changes since it was computed: none if it is deferred."""
        if self._local is None:
            return UNCHANGED
        (num_writes, requires_grad), computed = state_of(self._local), self._computed_state
        return num_writes - computed[0], requires_grad != computed[1]

    def _should_cache_copies(self) -> bool:
        """Returns True if the value caches its moved copies. A value from a capture does only inside it, others only
        outside."""
        return self._caches_in_dynamo if is_dynamo_compiling() else self._is_same_capture()

    def _usable_copies(self) -> MovedCopies | None:
        """Returns the cached copies if they can be used now. In a trace, the cache of an argument is not read: it must
        not become a guard."""
        return self._copies if self._should_cache_copies() else None

    def _stop_caching(self) -> None:
        """Drops the moved copies."""
        self._copies, self._caches_in_dynamo = None, False

    def _cached_copy(self, what: str) -> Any:
        """Returns a cached copy: the local tensor under a layout, or a Sharded of another dtype."""
        copies = self._usable_copies()
        return None if copies is None else copies.find(what, self._state())

    def _cache_copy(self, what: str, made: Any, spec: ValueSpec | None = None) -> None:
        """Caches a copy, with its ValueSpec if it is in another layout, if the value caches copies."""
        if self._should_cache_copies():
            if self._copies is None:
                self._copies = MovedCopies()
            self._copies.add(what, made, spec, self._state())

    def full(self) -> Tensor:
        """Returns the whole tensor, on every rank; its gradient must be the same on every rank."""
        return self.reshard(None).local

    full_tensor = full

    def to_local(self) -> Tensor:
        """Returns this rank's part. Raises for a partial value: use `local`, or reshard."""
        if self.layout.partial:
            raise StateError(
                f"to_local: expected a value that is not partial, got {self.layout}; reshard it, or take .local"
            )
        return self.local

    # --- Copies

    def __copy__(self) -> Sharded:
        """Returns a leaf that shares the memory of this rank's part, as of a tensor."""
        return Sharded(copy.copy(self.local), self.spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        """Copies the value on the same mesh. Leaves only, as with tensors."""
        return Sharded(copy.deepcopy(self.local, memo), self.spec)

    def __reduce__(self) -> NoReturn:
        self.spec.__reduce__()

    # --- Autograd

    def requires_grad_(self, requires_grad: bool = True) -> Sharded:
        """Sets requires_grad of this rank's part, as torch.Tensor.requires_grad_; returns itself."""
        self.local = self.local.requires_grad_(requires_grad)
        return self

    def detach(self) -> Sharded:
        """Returns the same part without its graph, in the same layout."""
        return Sharded(self.local.detach(), self.spec)

    def retain_grad(self) -> None:
        """Calls torch.Tensor.retain_grad on this rank's part: backward() then leaves `grad` on a value that is not a
        leaf. Of a partial product, raises StateError if a function has already used it fused with its reduction."""
        self._expect_in_graph("retain_grad")
        self.local.retain_grad()

    @torch.compiler.disable(reason=NOT_IN_A_GRAPH)  # type: ignore[untyped-decorator]
    def backward(self, gradient: Sharded | None = None, retain_graph: bool | None = None,
                 create_graph: bool = False, inputs: Any = None) -> None:  # fmt: skip
        """Runs the backward pass of a scalar, or with a gradient of the value's shape, which is resharded as
        required; with `inputs`, for these leaves alone. torch.compile breaks the graph here."""
        _run_function(torch.autograd.backward, (self, gradient, retain_graph, create_graph, None, inputs), {}, "")

    # --- Numbers

    def item(self) -> Any:
        """Returns the number of a value of one element. Collective if it is sharded or partial; waits for the
        device."""
        return self.full().item()

    def tolist(self) -> Any:
        """Returns full().tolist(). Collective if parts differ; waits for the device."""
        return self.full().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns full().numpy(); from GPUs with `force`. Collective if parts differ."""
        return self.full().numpy(force=force)

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

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
    _is_param = property(fset=refuse_parameter)  # set by nn.Parameter(x)

    # --- Torch

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:  # fmt: skip
        return _run_function(func, args, kwargs or {}, "")

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(Tensor, name, None)
        is_view = name in ("T", "mT", "H", "mH", "real", "imag")  # others would be those of a tensor without data
        if attribute is None or name.startswith("__") or not (callable(attribute) or is_view):
            raise AttributeError(f"'Sharded' object has no attribute '{name}'; .local has those of this rank's part")
        if not callable(attribute):
            return _run_function(attribute.__get__, (self,), {}, name)  # T, mT
        return _method(attribute, name).__get__(self)


def _anchored(spec: ValueSpec) -> ValueSpec:
    return spec_of(spec.mesh, spec.layout, spec.shape, spec.dtype, anchored=True)


def _move_local(local: Tensor, spec: ValueSpec, target: ValueSpec) -> Tensor:
    moved: Tensor = _reshard_op(local, spec.name, spec.text, target.text, spec.shape)
    return moved


def _method(function: Callable[..., Any], name: str) -> Any:
    def method(self: Sharded, *args: Any, **kwargs: Any) -> Any:
        return _run_function(function, (self, *args), kwargs, name)

    method.__name__ = function.__name__
    method.__doc__ = f"torch.Tensor.{function.__name__} of the value, brought where that is cheapest."
    return method


for _name, _refused in UNSUPPORTED_METHODS.items():
    setattr(Sharded, _name, _refused)
for _name in ("is_nested", "is_sparse", "is_sparse_csr", "is_mkldnn", "is_quantized", "is_meta"):
    setattr(Sharded, _name, False)

_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs
    eq ne lt le gt ge and or xor rand ror rxor lshift rlshift rshift rrshift invert getitem reversed
"""
for _name in [*(f"__{name}__" for name in _OPERATORS.split()), *(n for n in dir(Tensor) if not n.startswith("_"))]:
    if _name not in vars(Sharded) and callable(getattr(Tensor, _name)):
        setattr(Sharded, _name, _method(getattr(Tensor, _name), _name))
