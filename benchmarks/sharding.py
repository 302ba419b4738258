"""Compares the host time of sharded tensors with DTensor: warm and cold operators, layout changes, a backward pass.

    python benchmarks/sharding.py --out results

Both run as one of 8 ranks without peers (the `fake` backend here, torch's fake process group there) on small CPU
tensors, so that only the host's work is timed. `plain` is the same torch function on the local tensors; ratios are of
the time beyond it. A sample is the CPU time of the process (other programs do not count) for a number of consecutive
calls, divided by it. All variants take turns within every round; ratios are medians over rounds, with their IQR.

Cold: operands of new shapes; ours is measured for `propagate` only, the whole recipe (recipe_of), and the first call.
A move starts from a value without cached copies, unless stated otherwise. From S0 to S1 DTensor gathers and cuts, since
c10d has no all_to_all for CPU groups.
"""

from __future__ import annotations

import argparse
import gc
import logging
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_overlap as to
from torch_overlap._timing import Samples, interleave, spread_of
from torch_overlap.mesh import MeshComms, OpRule, P, Sharded, connect, from_local, propagate, recipe_of, shard
from torch_overlap.mesh.dispatch import look_up
from torch_overlap.tools.bench.result import result, write

RANKS = 8
ROWS, WIDTH = 16, 64  # a local tensor's size
MESHES = {"1-D": {"tp": 8}, "2-D": {"dp": 2, "tp": 4}, "3-D": {"dp": 2, "cp": 2, "tp": 2}}
LAYOUTS: dict[str, tuple[Any, Placement]] = {
    "S0": (P("tp"), Shard(0)),
    "S1": (P(None, "tp"), Shard(1)),
    "R": (P(), Replicate()),
    "P": ("[],[] P{tp}", Partial()),
}
# "ratio": to DTensor's time, both minus plain if there is one.
GOALS = {"warm": {"ratio": 1.0}, "lookup": {"us": 2.0}, "plan": {"us": 1000.0}, "move": {"ratio": 1 / 3}}

Call = Callable[[], object]
Work = Callable[[], Sequence[Call]]  # makes the calls of a sample, before the clock starts


@dataclass
class Case:
    """The same work in several variants.

    Attributes:
        what: Prefix of the names of its rows.
        ours: One row each, by the suffix of its name.
        peers: `DTensor`, and `plain` if it exists.
        goal: One of GOALS, of each row in `bound`.
    """

    what: str
    ours: dict[str, Work]
    peers: dict[str, Work]
    goal: str | None = None
    bound: Sequence[str] = ("",)


def again(calls: int, func: Callable[..., object], *args: Any) -> Work:
    """Returns the same call repeatedly."""
    work = [partial(func, *args)] * calls
    return lambda: work


def each_new(calls: int, func: Callable[..., object], operands: Callable[[], Sequence[Any]]) -> Work:
    """Returns calls with separate operands each."""
    return lambda: [partial(func, *operands()) for _ in range(calls)]


def sampler(work: Work) -> Callable[[], float]:
    def sample() -> float:
        calls = work()
        begin = time.process_time()
        for call in calls:
            call()
        return (time.process_time() - begin) * 1e6 / len(calls)

    return sample


@dataclass
class Meshes:
    """The meshes of both, by the number of their dimensions."""

    ours: dict[str, MeshComms]
    theirs: dict[str, DeviceMesh]
    products: int = 0

    def fresh(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the shapes of two operands whose product was not computed before."""
        rows, columns = divmod(self.products, 48)
        self.products += 1
        return (RANKS * (rows + 1), WIDTH), (WIDTH, RANKS * (columns + 1))


# --- 1. Warm operators ----------------------------------------------------------------------------


def warm_operators(both_meshes: Meshes, calls: int) -> Iterator[Case]:
    mesh, device_mesh = both_meshes.ours["1-D"], both_meshes.theirs["1-D"]
    rows, whole, line = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)
    columns, weight = torch.randn(WIDTH, WIDTH // RANKS), torch.randn(WIDTH // RANKS, WIDTH)
    cases: dict[str, tuple[Callable[..., Any], list[tuple[Any, str]]]] = {
        "matmul, rows": (torch.matmul, [(rows, "S0"), (whole, "R")]),
        "matmul, columns": (torch.matmul, [(rows, "R"), (columns, "S1")]),
        "add": (torch.add, [(rows, "S0"), (rows, "S0")]),
        "add a number": (torch.add, [(rows, "S0"), (1.5, "")]),
        "relu": (torch.relu, [(rows, "S0")]),
        "x @ w": (operator.matmul, [(rows, "S0"), (whole, "R")]),
        "x.relu()": (operator.methodcaller("relu"), [(rows, "S0")]),
        "linear, rows": (F.linear, [(rows, "S0"), (whole, "R"), (line, "R")]),
        "linear, columns": (F.linear, [(rows, "R"), (weight, "S0")]),
    }
    for what, (func, args) in cases.items():
        ours = [from_local(x, mesh, LAYOUTS[how][0]) if how else x for x, how in args]
        theirs = [_distributed(x, device_mesh, [LAYOUTS[how][1]]) if how else x for x, how in args]
        yield Case(what, {"": again(calls, func, *ours)},
                   {"DTensor": again(calls, func, *theirs), "plain": again(calls, func, *[x for x, _ in args])},
                   "warm")  # fmt: skip
        if what in ("matmul, rows", "linear, rows"):
            yield Case(f"{what}, lookup alone", {"": again(calls, look_up, func, ours, {})}, {}, "lookup")

    x, w = from_local(rows, mesh, P()), from_local(weight, mesh, P("tp"))
    dx, dw = _distributed(rows, device_mesh, [Replicate()]), _distributed(weight, device_mesh, [Shard(0)])

    def on_new_input() -> object:
        x.local = rows  # drops the cached copies
        return F.linear(x, w)  # type: ignore[arg-type]

    yield Case("linear, columns, of a new input", {"": again(calls, on_new_input)},
               {"DTensor": again(calls, F.linear, dx, dw), "plain": again(calls, F.linear, rows, weight)},
               "warm")  # fmt: skip


def _distributed(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    return DTensor.from_local(x, mesh, placements, run_check=False)


# --- 2. Cold products -----------------------------------------------------------------------------

# Layouts of the operands of a product that require a move: ours, DTensor's.
COLD: dict[str, tuple[list[P], list[list[Placement]]]] = {
    "1-D": ([P("tp"), P(None, "tp")], [[Shard(0)], [Shard(1)]]),
    "2-D": ([P("dp", "tp"), P(None, "tp")], [[Shard(0), Shard(1)], [Replicate(), Shard(1)]]),
    "3-D": (
        [P("dp", "tp"), P("cp", "tp")],
        [[Shard(0), Replicate(), Shard(1)], [Replicate(), Shard(0), Shard(1)]],
    ),
}


def cold_products(both_meshes: Meshes, calls: int) -> Iterator[Case]:
    def plan(x: Sharded, w: Sharded) -> object:
        return propagate(OpRule.matmul(x.shape, w.shape), [x.layout, w.layout], x.mesh.cost, [4, 4, 4])

    def product(x: Any, w: Any) -> Tensor:
        return torch.matmul(x, w).local  # type: ignore[attr-defined, no-any-return]  # also if it is partial

    for name, (specs, placements) in COLD.items():
        mesh, device_mesh = both_meshes.ours[name], both_meshes.theirs[name]

        def ours(mesh: MeshComms = mesh, specs: list[P] = specs) -> list[Sharded]:
            return [
                shard(torch.zeros(shape), mesh, spec) for shape, spec in zip(both_meshes.fresh(), specs, strict=True)
            ]

        def theirs(mesh: DeviceMesh = device_mesh, placements: list[list[Placement]] = placements,
                   ours: Callable[[], list[Sharded]] = ours) -> list[DTensor]:  # fmt: skip
            return [_distributed(x.local, mesh, where) for x, where in zip(ours(), placements, strict=True)]

        yield Case(
            f"cold matmul, {name}",
            {
                ", propagate": each_new(calls, plan, ours),
                ", recipe": each_new(calls, partial(recipe_of, torch.matmul), ours),
                ", first call": each_new(calls, product, ours),
            },
            {"DTensor": each_new(1, torch.matmul, theirs)},
            "plan",
            (", propagate", ", recipe"),
        )


# --- 3. Moves -------------------------------------------------------------------------------------


def moves(both_meshes: Meshes, calls: int) -> Iterator[Case]:
    mesh, device_mesh = both_meshes.ours["1-D"], both_meshes.theirs["1-D"]
    local = torch.randn(ROWS, WIDTH)

    for source, target in (("S0", "R"), ("S1", "R"), ("S0", "S1"), ("P", "S0"), ("P", "R"), ("R", "S0")):
        x = from_local(local, mesh, LAYOUTS[source][0])  # not a result of ours: moved each time
        dx = _distributed(local, device_mesh, [LAYOUTS[source][1]])
        ours, theirs = LAYOUTS[target]
        yield Case(f"reshard, {source} to {target}", {"": again(calls, x.reshard, ours)},
                   {"DTensor": again(calls, dx.redistribute, device_mesh, [theirs])}, "move")  # fmt: skip
    x, to_columns = from_local(local, mesh, P("tp")), P(None, "tp")
    result = x * 1  # a function's result: caches its moved copies
    result.reshard(to_columns)
    yield Case("reshard, S0 to S1, moved before", {"": again(calls, result.reshard, to_columns)}, {})
    layouts = x.layout, result.reshard(to_columns).layout
    yield Case("plan of S0 to S1", {"": again(calls, mesh.plan, *layouts, x.shape, 4)}, {})


# --- 4. Forwards and backwards --------------------------------------------------------------------


def backward_passes(both_meshes: Meshes, calls: int) -> Iterator[Case]:
    mesh, device_mesh = both_meshes.ours["1-D"], both_meshes.theirs["1-D"]
    x, gradient = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH // RANKS)
    parameters = torch.randn(WIDTH // RANKS, WIDTH), torch.randn(WIDTH // RANKS)

    def step(x: Any, gradient: Any, weight: Any, bias: Any) -> None:
        weight.grad = bias.grad = None
        F.linear(x, weight, bias).backward(gradient)

    ours = [from_local(t.clone(), mesh, P("tp")).requires_grad_() for t in parameters]
    theirs = [_distributed(t.clone(), device_mesh, [Shard(0)]).requires_grad_() for t in parameters]
    plain = [t.clone().requires_grad_() for t in parameters]
    yield Case(
        "linear, columns, forward and backward",
        {"": again(calls, step, from_local(x, mesh, P()), from_local(gradient, mesh, P(None, "tp")), *ours)},
        {
            "DTensor": again(
                calls, step, _distributed(x, device_mesh, [Replicate()]),
                _distributed(gradient, device_mesh, [Shard(1)]), *theirs,
            ),
            "plain": again(calls, step, x, gradient, *plain),
        },
        "warm",
    )  # fmt: skip


# --- Report ---------------------------------------------------------------------------------------


def rows_of(case: Case, samples: Samples) -> Iterator[dict[str, Any]]:
    plain = samples.get("plain", [0.0] * len(next(iter(samples.values()))))

    def over(name: str) -> list[float]:
        return [a - b for a, b in zip(samples[name], plain, strict=True)]

    for name in case.ours:
        us, iqr = spread_of(samples[name])
        peers = {peer: spread_of(samples[peer]).median for peer in case.peers}
        row: dict[str, Any] = {"what": case.what + name, "us": us, "iqr_us": iqr, "peers": peers}
        if "plain" in peers:
            row["over_plain_us"] = {"ours": spread_of(over(name)).median, "DTensor": spread_of(over("DTensor")).median}
        if "DTensor" in peers:
            ratio = spread_of([a / b for a, b in zip(over(name), over("DTensor"), strict=True) if b > 0])
            row |= {"ratio_to": {"DTensor": ratio.median}, "iqr_ratio": ratio.iqr}
        if case.goal is not None and name in case.bound:
            row["at_most"] = GOALS[case.goal]
        yield row


def line_of(row: dict[str, Any]) -> str:
    text = f"{row['what']:38s}{row['us']:9.2f} us (iqr {row['iqr_us']:.2f})"
    text += "".join(f"  {name} {us:.2f}" for name, us in row["peers"].items())
    if "over_plain_us" in row:
        text += f"  over plain {row['over_plain_us']['ours']:.2f}, DTensor {row['over_plain_us']['DTensor']:.2f}"
    if "ratio_to" in row:
        text += f"  {row['ratio_to']['DTensor']:.2f}x DTensor (iqr {row['iqr_ratio']:.2f})"
    for key, bound in row.get("at_most", {}).items():
        found = row["us"] if key == "us" else row["ratio_to"]["DTensor"]
        text += f"  {'within' if found <= bound else 'MISSES'} {bound:.4g}{' us' if key == 'us' else 'x'}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=100, help="in a sample of what is warm (default: %(default)s)")
    parser.add_argument("--only", default="", help="cases whose name has this; no file is written")
    args = parser.parse_args()

    logging.getLogger("torch").setLevel(logging.ERROR)  # c10d logs that it has no all_to_all for CPU groups
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # received data of nonexistent peers is undefined
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    comm = to.new_comm("fake", "cpu", name="sharding", rank=0, size=RANKS)
    both_meshes = Meshes(
        {name: connect(axes, comm, name=name) for name, axes in MESHES.items()},
        {n: init_device_mesh("cpu", tuple(a.values()), mesh_dim_names=tuple(a)) for n, a in MESHES.items()},
    )

    rows = []
    for cases in (warm_operators(both_meshes, args.calls), cold_products(both_meshes, 5),
                  moves(both_meshes, args.calls), backward_passes(both_meshes, args.calls)):  # fmt: skip
        for case in cases:
            if args.only not in case.what:
                continue
            gc.collect()
            samples = interleave({name: sampler(work) for name, work in (case.ours | case.peers).items()}, args.rounds)
            for row in rows_of(case, samples):
                rows.append(row)
                print(line_of(row), flush=True)
    if not args.only:
        print(write(result("sharding", rows, gpu="cpu"), RANKS, args.out))
    for mesh in both_meshes.ours.values():
        mesh.close()
    comm.finalize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
