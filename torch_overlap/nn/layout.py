"""The layout of a module's parameters on the ranks of a communicator, and their use in computation.

A layer that is made for a DeviceMesh has DTensor parameters, so optimizers, gradient clipping, checkpoints and
`fully_shard` of torch see whole parameters. A layer that is made for a TorchComm has plain ones, this rank's parts.
Both compute with `local_parameter`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils.weak import TensorWeakRef

from torch_overlap import ops
from torch_overlap._C import StateError, TorchComm
from torch_overlap._c10d import comm_from_group
from torch_overlap._dtensor import from_local, to_local
from torch_overlap.nn._changes import watch_changes
from torch_overlap.nn._computed import expect_no_hooks, expect_parameters, wrong_layout
from torch_overlap.ops._arguments import group

_ATTRIBUTE = "_parameter_layout"
_IS_LOCAL = "_is_local"  # of a module: its forward runs
_TIE = "_replaced_by"  # of a parameter that a style has replaced
_DEFERRED = "_deferred_sum"  # of a parameter of which the gradient is summed later
_CHECKED = "_checked_gradients"  # of a module: name -> number of comparisons
_CHECKS = 3
_ops = torch.ops.torch_overlap


@dataclass(frozen=True)
class ParameterLayout:
    """The layout of a module's own parameters (not those of its children) on the ranks of `comm`.

    It belongs to the module rather than to its parameters, so it survives `to_empty`, `copy.deepcopy`, `fully_shard`
    and new parameters.

    Attributes:
        comm: the communicator.
        split: name -> the dimension that is split over the ranks.
        partial: names of parameters that every rank holds in full, and whose gradient each rank computes from its part
            of the data only. The sum over the ranks is the gradient.
        mesh: the mesh of one dimension of which the parameters are DTensors; None: they are plain tensors.
        is_deferred: if True, gradients of `partial` parameters are summed by `sync_replicated_grads` instead of in the
            backward pass.
    """

    comm: TorchComm
    split: Mapping[str, int] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    mesh: DeviceMesh | None = None
    is_deferred: bool = False

    def placement(self, name: str) -> Placement:
        """Returns the DTensor placement of a parameter."""
        return Shard(self.split[name]) if name in self.split else Replicate()

    def __deepcopy__(self, memo: object) -> ParameterLayout:
        return self  # a mesh is compared by identity


def comm_of(mesh: DeviceMesh) -> TorchComm:
    """Returns the communicator of a one-dimensional mesh. The backend makes it in the first call, which is then
    collective.

    Raises:
        ValueError: the mesh has several dimensions, or another backend than "torch_overlap".
    """
    if mesh.ndim != 1:
        raise ValueError(f"comm_of: expected a mesh of one dimension, got {mesh.ndim}; take one, as in mesh['tp']")
    return comm_from_group(mesh.get_group(), mesh.device_type)


def ranks_of(who: str, comm: TorchComm | DeviceMesh) -> tuple[TorchComm, DeviceMesh | None]:
    """Returns the communicator, and the mesh if one was given. Raises TypeError for anything else."""
    if isinstance(comm, TorchComm):
        return comm, None
    if isinstance(comm, DeviceMesh):
        return comm_of(comm), comm
    raise TypeError(f"{who}: expected comm as a TorchComm or a DeviceMesh, got {comm!r} ({type(comm).__name__}); "
                    "new_comm makes a communicator, get_comm(name) finds one by its name")  # fmt: skip


def layout_of(module: nn.Module) -> ParameterLayout | None:
    layout = getattr(module, _ATTRIBUTE, None)
    return layout if isinstance(layout, ParameterLayout) else None


def set_layout(module: nn.Module, layout: ParameterLayout) -> None:
    """Sets the layout of a module that has this rank's parts, and makes them DTensors if there is a mesh."""
    setattr(module, _ATTRIBUTE, layout)
    if layout.mesh is not None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            set_part(module, name, parameter)


def set_part(module: nn.Module, name: str, part: nn.Parameter) -> None:
    """Makes `part`, this rank's part, a parameter of a module that has a layout. It shares memory with the part."""
    layout = layout_of(module)
    assert layout is not None
    if layout.mesh is not None and not isinstance(part, DTensor):
        whole = whole_shape(part, layout.comm.get_size(), layout.split.get(name))
        data = from_local(part.detach(), layout.mesh, [layout.placement(name)], whole)
        part = nn.Parameter(data, requires_grad=part.requires_grad)
    setattr(module, name, part)


def replace_parameter(module: nn.Module, name: str, old: nn.Parameter) -> None:
    """Keeps ties when the parameter `name` of a module with a layout has taken the place of `old`.

    Another module may hold `old`, too. If it is given the same layout, both get one parameter again. If it goes on with
    `old`, the backward pass raises, since the two would come apart.

    Raises:
        ValueError: another module that holds `old` was given another layout.
    """
    new, layout = getattr(module, name), layout_of(module)
    assert layout is not None
    if new is old:
        return
    this = (type(module).__name__, name, layout.comm.get_name(), layout.split.get(name))
    tie = vars(old).setdefault(_TIE, (this, new))
    if tie[1] is not new:
        if tie[0][2:] != this[2:]:
            raise ValueError(f"{this[0]}: expected one layout for a parameter that two modules share, got dimension "
                             f"{this[3]} split for '{name}', and {tie[0][3]} for '{tie[0][1]}' of {tie[0][0]}. Untie "
                             "them, or split both alike (VocabularyParallel for an embedding).")  # fmt: skip
        setattr(module, name, tie[1])
    elif old.requires_grad:
        old.register_hook(functools.partial(_refuse_gradient, this))


def _refuse_gradient(tie: tuple[Any, ...], _: Tensor) -> None:
    raise StateError(f"backward: expected no gradient of a parameter that was replaced by '{tie[1]}' of {tie[0]}, got "
                     "one: another module shares it (tied weights). Give that module a style with the same split "
                     "(VocabularyParallel for an embedding), or untie the weights first.")  # fmt: skip


def whole_shape(part: Tensor, size: int, dim: int | None) -> torch.Size:
    return torch.Size(n * size if i == dim else n for i, n in enumerate(part.shape))


def local_parameter(module: nn.Module, name: str) -> Tensor | None:
    """Returns this rank's part of a parameter of a module with a layout, as a plain tensor to compute with.

    Its gradient becomes that of the parameter. For a `partial` parameter the backward pass sums it over the ranks.
    """
    parameter: Tensor | None = getattr(module, name)
    layout = layout_of(module)
    if parameter is None or layout is None:
        return parameter
    part: Tensor = parameter
    if layout.mesh is not None:
        if isinstance(parameter, DTensor) and parameter.device_mesh != layout.mesh:
            raise StateError(f"{type(module).__name__}: expected '{name}' as a DTensor of {layout.mesh}, got one of "
                             f"{parameter.device_mesh}. Call the module that was given to fully_shard.")  # fmt: skip
        if not isinstance(parameter, DTensor) or parameter.placements != (layout.placement(name),):
            raise wrong_layout(module, name, parameter, layout.placement(name))
        part = to_local(parameter)
    if name not in layout.split and part.requires_grad and torch.is_grad_enabled():
        if name not in layout.partial:
            _check_first_gradient(module, name, part)
        elif not layout.is_deferred:
            part = _ops._invariant_to_replicated(part, *group(layout.comm))
    return part


def _check_first_gradient(module: nn.Module, name: str, part: Tensor) -> None:
    """Makes the first backward passes compare the ranks' gradients of a parameter that is not partial."""
    if part.is_leaf or torch.compiler.is_compiling() or vars(module).setdefault(_CHECKED, {}).get(name, 0) >= _CHECKS:
        return
    part.register_hook(functools.partial(_compare_gradients, module, name))


@torch.no_grad()
def _compare_gradients(module: nn.Module, name: str, grad: Tensor) -> None:
    layout, checked = layout_of(module), vars(module)[_CHECKED]
    if layout is None or checked.get(name, 0) >= _CHECKS or (grad.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    # Norms, and sums of signed elements.
    parts = [part.double() for part in grad.flatten().chunk(8)]
    norms = torch.stack([part.norm() for part in parts])
    sums = torch.stack([part.sum() for part in parts]) / max(1, parts[0].numel()) ** 0.5
    values = torch.cat([norms, sums])
    largest, smallest = ops.all_reduce(torch.stack([values, -values]), layout.comm, "max")
    size = largest[: len(parts)].max()
    if not bool(size > 0) or not bool(largest.isfinite().all() & smallest.isfinite().all()):
        return  # says nothing
    if (largest + smallest).max() <= 0.01 * size:
        checked[name] = checked.get(name, 0) + 1
    else:
        raise StateError(f"backward: expected the same gradient of '{name}' of {type(module).__name__} on all ranks, "
                         f"got norms and sums of parts from {(-smallest).tolist()} to {largest.tolist()}. If its "
                         "module has this rank's rows or heads only: give it SequenceParallel() in the plan. If "
                         "dropout differs between the ranks: seed it alike.")  # fmt: skip


def layouts(module: nn.Module) -> Iterator[tuple[str, nn.Module, ParameterLayout]]:
    """Yields name, module and layout of `module` and all its descendants that have one."""
    for name, child in module.named_modules(remove_duplicate=False):
        layout = layout_of(child)
        if layout is not None:
            yield name, child, layout


def _expect_parameters(module: nn.Module) -> None:
    layout = None if torch.compiler.is_compiling() else layout_of(module)
    if layout is not None:
        found = getattr(module, "parametrizations", {}) if "parametrizations" in module._modules else {}
        expect_parameters(module, layout.partial, [name for name in found if layout_of(found[name]) is None])


class _LocalForward(nn.Module):
    """The mixin of `compute_locally`: during forward the parameters that it reads are plain tensors."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if vars(self).get(_IS_LOCAL):  # called by its own forward
            return super().forward(*args, **kwargs)
        # Attention of torch reads the parameters of a child, without a call of it.
        readable = [self, self.out_proj] if isinstance(self, nn.MultiheadAttention) else [self]
        for module in readable:
            _expect_parameters(module)
        own = [(module, {name: p for name, p in module._parameters.items() if p is not None}) for module in readable]
        try:
            vars(self)[_IS_LOCAL] = True
            parts = []
            for module, parameters in own:
                for name, parameter in parameters.items():
                    module._parameters[name] = part = local_parameter(module, name)  # type: ignore[assignment]
                    parts.append((parameter, part))
            outputs = super().forward(*args, **kwargs)
            watch_changes(parts, outputs)
            return outputs
        finally:
            vars(self)[_IS_LOCAL] = False
            for module, parameters in own:
                module._parameters.update(parameters)


_subclasses: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def subclass_with(mixin: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the subclass of `cls`, of the same name, whose methods are first those of `mixin`."""
    if (mixin, cls) not in _subclasses:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _subclasses[mixin, cls] = type(cls.__name__, (mixin, cls), names)
    return _subclasses[mixin, cls]


def compute_locally(module: nn.Module) -> None:
    """Makes forward of a module with a layout, whose code is unchanged, compute with `local_parameter`.

    The class of the module becomes a subclass of its class, of the same name.
    """
    if "forward" in vars(module):
        raise TypeError(f"{type(module).__name__}: expected a module whose forward is that of its class, got one that "
                        "was patched. Parallelize the model first, then patch it.")  # fmt: skip
    if not isinstance(module, _LocalForward):
        module.__class__ = subclass_with(_LocalForward, type(module))


def mark_replicated(module: nn.Module, comm: TorchComm | DeviceMesh) -> None:
    """Declares that `module` works on this rank's rows with parameters that every rank holds in full.

    For norms, embeddings and heads of a sequence-parallel model. The backward pass then sums the gradients of the
    parameters of `module` and its children over the ranks, except those of layers of torch_overlap.nn in it.

    Args:
        module: the module, after its parameters are made.
        comm: the communicator whose ranks share the rows, or the mesh; of a mesh the parameters become DTensors.
    """
    own_comm, mesh = ranks_of("mark_replicated", comm)
    replicate(module, own_comm, mesh, is_partial=True)


def replicate(module: nn.Module, comm: TorchComm, mesh: DeviceMesh | None, *, is_partial: bool) -> None:
    """Gives `module` and its descendants that have none a layout of whole parameters, with partial gradients or not."""
    done = {id(child) for _, child, _ in layouts(module)}
    for child in module.modules():
        own = dict(child.named_parameters(recurse=False))
        if own and id(child) not in done:
            expect_no_hooks("mark_replicated" if is_partial else "Replicated", child)
            set_layout(child, ParameterLayout(comm, partial=frozenset(own if is_partial else ()), mesh=mesh))
            compute_locally(child)
            for name, old in own.items():
                replace_parameter(child, name, old)


def split_parameters(module: nn.Module) -> dict[str, tuple[nn.Parameter, int]]:
    """Returns name -> (the parameter, the split dimension), for every split parameter in `module`."""
    found = {}
    for prefix, child, layout in layouts(module):
        own = dict(child.named_parameters(recurse=False))
        for name, dim in layout.split.items():
            if name in own:
                found[f"{prefix}.{name}".lstrip(".")] = own[name], dim
    return found


class _DeferredSum:
    """State of a parameter whose gradient `sync_replicated_grads` sums: is its gradient a sum already?"""

    def __init__(self) -> None:
        self.summed: Callable[[], Tensor | None] = lambda: None  # the gradient that was summed, until more is added
        self.is_captured = False  # a replayed CUDA graph adds gradients without calling the hook

    def added(self, _: Tensor) -> None:
        self.summed = lambda: None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.is_captured = True

    def is_summed(self, grad: Tensor) -> bool:
        return not self.is_captured and self.summed() is grad


def defer_replicated_grads(module: nn.Module) -> None:
    """Leaves the gradients of replicated parameters in `module` as this rank's, until `sync_replicated_grads(module)`.

    Saves the small all_reduce of each such parameter in every backward pass, where several backward passes accumulate
    gradients, for one in each step. Until the call these gradients are wrong.
    """
    for _, child, layout in layouts(module):
        if layout.partial:
            setattr(child, _ATTRIBUTE, replace(layout, is_deferred=True))
        for name, parameter in child.named_parameters(recurse=False):
            if name in layout.partial and parameter.requires_grad and _DEFERRED not in vars(parameter):
                vars(parameter)[_DEFERRED] = state = _DeferredSum()
                parameter.register_post_accumulate_grad_hook(state.added)


@torch.no_grad()
def sync_replicated_grads(module: nn.Module, comm: TorchComm | None = None) -> None:
    """Sums over the ranks the gradients that `defer_replicated_grads` has left; does nothing without it.

    Collective. Call it once for each optimizer step, when gradients have been accumulated and before they are clipped.
    Under sequence parallelism these are the norms (see `mark_replicated`) and the biases of row-parallel layers.
    A second call without a backward pass in between does nothing.
    Parameters without a gradient are skipped: the same parameters must have one on all ranks. Makes one all_reduce for
    each dtype, on the current stream; may be captured in a CUDA graph. For DTensor gradients, of FSDP2 over another
    axis too, this rank's parts are summed.

    Args:
        module: the module with the parameters.
        comm: only the parameters that belong to this communicator; None: all, each over its own.
    """
    buckets: dict[tuple[int, torch.dtype, torch.device], tuple[TorchComm, list[Tensor]]] = {}
    seen: set[int] = set()
    for _, child, layout in layouts(module):
        if not layout.is_deferred or (comm is not None and layout.comm.get_name() != comm.get_name()):
            continue
        for name, parameter in child.named_parameters(recurse=False):
            if name not in layout.partial or parameter.grad is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            grad, state = parameter.grad, vars(parameter).get(_DEFERRED)
            if isinstance(state, _DeferredSum):
                if state.is_summed(grad):
                    continue
                state.summed = TensorWeakRef(grad)
            if isinstance(grad, DTensor):  # from FSDP2: along the other axis the ranks of comm have the same part
                grad = grad.to_local()
            key = (id(layout.comm), grad.dtype, grad.device)
            buckets.setdefault(key, (layout.comm, []))[1].append(grad)
    for owner, grads in buckets.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        ops.all_reduce_(flat, owner)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))
