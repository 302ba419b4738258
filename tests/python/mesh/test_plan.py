"""Plans: ranked by cost, run on numpy arrays; cost models as numbers and as files."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest

from torch_overlap import InvalidTypeError
from torch_overlap.mesh import (
    CostModel,
    Layout,
    Mesh,
    collect,
    distribute,
    greedy_reshard,
    load_cost_model,
    plan_reshard,
    save_cost_model,
    simulate,
    wire_bytes,
)

H200 = CostModel.h200()


@pytest.mark.smoke
def test_a_plan_moves_what_it_says() -> None:
    mesh = Mesh({"x": 2, "y": 2}, ranks=[3, 1, 0, 2])
    before, after = Layout.parse(mesh, "[x],[y]"), Layout.parse(mesh, "[y],[x]")
    data = np.random.default_rng().standard_normal((6, 5))
    cost = CostModel.bandwidth_only()  # with the H200 model two of the smallest collectives are faster than a permute
    plan = plan_reshard(before, after, data.shape, 8, cost)
    assert [step.kind for step in plan.steps] == ["permute"]
    locals_ = simulate(plan, distribute(data, before))
    np.testing.assert_array_equal(collect(locals_, after, data.shape), data)
    for index, rank in enumerate(mesh.ranks):
        offsets, shape = after.offsets(data.shape, rank), after.local_shape(data.shape, rank)
        box = tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))
        np.testing.assert_array_equal(locals_[index], data[box])
    assert plan.seconds <= greedy_reshard(before, after, data.shape, 8, cost).seconds
    assert "-> [y],[x] on Mesh(x=2, y=2)" in plan.explain()


@pytest.mark.stress
def test_any_plan_agrees_with_slicing(seed: int) -> None:
    """Random meshes, ranks, layouts (partial ones too) and shapes; TORCH_OVERLAP_STRESS times 500."""
    better = pending = 0
    rng, generator = random.Random(seed), np.random.default_rng(seed)
    for _ in range(500 * int(os.environ.get("TORCH_OVERLAP_STRESS", "1"))):
        sizes = [rng.choice((1, 2, 2, 3, 4)) for _ in range(rng.randint(1, 3))]
        ranks = list(range(math.prod(sizes)))
        rng.shuffle(ranks)
        mesh = Mesh({f"m{i}": size for i, size in enumerate(sizes)}, ranks)
        shape = [rng.randint(1, 12) for _ in range(rng.randint(1, 3))]
        ends = []
        for chance in (0.5, 0.2):
            dims: list[list[str]] = [[] for _ in shape]
            partial: list[str] = []
            places = len(shape) + 1 + (rng.random() < chance)
            for axis in rng.sample(list(mesh.axes), len(mesh.axes)):
                (*dims, [], partial)[rng.randrange(places)].append(axis)
            ends.append(Layout(mesh, dims, partial))
        if rng.random() < 0.3:  # cut evenly by the same axes, in another order
            shape = [rng.randint(1, 3) * math.prod(mesh.axes[axis] for axis in dim) for dim in ends[0].dims]
            ends[1] = Layout(mesh, [rng.sample(dim, len(dim)) for dim in ends[0].dims])
            ends[0] = ends[0].with_partial(None)
        pending += bool(ends[0].partial)
        data = generator.standard_normal(shape)
        cost = rng.choice((H200, CostModel.bandwidth_only()))
        plan = plan_reshard(*ends, shape, 8, cost)
        greedy = greedy_reshard(*ends, shape, 8, cost)
        assert plan.seconds <= greedy.seconds, plan.explain()
        better += plan.seconds < greedy.seconds
        locals_ = simulate(plan, distribute(data, ends[0]))
        np.testing.assert_array_equal(collect(locals_, ends[1], shape), data, err_msg=plan.explain())
        if ends[1].partial:
            continue
        for index, local in enumerate(locals_):
            offsets, local_shape = (f(shape, mesh.ranks[index]) for f in (ends[1].offsets, ends[1].local_shape))
            box = tuple(slice(o, o + n) for o, n in zip(offsets, local_shape, strict=True))
            np.testing.assert_array_equal(local, data[box], err_msg=plan.explain())
    assert better > 0
    assert pending > 50


def test_steps_name_their_groups() -> None:
    mesh = Mesh({"dp": 2, "tp": 4})
    plan = plan_reshard(Layout.parse(mesh, "[dp],[] P{tp}"), Layout.parse(mesh, "[dp,tp],[] "), (4096, 4096), 2, H200)
    (step,) = plan.steps
    assert (step.kind, step.axes, step.dim, step.reduce, step.ranks) == ("reduce_scatter", ("tp",), 0, "sum", 4)
    assert step.bytes == 2048 * 4096 * 2
    assert step.wire_bytes == plan.wire_bytes == wire_bytes("reduce_scatter", 4, step.bytes)
    assert str(step.after) == "[dp,tp],[]"
    assert mesh.group(5, step.axes) == [4, 5, 6, 7]


def test_collecting_copies_that_differ_is_an_error() -> None:
    layout = Layout.replicated(Mesh({"x": 2}), 1)
    of_nan = np.array([1.0, np.nan, np.inf])
    np.testing.assert_array_equal(collect([of_nan, of_nan], layout, (3,)), of_nan)
    with pytest.raises(ValueError, match="expected equal copies"):
        collect([of_nan, np.ones(3)], layout, (3,))
    with pytest.raises(ValueError, match="expected equal copies"):
        collect([np.zeros(3), np.ones(3)], layout, (3,))
    with pytest.raises(ValueError, match="expected shape"):
        collect([np.zeros(2), np.zeros(2)], layout, (3,))


@pytest.mark.parametrize(
    ("collective", "ranks", "mib", "us"),
    [("all_reduce", 2, 64, 255.8), ("all_gather", 4, 256, 662.3), ("reduce_scatter", 4, 64, 194.7),
     ("all_to_all", 2, 64, 139.9), ("all_reduce", 4, 16, 96.7)],
)  # fmt: skip
def test_h200_gives_back_what_was_measured(collective: str, ranks: int, mib: int, us: float) -> None:
    assert H200.collective(collective, {"nvlink": ranks}, mib << 20) == pytest.approx(us * 1e-6)


@pytest.mark.parametrize(
    ("m", "n", "k", "us"),
    [(8192, 7168, 4096, 668), (8192, 14336, 8192, 2865), (8192, 2560, 8192, 484), (2048, 3584, 4096, 85.6),
     (8192, 8192, 2048, 380), (8192, 4096, 3584, 355), (8192, 8192, 7168, 1470), (2048, 4096, 3584, 82)],
)  # fmt: skip
def test_h200_products_are_near_what_was_measured(m: int, n: int, k: int, us: float) -> None:
    assert H200.matmul(m, n, k, 2) == pytest.approx(us * 1e-6, rel=0.15)


def test_times_grow_with_bytes_and_ranks() -> None:
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast"):
        assert H200.collective(collective, {"nvlink": 1}, 1 << 20) == 0
        times = [H200.collective(collective, {"nvlink": 4}, 1 << n) for n in range(8, 31)]
        assert times == sorted(times)
        far = H200.collective(collective, {"nvlink": 8, "network": 4}, 1 << 28)
        assert far > H200.collective(collective, {"nvlink": 8}, 1 << 28)


def test_models_are_files(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    save_cost_model(H200, path)
    again = load_cost_model(path)
    assert again.name == "h200"
    for collective in ("all_reduce", "all_to_all"):
        for size in (1000, 1 << 20, 1 << 27):
            links = {"nvlink": 4}
            assert again.collective(collective, links, size) == pytest.approx(H200.collective(collective, links, size))
    assert again.matmul(4096, 4096, 4096, 2) == pytest.approx(H200.matmul(4096, 4096, 4096, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("device"), "expected the keys"),
        (lambda v: v["device"].update(memory_gbps="fast"), "expected float at .*: device: memory_gbps, got 'fast'"),
        (lambda v: v["device"].update(memory_gbps=0), "expected memory above 0, got 0"),
        (lambda v: v["links"]["nvlink"].update(bandwidth_gbps=-1), "bandwidth of 'nvlink' above 0"),
        (lambda v: v["links"]["nvlink"].update(speed=1), "expected the keys"),
        (
            lambda v: v["overlap"].update(least_gain=0.03),
            r"\['contention', 'start_us', 'step_us'\] at .*: overlap, got .*least_gain",
        ),
        (lambda v: v["links"]["nvlink"]["curves"][0].update(collective="gossip"), "got 'gossip'"),
        (lambda v: v["links"]["nvlink"]["curves"][0].update(bytes_us=[[2, 9], [1, 10]]), "expected rising bytes"),
        (lambda v: v["links"]["nvlink"]["curves"][0].update(ranks=1), "for 2 ranks or more"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, change: object, message: str) -> None:
    values = H200.to_dict()
    change(values)  # type: ignore[operator]
    path = tmp_path / "model.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        load_cost_model(path)


def test_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="expected JSON"):
        load_cost_model(path)


def test_complex_arrays_are_refused():
    """A conversion to float64 would drop their imaginary parts."""
    mesh = Mesh({"tp": 2})
    layout = Layout.parse(mesh, "[tp]")
    whole, parts = np.array([1 + 2j, 3, 4, 5]), [np.array([1.0, 2.0]), np.array([3j, 4])]
    plan = plan_reshard(layout, Layout.parse(mesh, "[]"), (4,), 8, CostModel.h200())
    for name, call in (
        ("distribute", lambda: distribute(whole, layout)),
        ("distribute", lambda: distribute([1 + 2j, 3], layout)),
        ("collect", lambda: collect(parts, layout, (4,))),
        ("simulate", lambda: simulate(plan, parts)),
    ):
        with pytest.raises(InvalidTypeError, match=f"{name}: expected real numbers for .*, got complex128; call it"):
            call()
