"""Rules on torch's operators: the results of each rank's own parts, collected, are the whole result."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from simulated import random_layout

from torch_overlap.mesh import CostModel, Layout, Mesh, OpRule, collect, distribute, propagate, simulate

H200 = CostModel.h200()
MESHES = ("a=1,b=2", "a=2,b=1", "a=2,b=2", "a=1,b=4", "a=4,b=1", "a=2,b=4", "a=4,b=2", "a=3,b=2", "a=2,b=2,c=2",
          "a=2,b=2,c=4")  # fmt: skip


def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, w.shape, w, b)


def conv(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if 0 in x.shape or 0 in w.shape:
        return x.new_zeros(len(x), len(w), 3, 3)
    return F.conv2d(x, w, groups=x.shape[1] // w.shape[1])


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


# rule, the operator on local tensors, True if its inputs may be partial sums
CASES: dict[str, tuple[OpRule, Callable[..., torch.Tensor]]] = {
    "linear": (OpRule.linear((4, 6, 8), (12, 8)), F.linear),
    "linear with bias": (OpRule.linear((6, 8), (12, 8), True), F.linear),
    "bmm": (OpRule.matmul((4, 6, 8), (4, 8, 5)), torch.matmul),
    "matmul, vector": (OpRule.matmul((8,), (8, 6)), torch.matmul),
    "matmul, broadcast": (OpRule.matmul((2, 1, 4, 8), (3, 8, 6)), torch.matmul),
    "softmax": (OpRule.along("softmax", (4, 8, 6), (-1,)), softmax),
    "layer_norm": (OpRule.norm((4, 7, 8), 1, 2), norm),
    "conv": (OpRule.conv((4, 6, 5, 5), (8, 6, 3, 3), (4, 8, 3, 3)), conv),
    "conv, groups": (OpRule.conv((4, 8, 5, 5), (8, 2, 3, 3), (4, 8, 3, 3), 4), conv),
    "attention": (OpRule.attention((4, 8, 6, 4), (4, 4, 5, 4), (4, 4, 5, 6)), attention),
    "cat": (OpRule.concat(((4, 6), (3, 6)), 0), lambda a, b: torch.cat((a, b), 0)),
    "slice": (OpRule.slice((8, 6), 0, [(1, 4)]), lambda x: x[1:4]),
    "permute": (OpRule.transpose((4, 6, 5), (2, 0, 1)), lambda x: x.permute(2, 0, 1)),
    "gelu": (OpRule.elementwise("gelu", [(4, 7)]), F.gelu),
    "gelu of one row": (OpRule.elementwise("gelu", [(1, 7)]), F.gelu),
    "add, one row": (OpRule.elementwise("add", [(1, 7), (1, 1, 7), (7,)], "add"), lambda a, b, c: a + b + c),
    "where": (OpRule.elementwise("where", [(4, 7), (7,), (4, 1)]), lambda c, a, b: torch.where(c > 0, a, b)),
    "amax": (OpRule.reduction("amax", (4, 8), (0,)), lambda x: x.amax(0) if len(x) else x.new_full(x.shape[1:], -1e9)),
    "flip": (OpRule.along("flip", (4, 8), (0,)), lambda x: x.flip(0)),
}


@pytest.mark.parametrize("name", CASES)
def test_local_results_are_the_global_one(name: str, seed: int) -> None:
    rule, function = CASES[name]
    rng, generator = random.Random(seed), np.random.default_rng(seed)
    for text in MESHES:
        mesh = Mesh.parse(text)
        for _ in range(4):
            data = [generator.standard_normal(shape) for shape in rule.inputs]
            layouts = [random_layout(rng, mesh, len(shape), partial=True) for shape in rule.inputs]
            found = propagate(rule, layouts, H200)
            inputs = [simulate(p, distribute(d, x)) for p, d, x in zip(found.plans, data, layouts, strict=True)]
            locals_ = [function(*(torch.from_numpy(x[i]) for x in inputs)).numpy() for i in range(mesh.size)]
            expected = function(*map(torch.from_numpy, data)).numpy()
            (output,) = found.outputs
            for rank, local in zip(mesh.ranks, locals_, strict=True):
                assert local.shape == output.local_shape(expected.shape, rank), found.explain()
            for axis, kind in output.partial.items():
                assert kind in ("sum", "max"), axis
            # Parts are rounded differently; copies are compared by bits after rounding.
            got = collect([np.round(x, 9) for x in locals_], output, expected.shape)
            np.testing.assert_allclose(got, expected, atol=1e-7, err_msg=f"{found.explain()}")


@pytest.mark.parametrize("text", MESHES)
def test_a_sharded_table_is_looked_up_by_parts(text: str) -> None:
    """B15: indices are shifted, and those of other ranks masked."""
    mesh, generator = Mesh.parse(text), np.random.default_rng()
    table, index = generator.standard_normal((11, 6)), generator.integers(0, 11, (5, 3))
    rule = OpRule.take(table.shape, index.shape, 0)
    for dims in (("b",), ("a",), ("a", "b")):
        layout, whole = Layout(mesh, [dims, None]), Layout.replicated(mesh, 2)
        found = next(s for s in propagate(rule, [layout, whole], H200).strategies if s.inputs[0] == layout)
        assert set(found.outputs[0].partial) == set(dims)
        locals_ = []
        for rank, part in zip(mesh.ranks, distribute(table, layout), strict=True):
            own = index - layout.offsets(table.shape, rank)[0]
            inside = (own >= 0) & (own < len(part))
            rows = part[np.clip(own, 0, max(len(part) - 1, 0))] if len(part) else np.zeros((*index.shape, 6))
            locals_.append(np.where(inside[..., None], rows, 0))
        np.testing.assert_array_equal(collect(locals_, found.outputs[0], (5, 3, 6)), table[index])
    assert "minus the offset" in rule.note


def test_a_mean_is_a_sum_over_the_global_count() -> None:
    mesh, x = Mesh({"x": 4}), np.random.default_rng().standard_normal((10, 3))  # 3 3 3 1
    rule, layout = OpRule.reduction("mean", x.shape, (0,)), Layout.parse(Mesh({"x": 4}), "[x],[]")
    (output,) = propagate(rule, [layout], H200).outputs
    locals_ = [part.sum(0) / 10 for part in distribute(x, layout)]
    np.testing.assert_allclose(collect(locals_, output, (3,)), x.mean(0))
    assert output == Layout(mesh, [None], partial="x")
    assert "global number" in rule.note


def test_the_data_shows_a_wrong_order() -> None:
    """T57: nonlinear operators on partial values give other numbers, so the values are reduced first."""
    mesh = Mesh({"tp": 2})
    pending = Layout(mesh, [None], partial="tp")
    x = np.array([2049.0, 1.0, 3.0])
    parts = [np.array([2048.0, 0.25, 1.5]), x - np.array([2048.0, 0.25, 1.5])]
    for name, function in (("exp", lambda v: np.exp(v / 1000)), ("pow", np.square), ("relu", lambda v: v.clip(2))):
        (plan,) = propagate(OpRule.elementwise(name, [(3,)]), [pending], H200).plans
        assert [s.kind for s in plan.steps] == ["all_reduce"]
        right = function(simulate(plan, parts)[0])
        wrong = collect([function(p) for p in parts], pending, (3,))
        np.testing.assert_array_equal(right, function(x))
        assert not np.allclose(wrong, right)
    half = [p.astype(np.float16).astype(float) for p in parts]
    assert collect(half, pending, (3,)).astype(np.float16)[0] == x.astype(np.float16)[0]  # 2048 + 1 rounds to even
    cast = OpRule.elementwise("cast", [(3,)])
    assert propagate(cast, [pending], H200).plans[0].num_sends == 1


def test_choices_are_reported() -> None:
    mesh = Mesh({"x": 4})
    rule = OpRule.matmul((4096, 4096), (4096, 4096))
    found = propagate(rule, [Layout.parse(mesh, "[x],[]"), Layout.parse(mesh, "[],[x]")], H200, [2, 2, 2])
    text = found.explain()
    assert text.startswith("matmul: m k+, k+ n -> m n: x on ")
    assert "chosen x on" in text
    assert "over   " in text
    assert [s.seconds for s in found.strategies] == sorted(s.seconds for s in found.strategies)
    again = propagate(rule, [Layout.parse(mesh, "[x],[]"), Layout.parse(mesh, "[],[x]")], H200, [2, 2, 2])
    assert again.explain() == text
