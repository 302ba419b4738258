"""Plans of parallelize_module on a mesh: converts the parameters of torch_overlap.nn's styles to layouts."""

from __future__ import annotations

import functools
import glob
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from torch_overlap._C import InvalidTypeError, InvalidValueError, MeshComms, UnsupportedError
from torch_overlap.mesh._core import Layout
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.sharding_spec import P

if TYPE_CHECKING:
    from torch_overlap.nn.styles import Style

__all__ = ["without_styles"]

# Options that the mesh decides itself.
_DECIDED = {"algorithm": "auto", "require_fused": False, "fp8": None, "keep_gathered": False}


def without_styles(
    module: nn.Module, mesh: MeshComms, plan: Mapping[str, Any], axis: str | None
) -> tuple[dict[str, Any], list[Callable[[], Any]]]:
    """Returns the plan with layouts by parameter name instead of styles by module name, in its order; and functions
    that register the hooks of the styles.

    Raises: as shard_module.
    """
    if not any(hasattr(value, "split_dims") for value in plan.values()):
        return dict(plan), []
    from torch_overlap.nn import styles  # imports DTensor, which a plan without styles does not need

    axes = mesh.mesh.axes
    name = next(iter(axes)) if axis is None and len(axes) == 1 else axis
    if name not in axes:
        raise InvalidValueError(f"shard_module: expected axis= with styles, one of {list(axes)}, got {axis!r}")
    layouts: dict[str, Any] = {}
    hooks: list[Callable[[], Any]] = []
    lost = []
    for pattern, value in plan.items():
        if not isinstance(value, styles.Style):
            layouts[pattern] = value
            continue
        _check(value)
        found = list(styles.matching_modules(module, pattern))
        lost += [] if found else [pattern]
        for prefix, owner in found:
            for parameter, dim in value.split_dims(owner, axes[name]).items():
                whole = f"{prefix}.{parameter}" if prefix else parameter
                layouts.setdefault(glob.escape(whole), P(*[None] * dim, name))
            hooks += _hooks(styles, value, owner, name)
    if lost:
        raise InvalidValueError(f"shard_module: expected patterns of modules, got {lost}, which fit none")
    return layouts, hooks


def _check(style: Style) -> None:
    for option, default in _DECIDED.items():
        got = style.options.get(option, default)
        if got != default:
            raise UnsupportedError(
                f"shard_module: expected a style without {option}, got {type(style).__name__} with {got!r}; on a mesh "
                "choosing(...) selects how products run"
            )


# --- Values between modules -----------------------------------------------------------------------


def _hooks(styles: Any, style: Style, owner: nn.Module, axis: str) -> Iterator[Callable[[], Any]]:
    if isinstance(style, styles.ShardInput):
        split = functools.partial(_split_input, axis=axis, dim=style.sequence_dim, argument=style.argument)
        yield lambda: owner.register_forward_pre_hook(split, with_kwargs=True)
    if style.options.get("gather_output"):
        linears = [owner.get_submodule(n) for n in style.names] if isinstance(style, styles.SharedGather) else [owner]
        gather = functools.partial(_gather_output, axis=axis)
        for linear in linears:
            yield functools.partial(linear.register_forward_hook, gather)


def _split_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, axis: str, dim: int,
                 argument: str) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    x = args[0] if args else kwargs.get(argument)
    if not isinstance(x, Sharded):
        raise InvalidTypeError(
            f"ShardInput: expected a Sharded as the first argument or as '{argument}', got {type(x).__name__}; shard "
            "the inputs of the model, or name it with argument=..."
        )
    x = x.reshard(_along(x.layout, axis, dim))
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, argument: x})


def _gather_output(_: nn.Module, args: tuple[Any, ...], y: Sharded, *, axis: str) -> Sharded:
    return y.reshard(_along(y.layout, axis, None))


def _along(layout: Layout, axis: str, dim: int | None) -> Layout:
    """Returns the layout with all of `axis` at the end of a dimension, or unused if dim is None, which makes the value
    invariant."""
    dims = [[name for name in names if name.split(":")[0] != axis] for names in layout.dims]
    partial = {name: kind for name, kind in layout.partial.items() if name.split(":")[0] != axis}
    invariant = [name for name in layout.invariant if name.split(":")[0] != axis]
    if dim is None:
        invariant.append(axis)
    else:
        dims[dim].append(axis)
    return Layout(layout.mesh, dims, partial, invariant)
