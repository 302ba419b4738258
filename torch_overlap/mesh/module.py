"""shard_module: shards the parameters of a module over a mesh; its code is unchanged."""

from __future__ import annotations

import copyreg
import fnmatch
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torch_overlap._C import InvalidTypeError, InvalidValueError, MeshComms
from torch_overlap.mesh._core import Layout
from torch_overlap.mesh.communication.from_local import from_local
from torch_overlap.mesh.communication.shard import part_of
from torch_overlap.mesh.dynamo import caching_moves, is_dynamo_compiling
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.styles import without_styles
from torch_overlap.mesh.value_spec import ValueSpec, expect_connected, gradient_layout, layout_of, spec_of

__all__ = [
    "clip_grad_norm_",
    "full_state_dict",
    "load_full_state_dict",
    "named_values",
    "reduce_gradients",
    "shard_module",
    "sharded_parameters",
]

_SPECS = "_torch_overlap_specs"


def shard_module(
    module: nn.Module,
    mesh: MeshComms,
    layouts: Mapping[str, Any] | None = None,
    *,
    axis: str | None = None,
    defer_gradients: bool = False,
    move_parameters: bool = False,
) -> nn.Module:
    """Replaces the parameters and buffers of `module` by this rank's parts, in place. Nothing is sent.

        shard_module(model, mesh, {"*.wq.weight": P("tp"), "*.wo.weight": P(None, "tp")})
        logits = model(shard(tokens, mesh, P("dp")))

    The module's code is unchanged: reading a parameter gives a Sharded, whose functions insert the communication.
    `module.parameters()` are the local parts. Optimizers take them, and must be made afterwards. Those that update
    element by element (SGD, Adam, AdamW) do what one rank would do. Others (Muon, Adafactor, LBFGS) would take the
    parts for whole matrices, without an error: do not use them.

    Args:
        module: its parameters and buffers are whole, the same on every rank, on the device of the mesh. A parameter
            that is used in several places (tied) stays one.
        mesh: the connected mesh.
        layouts: by name as in state_dict ("*.wq.weight" of an nn.Linear); patterns of fnmatch, of which the first match
            counts; any spelling of a layout. Others are whole on every rank. Alternatively, styles of
            `torch_overlap.nn.styles` by the names of modules, as for parallelize_module: they define which parameters
            are split, and where activations are split or gathered.
        axis: the axis that styles split; required if the mesh has several.
        defer_gradients: if True, along axes that do not shard a parameter, each rank's gradient stays its own term
            until `reduce_gradients` sums all of them in one transfer. Otherwise each is summed in the backward pass
            where the parameter is used.
        move_parameters: if True, parameters are gathered or exchanged if that is cheaper than moving activations (as in
            data parallel training with sharded weights). Otherwise they are anchored: activations are moved instead.

    Raises:
        InvalidValueError: a pattern without a match, an invalid layout, a module that is sharded already.
        UnsupportedError: a style with `algorithm`, `require_fused`, `fp8` or `keep_gathered`, which the mesh decides
            here.
    """
    expect_connected("shard_module", mesh)
    left, hooks = without_styles(module, mesh, layouts or {}, axis)
    used = set()
    wholes: list[tuple[nn.Module, str, str, Tensor, Layout]] = []
    for prefix, owner in module.named_modules():
        if hasattr(owner, _SPECS):
            raise InvalidValueError(f"shard_module: expected a module that is not sharded, got '{prefix}', which is")
        for own_name, whole in [*owner._parameters.items(), *owner._buffers.items()]:
            if whole is None:
                continue
            name = f"{prefix}.{own_name}" if prefix else own_name
            pattern = next((p for p in left if fnmatch.fnmatchcase(name, p)), None)
            used.add(pattern)
            layout = layout_of(None if pattern is None else left[pattern], mesh, whole.dim())
            if defer_gradients and isinstance(whole, nn.Parameter):
                layout = layout.with_invariant(None)
            wholes.append((owner, name, own_name, whole, layout))
    unused = [p for p in left if p not in used]
    if unused:
        names = [name for _, name, *_ in wholes]
        some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise InvalidValueError(
            f"shard_module: expected patterns of parameters or buffers, got {unused}, which fit none of {some}"
        )
    parts: dict[int, tuple[Any, ValueSpec]] = {}  # by the id of the whole parameter: tied ones stay tied
    for *_, whole, layout in wholes:
        if id(whole) not in parts:
            anchored = isinstance(whole, nn.Parameter) and not move_parameters
            parts[id(whole)] = _part(whole, mesh, layout, anchored=anchored)
    # Nothing is changed before everything is made.
    found: dict[int, tuple[nn.Module, dict[str, ValueSpec]]] = {}
    for owner, _, own_name, whole, _ in wholes:
        part, spec = parts[id(whole)]
        store: dict[str, Any] = owner._parameters if own_name in owner._parameters else owner._buffers
        store[own_name] = part
        found.setdefault(id(owner), (owner, {}))[1][own_name] = spec
    for owner in list(module.modules()):
        _replace_class(owner, found[id(owner)][1] if id(owner) in found else {}, caches_moves=owner is module)
    for put in hooks:
        put()
    return module


def _part(whole: Tensor, mesh: MeshComms, layout: Layout, *, anchored: bool) -> tuple[Tensor, ValueSpec]:
    with torch.no_grad():
        local: Tensor = part_of(whole.detach(), mesh, layout).local
        if local.numel() < whole.numel():
            local = local.clone()  # a copy of the part, since a view would keep the whole alive
    if isinstance(whole, nn.Parameter):
        local = nn.Parameter(local, whole.requires_grad)
    return local, spec_of(mesh, layout, whole.shape, whole.dtype, anchored)


def _replace_class(owner: nn.Module, specs: dict[str, ValueSpec], *, caches_moves: bool) -> None:
    """Gives the module its own class, which reads these names as Sharded. If `caches_moves` is set or the module has
    children, its forward is a block of `caching_moves`."""

    def reader(name: str) -> property:
        def get(self: nn.Module) -> Any:
            stored: Tensor | None = self._parameters.get(name)
            if stored is None:
                stored = self._buffers.get(name)
            return None if stored is None else _as_sharded(self, name, stored)

        return property(get)

    base = type(owner)
    members: dict[str, Any] = {name: reader(name) for name in specs}
    forward = base.forward
    if (caches_moves or owner._modules) and forward is not nn.Module.forward:

        @functools.wraps(forward)
        def caching_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not is_dynamo_compiling():
                return forward(self, *args, **kwargs)
            with caching_moves():
                return forward(self, *args, **kwargs)

        members["forward"] = caching_forward
    if not members:
        return
    if specs:

        def assign(self: nn.Module, name: str, value: Any) -> None:
            is_ours = value is not None and name in self.__dict__.get(_SPECS, ())
            base.__setattr__(self, name, _stored(self, name, value) if is_ours else value)

        members["__setattr__"] = assign
        owner.__dict__[_SPECS] = specs
    kind: Any = type(base)
    owner.__class__ = _kind_of(kind)(base.__name__, (base,), members | {"__module__": base.__module__})


@functools.cache
def _kind_of(kind: type) -> type:
    """Returns the metaclass of the classes that are made here. They can be copied like other classes. Pickling is
    refused: pickle would look them up by name and find their base classes."""
    made = type("ShardedClass", (kind,), {})
    copyreg.pickle(made, _refuse_to_pickle)
    return made


def _refuse_to_pickle(owner: type) -> NoReturn:
    raise InvalidTypeError(
        f"pickle: expected a module that does not lie on a mesh of this process, got a {owner.__name__} that "
        "shard_module changed; save full_state_dict(module), or this rank's module.state_dict()"
    )


def _stored(owner: nn.Module, name: str, value: Any) -> Tensor:
    """Returns this rank's part of a value that is assigned to a parameter or buffer, in the layout of the name. A
    buffer that gets another shape gets the layout of the value."""
    spec: ValueSpec = owner.__dict__[_SPECS][name]
    who = f"{type(owner).__name__}.{name}"
    if isinstance(value, Sharded):
        if name in owner._parameters:
            raise InvalidTypeError(f"{who}: expected an nn.Parameter of this rank's part, got a {value!r}. Use "
                                   "load_full_state_dict, or .local.copy_() without gradients.")  # fmt: skip
        if value.mesh is not spec.mesh:
            raise InvalidValueError(f"{who}: expected a Sharded on {spec.mesh.mesh}, got one on {value.mesh.mesh}. "
                                    "Use values of the module's mesh.")  # fmt: skip
        same = value.shape == spec.shape
        value = value.reshard(spec.layout if same else value.layout.with_partial(None))
        if not same:
            owner.__dict__[_SPECS][name] = value.spec
        local: Tensor = value.local
        return local
    if isinstance(value, Tensor) and value.shape != spec.local_shape:
        raise InvalidValueError(f"{who}: expected a Sharded, or this rank's part of shape {list(spec.local_shape)} "
                                f"({spec.layout}), got a tensor of shape {list(value.shape)}. Call shard() or "
                                "from_local().")  # fmt: skip
    stored: Tensor = value  # the module checks its type
    return stored


def _as_sharded(owner: nn.Module, name: str, stored: Tensor) -> Sharded:
    """Makes a new Sharded at each read: its cached copies are dropped with it, because weights change."""
    spec: ValueSpec = owner.__dict__[_SPECS][name]
    if stored.dtype != spec.dtype:
        spec = spec_of(spec.mesh, spec.layout, spec.shape, stored.dtype, spec.anchored)
    return Sharded(stored, spec)


def named_values(module: nn.Module, what: str) -> dict[str, Sharded]:
    """Returns the "_parameters" or "_buffers" of a sharded module as Sharded values, by name."""
    out: dict[str, Sharded] = {}
    for prefix, owner in module.named_modules():
        for name in owner.__dict__.get(_SPECS, ()):
            stored = getattr(owner, what).get(name)
            if stored is not None:
                out[f"{prefix}.{name}" if prefix else name] = _as_sharded(owner, name, stored)
    return out


def sharded_parameters(module: nn.Module) -> dict[str, Sharded]:
    """Returns the parameters of a sharded module as Sharded values, by name."""
    return named_values(module, "_parameters")


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers as whole tensors, on every rank. Collective."""
    with torch.no_grad():
        named = {**named_values(module, "_parameters"), **named_values(module, "_buffers")}
        return {name: value.detach().full().clone() for name, value in named.items()}


def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads this rank's parts of whole tensors, which are the same on every rank. Nothing is sent.

    Raises:
        InvalidValueError: names that are missing or unknown, or shapes that differ. Nothing is changed then.
    """
    named = {**named_values(module, "_parameters"), **named_values(module, "_buffers")}
    if set(named) != set(state):
        missing, unknown = sorted(set(named) - set(state)), sorted(set(state) - set(named))
        raise InvalidValueError(
            f"load_full_state_dict: expected the names of the module, lacks {missing}, has {unknown}"
        )
    for name, value in named.items():
        if state[name].shape != value.shape:
            raise InvalidValueError(
                f"load_full_state_dict: expected {tuple(value.shape)} for '{name}', got {tuple(state[name].shape)}"
            )
    with torch.no_grad():
        for name, value in named.items():
            value.local.copy_(part_of(state[name].to(value.device), value.mesh, value.layout).local)


# --- Gradients ----------------------------------------------------------------------------------


@torch.no_grad()
def reduce_gradients(module: nn.Module, *others: Sharded) -> list[Sharded]:
    """Sums the gradients that shard_module(..., defer_gradients=True) left partial, in one transfer for each set of
    axes and dtype. Collective.

    Args:
        module: the sharded module. Its gradients are changed in place; those of parameters without one count as zeros.
        others: partial scalars (a loss, a norm) to sum in the same transfer.

    Returns: the scalars, invariant.
    """
    values = _with_gradients(module)
    pending: dict[tuple[tuple[str, ...], torch.dtype], list[Tensor]] = {}
    if not values and not others:
        return []
    mesh = (*values, *others)[0].mesh
    for value in values:
        axes = _joining(value.mesh, gradient_layout(value.layout).partial)
        if not axes:
            continue
        if value.local.grad is None:
            value.local.grad = torch.zeros_like(value.local)
        pending.setdefault((axes, value.local.grad.dtype), []).append(value.local.grad)
    scalars: list[Tensor] = []
    for other in others:
        if other.shape.numel() != 1 or set(other.layout.partial.values()) - {"sum"}:
            raise InvalidValueError(f"reduce_gradients: expected scalars that are partial sums, got {other}")
        scalars.append(other.detach().local.clone())
        axes = _joining(mesh, other.layout.partial)
        if axes:
            pending.setdefault((axes, other.dtype), []).append(scalars[-1])
    for (axes, _), tensors in sorted(pending.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        flat = torch.cat([t.flatten() for t in tensors]) if len(tensors) > 1 else tensors[0].flatten()
        whole = from_local(flat, mesh, Layout(mesh.mesh, [None], axes)).reshard(Layout(mesh.mesh, [None]))
        parts = whole.local.split([t.numel() for t in tensors])
        torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])
    return [
        Sharded(scalar, spec_of(mesh, layout_of(None, mesh, scalar.dim()), scalar.shape, scalar.dtype))
        for scalar in scalars
    ]


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float, *others: Sharded) -> tuple[Tensor, list[Sharded]]:
    """Sums partial gradients like reduce_gradients, then scales all so that their norm is at most `max_norm`.

    Collective. Uses only tensor operations, so that a CUDA graph may capture it. The squares of complete gradients are
    summed in the same transfer as partial gradients along the same axes.

    Args:
        module: the sharded module.
        max_norm: the maximum norm of all gradients together.
        others: as for `reduce_gradients`.

    Returns: the norm of all gradients before scaling, a scalar that is the same on every rank; the reduced `others`.
    """
    values = _with_gradients(module)
    if not values:
        raise InvalidValueError(
            "clip_grad_norm_: expected a sharded module with parameters that require gradients, got one without"
        )
    late = [v for v in values if _joining(v.mesh, gradient_layout(v.layout).partial)]
    ready = [v for v in values if all(v is not other for other in late)]
    squares = _squares(ready)
    reduced = reduce_gradients(module, *others, *squares)
    total = torch.stack([x.full() for x in [*reduced[len(others) :], *_squares(late)]]).sum()
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([v.local.grad for v in values if v.local.grad is not None], scale)
    return norm, reduced[: len(others)]


def _joining(mesh: MeshComms, axes: Iterable[str]) -> tuple[str, ...]:
    """Returns the axes of size greater than one."""
    return tuple(sorted(axis for axis in axes if mesh.mesh.axis(axis).size > 1))


def _with_gradients(module: nn.Module) -> list[Sharded]:
    """Returns the parameters that require a gradient, tied ones once."""
    by_id = {id(v.local): v for v in sharded_parameters(module).values() if v.local.requires_grad}
    return list(by_id.values())


def _squares(values: Iterable[Sharded]) -> list[Sharded]:
    """Returns the sums of squares of gradients, by the axes along which these sums are partial: those that shard the
    gradients."""
    sums: dict[tuple[str, ...], list[Sharded]] = {}
    for value in values:
        if value.local.grad is not None:
            axes = _joining(value.mesh, (name for dim in value.layout.dims for name in dim))  # not the rest of an axis
            sums.setdefault(axes, []).append(value)
    out = []
    for axes, group in sums.items():
        mesh = group[0].mesh
        grads = [v.local.grad for v in group if v.local.grad is not None]
        dtype = functools.reduce(torch.promote_types, {g.dtype for g in grads}, torch.float32)
        local = torch.stack(torch._foreach_norm(grads, 2, dtype=dtype)).square().sum()
        out.append(Sharded(local, spec_of(mesh, Layout(mesh.mesh, [], axes), (), local.dtype)))
    return out
