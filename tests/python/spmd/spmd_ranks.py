"""Runs a function on every rank of a mesh, counts its sends, and compares its results."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_overlap.mesh import (
    CostModel,
    Layout,
    Mesh,
    P,
    Sharded,
    collect,
    connect,
    distribute,
    from_local,
    gradient_layout,
    shard,
)
from torch_overlap.mesh.value_spec import layout_of, spec_of
from torch_overlap.testing import run_ranks

MESHES = ("dp=1,tp=2", "dp=2,tp=1", "dp=2,tp=2", "dp=1,tp=4", "dp=4,tp=1", "dp=2,tp=4", "dp=4,tp=2", "dp=3,tp=2",
          "dp=2,tp=2,pp=2", "dp=2,tp=2,pp=4")  # fmt: skip

# Names of the communicators' operations in plans.
KINDS = {"all_gather_single": "all_gather", "reduce_scatter_single": "reduce_scatter",
         "all_to_all_single": "all_to_all", "batch_op_issue": "permute"}  # fmt: skip

_names = (f"mesh{n}" for n in itertools.count())


class Rank:
    """One rank of a connected mesh.

    Attributes:
        mesh: The connected mesh.
        index: The position of this rank in it.
        draw: Random numbers, the same on every rank.
        what: The subject of the check, for messages.
    """

    def __init__(self, mesh: Any, seed: int, sub_axes: Sequence[str]) -> None:
        self.mesh, self.index = mesh, mesh.index
        self.draw = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._sent: list[str] = []
        self._layouts: list[str] = []
        self._terms: list[tuple[str, Any, Any, str]] = []
        self.what = ""
        names = [name for name, size in mesh.mesh.axes.items() if size > 1]
        sets = [s for n in range(1, len(names) + 1) for s in itertools.combinations(names, n)]
        sets += [(name,) for name in sub_axes]
        for axes in sets:
            mesh.prepare(axes)
            comm = mesh.group_comm(axes)
            if comm is not None:
                comm.register_pre_hook(lambda name, _id, _args, axes=axes: self._note(name.name, axes))

    def _note(self, name: str, axes: Sequence[str]) -> None:
        if name not in ("split", "finalize"):
            self._sent.append(f"{KINDS.get(name, name)} {','.join(axes)}")

    # --- Data: the same on every rank

    def randn(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(dtype)

    def randint(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator)

    def place(self, x: Tensor, layout: Any) -> Sharded:
        """Returns `x` sharded; partial values are random terms that add up to it, or whose mean, maximum, ... it is."""
        layout = layout_of(layout, self.mesh, x.dim())
        if not layout.partial:
            return shard(x.clone(), self.mesh, layout)
        terms = self._split(x, dict(layout.partial))
        parts = distribute(terms.numpy(), layout.with_partial(None).with_invariant(None))
        local = torch.from_numpy(np.array(parts[self.index])).to(x.dtype)
        return from_local(local, self.mesh, layout, x.shape)

    def _split(self, x: Tensor, partial: dict[str, str]) -> Tensor:
        mesh = self.mesh.mesh
        for name, kind in partial.items():
            count, own = mesh.axis(name).size, self.mesh.coordinate(name)
            noise = [self.randn(*x.shape).to(x.dtype) for _ in range(count)]
            if kind in ("sum", "avg"):
                total = x if kind == "sum" else count * x
                terms = [*noise[1:], total - sum(noise[1:])]
            elif kind in ("max", "min"):
                sign = -1 if kind == "max" else 1
                terms = [x + sign * n.abs() for n in noise]
                terms[self.draw.randrange(count)] = x
            else:
                factors = [n.abs() + 0.5 for n in noise[1:]]
                rest = x
                for factor in factors:
                    rest = rest / factor
                terms = [rest, *factors]
            x = terms[own]
        return x

    # --- Assertions

    @contextmanager
    def sends(self, *expected: str) -> Iterator[None]:
        """Expects exactly these operations in the block, in this order: "all_reduce tp"."""
        self._sent.clear()
        yield
        assert self._sent == list(expected), f"sent {self._sent}, expected {list(expected)}"

    def sent(self) -> list[str]:
        """Returns the operations sent since the last call."""
        out = list(self._sent)
        self._sent.clear()
        return out

    def check(self, x: Sharded, expected: Tensor, layout: str | None = None, **tolerances: float) -> Sharded:
        """Checks shape, dtype, layout and this rank's part; a partial value is compared with all terms together."""
        assert isinstance(x, Sharded), x
        if layout is not None:
            assert x.layout == Layout.parse(self.mesh.mesh, layout), f"{x.layout}, expected {layout}"
        assert (tuple(x.shape), x.dtype) == (tuple(expected.shape), expected.dtype)
        self._layouts.append(str(x.layout))
        local_shape = x.layout.local_shape(expected.shape, self.mesh.rank)
        assert tuple(x.local.shape) == local_shape, f"{x}: {tuple(x.local.shape)}, expected {local_shape}"
        if x.layout.partial:
            values = (y.detach().double().numpy() for y in (x.local, expected))
            self._terms.append((str(x.layout), *values, self.what))
        else:
            torch.testing.assert_close(x.local.detach(), part(expected.detach(), x.layout, self.mesh.rank),
                                       **tolerances)  # fmt: skip
        return x


def part(x: Tensor, layout: Layout, rank: int) -> Tensor:
    """Returns the part of a rank, by the offsets of the layout only."""
    offsets, shape = layout.offsets(x.shape, rank), layout.local_shape(x.shape, rank)
    return x[tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))]


def gradient_of(x: Sharded, local: Tensor) -> Sharded:
    """Returns a gradient of x.local, with its layout."""
    return Sharded(local, spec_of(x.mesh, gradient_layout(x.layout), x.shape, local.dtype))


def compare(r: Rank, function: Callable[..., Tensor], values: Sequence[Tensor], layouts: Sequence[str],
            sent: list[str] | None = None, layout: str | None = None) -> Sharded:  # fmt: skip
    """Compares the function of values with these layouts, and the gradients of all operands, with the unsharded
    ones."""
    leaves = [x.clone().requires_grad_() for x in values]
    expected = function(*leaves)
    c = r.randn(*expected.shape)
    expected.backward(c)
    operands = [r.place(x, y).requires_grad_() for x, y in zip(values, layouts, strict=True)]
    r.sent()
    out = function(*operands)
    real = r.sent()
    r.check(out, expected, layout)
    if sent is not None:
        assert real == sent, f"sent {real}, expected {sent}"
    out.backward(shard(c, r.mesh))
    for operand, leaf in zip(operands, leaves, strict=True):
        r.check(operand.grad, leaf.grad)
    return out


def body_on_rank(comm: Any, mesh: str | Mesh, name: str, body: Callable[..., Any], seed: int, args: tuple[Any, ...],
                 cost: Any, sub_axes: Sequence[str]) -> Any:  # fmt: skip
    connected = connect(mesh, comm, name=name, cost=cost and CostModel.from_dict(cost))
    rank = Rank(connected, seed, sub_axes)
    value = body(rank, *args)
    connected.close()
    return value, rank._layouts, rank._terms


def on_mesh(mesh: str | Mesh, body: Callable[..., Any], seed: int, *args: Any, backend: str = "local",
            cost: CostModel | None = None, sub_axes: Sequence[str] = (),
            timeout: float = 60) -> list[Any]:  # fmt: skip
    """Runs body(Rank, *args) on every rank; returns results by rank. With processes, `body` is found by its name."""
    plain = mesh if isinstance(mesh, Mesh) else Mesh.parse(mesh)
    model = cost and cost.to_dict()
    results = run_ranks(
        body_on_rank, plain.size, mesh, next(_names), body, seed, args, model, sub_axes, backend=backend,
        timeout=timeout,
    )  # fmt: skip
    assert all(layouts == results[0][1] for _, layouts, _ in results), "layouts differ between ranks"
    in_order = [results[rank][2] for rank in plain.ranks]
    for terms in zip(*in_order, strict=True):
        text, _, expected, what = terms[0]
        got = collect([local for _, local, _, _ in terms], Layout.parse(plain, text), expected.shape)
        np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-6, err_msg=f"{text} {what}")
    return [value for value, _, _ in results]


def random_layout(draw: random.Random, mesh: Mesh, dims: int, *, kinds: Sequence[str] = ("sum",),
                  invariant: bool = True) -> Layout:  # fmt: skip
    """Returns a layout with each axis on a dimension, partial, replicated or invariant."""
    lists: list[list[str]] = [[] for _ in range(dims)]
    partial, same = {}, []
    for name in draw.sample(list(mesh.axes), len(mesh.axes)):
        place = draw.randrange(dims + 2 + bool(kinds))
        if place < dims:
            lists[place].append(name)
        elif place == dims and invariant:
            same.append(name)
        elif place == dims + 2:
            partial[name] = draw.choice(list(kinds))
    return Layout(mesh, lists, partial, same)


def draws() -> int:
    return 500 * int(os.environ.get("TORCH_OVERLAP_STRESS", "1"))


__all__ = ["MESHES", "P", "Rank", "draws", "gradient_of", "on_mesh", "part", "random_layout"]
