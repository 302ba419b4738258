"""The planner's values are copied and pickled exactly."""

from __future__ import annotations

import copy
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from simulated import random_layout

from torch_overlap.mesh import CostModel, Layout, Mesh, Step, plan_reshard

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "oldest protocol": lambda value: pickle.loads(pickle.dumps(value, protocol=2)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}
copies = pytest.mark.parametrize("way", COPIES)
COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast"]


def random_mesh(rng: random.Random) -> Mesh:
    """Returns a mesh of 8 ranks in any order, with links that are given for some axes."""
    axes = rng.choice([{"dp": 2, "tp": 4}, {"x": 2, "y": 2, "z": 2}, {"a_1": 8}, {"x": 4, "one": 1, "y": 2}])
    links = {name: rng.choice(["nvlink", "network"]) for name in axes if rng.random() < 0.5}
    ranks = rng.sample(range(rng.choice([8, 20])), 8)
    return Mesh(axes, ranks, rng.choice([0, 2, 4, 8]), links)


@copies
def test_a_mesh(way: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        mesh = random_mesh(rng)
        again = COPIES[way](mesh)
        assert again == mesh
        assert hash(again) == hash(mesh)
        assert (again.axes, again.ranks, again.ranks_per_host) == (mesh.axes, mesh.ranks, mesh.ranks_per_host)
        names = list(mesh.axes)
        assert list(again.axes) == names
        for axes in (names[:1], names, names[::-1]):
            assert again.links(axes) == mesh.links(axes)
            for rank in mesh.ranks:
                assert again.group(rank, axes) == mesh.group(rank, axes)


@copies
def test_a_layout_and_a_part_of_an_axis(way: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        mesh = random_mesh(rng)
        layout = random_layout(rng, mesh, rng.randrange(4), partial=rng.random() < 0.5)
        again = COPIES[way](layout)
        assert again == layout
        assert (hash(again), str(again), again.mesh) == (hash(layout), str(layout), mesh)
        shape = tuple(rng.randrange(20) for _ in range(layout.num_dims))
        for rank in mesh.ranks:
            assert again.local_shape(shape, rank) == layout.local_shape(shape, rank)
            assert again.offsets(shape, rank) == layout.offsets(shape, rank)
    mesh = Mesh({"dp": 2, "tp": 8}, links={"tp": "network"})
    for text in ("tp:(2)4", "tp", "tp:(1)2"):
        part = mesh.axis(text)
        assert COPIES[way](part) == part
    split = Layout(mesh, [mesh.axis("tp:(1)2"), ("dp", mesh.axis("tp:(2)4"))])
    assert COPIES[way](split) == split
    pending = Layout(mesh, ["dp"], partial={"tp": "max"})
    assert COPIES[way](pending) == pending
    assert COPIES[way](Layout(mesh, [None, "dp"], invariant="tp")).invariant == ("tp",)


def random_model(rng: random.Random) -> CostModel:
    values: dict[str, Any] = rng.choice([CostModel.h200(), CostModel.bandwidth_only(rng.uniform(1, 1e12))]).to_dict()
    for link in values["links"].values():
        link["start_us"], link["latency_us"] = rng.random(), rng.random()
    values["device"]["kernel_us"] = rng.random()
    values["overlap"]["contention"] = rng.random()
    return CostModel.from_dict(values)


@copies
def test_a_cost_model_to_the_last_bit(way: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        model = random_model(rng)
        again = COPIES[way](model)
        assert again.to_dict() == model.to_dict()
        assert again.name == model.name
        for _ in range(20):
            size, links = rng.uniform(1, 1e9), {rng.choice(list(model.to_dict()["links"])): rng.choice([2, 4, 8])}
            m, n, k = (rng.randrange(1, 10000) for _ in range(3))
            collective = rng.choice(COLLECTIVES)
            assert again.collective(collective, links, size) == model.collective(collective, links, size)
            assert again.matmul(m, n, k, 2) == model.matmul(m, n, k, 2)
            assert again.elementwise(size) == model.elementwise(size)
            assert again.overlapped(collective, links, size, 1e-4) == model.overlapped(collective, links, size, 1e-4)


FIELDS = ("kind", "axes", "sources", "dim", "from_dim", "reduce", "before", "after", "ranks", "bytes", "wire_bytes",
          "seconds", "sends")  # fmt: skip


@copies
def test_a_plan_and_its_steps(way: str, seed: int) -> None:
    rng = random.Random(seed)
    kinds = set()
    for _ in range(20):
        mesh, dims = random_mesh(rng), rng.randrange(1, 4)
        layouts = [random_layout(rng, mesh, dims, partial=partial) for partial in (True, False)]
        shape = [8 * rng.randrange(1, 5) for _ in range(dims)]
        plan = plan_reshard(*layouts, shape, 2, random_model(rng))
        again = COPIES[way](plan)
        for name in ("from_layout", "to_layout", "shape", "element_size", "seconds", "wire_bytes", "num_sends"):
            assert getattr(again, name) == getattr(plan, name), name
        assert (again.explain(), repr(again)) == (plan.explain(), repr(plan))
        for copied in (again.steps, [COPIES[way](step) for step in plan.steps]):
            assert len(copied) == len(plan.steps)
            for one, step in zip(copied, plan.steps, strict=True):
                assert [getattr(one, name) for name in FIELDS] == [getattr(step, name) for name in FIELDS]
        kinds |= {step.kind for step in plan.steps}
    assert len(kinds) > 1


READ = """
import pickle, sys
import torch_overlap as to
assert not [name for name in sys.modules if name.startswith("torch_overlap.mesh")]
assert not hasattr(to, "no_such_module")
package = to.mesh
from torch_overlap import mesh
from torch_overlap.mesh import Mesh
assert mesh is package and mesh.Mesh is Mesh
mesh, plan = pickle.load(sys.stdin.buffer)
print(mesh.ranks)
print(plan.explain())
"""


def test_another_process_reads_them(seed: int) -> None:
    """The first access imports torch_overlap.mesh."""
    rng = random.Random(seed)
    mesh = random_mesh(rng)
    plan = plan_reshard(Layout.replicated(mesh, 2), random_layout(rng, mesh, 2), [16, 16], 4, CostModel.h200())
    values = pickle.dumps((mesh, plan))
    done = subprocess.run([sys.executable, "-c", READ], input=values, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().rstrip() == f"{mesh.ranks}\n{plan.explain()}".rstrip()


def test_a_state_that_cannot_be_is_an_error() -> None:
    for kind, state, message in (
        (Step, (1,), "expected 12 values of pickle, got 1"),
        (Mesh, ([("x", 2, "")], [3, 3], 0), "expected every rank once, got 3 twice"),
        (Layout, (Mesh({"x": 2}), "[y]"), r"one of the axes \[x\], got 'y'"),
    ):
        with pytest.raises(ValueError, match=message):
            kind.__new__(kind).__setstate__(state)  # type: ignore[attr-defined]
