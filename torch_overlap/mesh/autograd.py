"""torch.autograd.backward and torch.autograd.grad for Sharded values. torch.compile breaks the graph at both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_overlap._C import InvalidTypeError, InvalidValueError
from torch_overlap.mesh.dynamo import NOT_IN_A_GRAPH
from torch_overlap.mesh.sharded import Sharded
from torch_overlap.mesh.value_spec import gradient_of, spec_of, target_of, with_invariant_rest

__all__ = ["AUTOGRAD"]


def _begin(y: Sharded, gradient: Sharded | None, op: str) -> tuple[Tensor, Tensor]:
    """Returns the local tensor that a backward pass starts at, and its gradient."""
    if gradient is None:
        if y.shape.numel() != 1:
            raise InvalidValueError(
                f"{op}: expected a scalar, got a Sharded of shape {tuple(y.shape)}; give a gradient"
            )
        ones = torch.ones(y.shape, dtype=y.dtype, device=y.device)
        gradient = Sharded(ones, target_of(y.spec, None))
    elif not isinstance(gradient, Sharded):
        raise InvalidTypeError(f"{op}: expected a Sharded as gradient, got {type(gradient).__name__}; shard it")
    if set(y.layout.partial.values()) - {"sum"}:
        # The reshard's gradient gives each term its share.
        y = y._reshard(with_invariant_rest(y.layout.with_partial(None)))
    return y.local, gradient._reshard(gradient_of(y.spec).layout).local


def _as_sharded(op: str, values: Any, what: str) -> list[Sharded]:
    found: list[Any] = [values] if isinstance(values, Sharded | Tensor) else list(values)
    for value in found:
        if not isinstance(value, Sharded):
            raise InvalidTypeError(f"{op}: expected Sharded {what}, got {type(value).__name__}; take .local of all")
        if what == "inputs":
            value._expect_in_graph(op)
    return found


def _begin_all(op: str, tensors: Any, gradients: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the local tensors that a backward pass of several values starts at."""
    outputs = _as_sharded(op, tensors, "values")
    given: list[Any] = [None] * len(outputs)
    if gradients is not None:
        given = [gradients] if isinstance(gradients, Sharded | Tensor) else list(gradients)
    if len(given) != len(outputs):
        raise InvalidValueError(f"{op}: expected a gradient for each of {len(outputs)} values, got {len(given)}")
    pairs = [_begin(y, g, op) for y, g in zip(outputs, given, strict=True)]
    return [local for local, _ in pairs], [own for _, own in pairs]


@torch.compiler.disable(reason=NOT_IN_A_GRAPH)  # type: ignore[untyped-decorator]
def _backward(tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
              grad_variables: Any = None, inputs: Any = None) -> None:  # fmt: skip
    roots = _begin_all("backward", tensors, grad_tensors)
    leaves = None if inputs is None else [x.local for x in _as_sharded("backward", inputs, "inputs")]
    torch.autograd.backward(*roots, retain_graph, create_graph, inputs=leaves)


@torch.compiler.disable(reason=NOT_IN_A_GRAPH)  # type: ignore[untyped-decorator]
def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None,
          create_graph: bool = False, only_inputs: bool = True, allow_unused: bool | None = None,
          is_grads_batched: bool = False, materialize_grads: bool = False) -> tuple[Sharded | None, ...]:  # fmt: skip
    if is_grads_batched:
        raise InvalidValueError("grad: expected is_grads_batched=False of Sharded values, got True; use mesh.vmap")
    sources = _as_sharded("grad", inputs, "inputs")
    roots, own = _begin_all("grad", outputs, grad_outputs)
    allow_unused = materialize_grads if allow_unused is None else allow_unused
    found: Sequence[Tensor | None] = torch.autograd.grad(
        roots, [x.local for x in sources], own, retain_graph, create_graph, only_inputs, allow_unused,
        materialize_grads=materialize_grads,
    )  # fmt: skip
    return tuple(None if g is None else _as_gradient(x, g) for x, g in zip(sources, found, strict=True))


def _as_gradient(x: Sharded, local: Tensor) -> Sharded:
    return Sharded(local, spec_of(x.mesh, gradient_of(x.spec).layout, x.shape, local.dtype))


AUTOGRAD: dict[Any, Any] = {torch.autograd.backward: _backward, torch.autograd.grad: _grad}
