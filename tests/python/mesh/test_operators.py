"""Layouts of the results of operators, and the required communication: one function at a time, on simulated ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import simulated as sim
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_overlap.mesh import Layout, Mesh

X4, X2, XY = Mesh({"x": 4}), Mesh({"x": 2}), Mesh({"x": 2, "y": 2})


def data(*shape: int) -> Tensor:
    return (torch.randn(shape, dtype=torch.float64) * 64).round() / 64


def run(function: Callable[..., Any], mesh: Mesh, *given: tuple[Tensor, str], seed: int = 0) -> tuple[Any, list[str]]:
    """Returns the result and the kinds of collectives; checks that its elements are those of the function of whole
    tensors."""
    rng, kinds = random.Random(seed), list[str]()
    tensors = [x for x, _ in given]
    operands = [sim.spread(x, Layout.parse(mesh, text), rng) for x, text in given]
    program = sim.captured(function, tensors, [x.layout for x in operands])
    result = sim.run_program(program, operands, mesh, kinds)
    expected = function(*tensors)
    pairs: Sequence[tuple[Any, Any]] = [(result, expected)]
    if isinstance(expected, tuple | list):
        pairs = list(zip(result, expected, strict=True))
    for value, reference in pairs:
        torch.testing.assert_close(value.collected(), reference, atol=1e-7, rtol=1e-7)
    return result, kinds


def layout_of(function: Callable[..., Any], mesh: Mesh, *given: tuple[Tensor, str], moves: Sequence[str] = ()) -> str:
    result, kinds = run(function, mesh, *given)
    assert kinds == list(moves)
    return str(result.layout)


NONLINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "pow": lambda x: x**2,
    "relu": F.relu,
    "softmax": lambda x: x.softmax(-1),
    "cast": lambda x: x.to(torch.float16),
    "plus a number": lambda x: x + 3,
    "comparison": lambda x: x > 0.5,
    "amax": lambda x: x.amax(0),
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_pending_sums_are_reduced_before(name: str, seed: int) -> None:
    """T28, B10: nonlinear operators, casts that round, and numbers that would be added once per rank."""
    result, kinds = run(NONLINEAR[name], X2, (data(4, 4), "[],[] P{x}"), seed=seed)
    assert kinds == ["all_reduce"]
    assert result.layout.invariant == ("x",)


def test_a_cast_rounds_the_sum() -> None:
    x = torch.tensor([2049.0, -4099.0], dtype=torch.float32)
    result, _ = run(lambda x: x.half(), X2, (x, "[] P{x}"))
    assert result.collected().equal(x.half())


LINEAR: dict[str, tuple[Callable[..., Any], tuple[tuple[Tensor, str], ...]]] = {
    "times a number": (lambda x: x * 3, ()),
    "divided by a number": (lambda x: x / 4, ()),
    "times a tensor": (torch.mul, ((data(4, 4), "[],[]"),)),
    "neg": (torch.neg, ()),
    "slice": (lambda x: x[1:3], ()),
    "select": (lambda x: x[1], ()),
    "take": (lambda x: x[torch.tensor([0, 2, 3])], ()),
    "matmul": (torch.matmul, ((data(4, 6), "[],[]"),)),
    "linear": (F.linear, ((data(6, 4), "[],[]"),)),
    "add of two": (torch.add, ((data(4, 4), "[],[] P{x}"),)),
    "cat of two": (lambda x, y: torch.cat((x, y)), ((data(3, 4), "[],[] P{x}"),)),
    "cat with a whole one": (lambda x, y: torch.cat((x, y)), ((data(3, 4), "[],[]"),)),
    "plus a bias": (torch.add, ((data(4), "[]"),)),
    "stack": (lambda x, y: torch.stack((x, y)), ((data(4, 4), "[],[] P{x}"),)),
    "sum": (lambda x: x.sum(0), ()),
    "mean": (torch.mean, ()),
    "reshape": (lambda x: x.reshape(2, 8), ()),
    "transpose": (torch.t, ()),
    "expand": (lambda x: x.expand(3, 4, 4), ()),
    "cumsum": (lambda x: x.cumsum(0), ()),
    "widening": (lambda x: x.double(), ()),
    "pad": (lambda x: F.pad(x, (1, 2), value=2.0), ()),
    "zeros": (torch.zeros_like, ()),
}


@pytest.mark.parametrize("name", LINEAR)
def test_pending_sums_stay(name: str, seed: int) -> None:
    """T29, T30: nothing is sent, and replicated values count once."""
    function, others = LINEAR[name]
    first = data(4, 4).float() if name == "widening" else data(4, 4)
    result, kinds = run(function, X2, (first, "[],[] P{x}"), *others, seed=seed)
    assert kinds == []
    assert result.layout.partial == {"x": "sum"}


def test_products() -> None:
    """T27, T31-T35, B11-B14."""
    a, b = data(8, 8), data(8, 4)
    assert layout_of(torch.matmul, X2, (a, "[],[]"), (b, "[],[x]")) == "[],[x]"
    assert layout_of(torch.matmul, X2, (a, "[],[x]"), (b, "[x],[]")) == "[],[] P{x}"
    assert layout_of(F.linear, X2, (a, "[x],[]"), (b.T.contiguous(), "[],[]")) == "[x],[]"
    assert (
        layout_of(torch.matmul, Mesh.parse("data=2,model=4"), (a, "[data],[]"), (b, "[],[model]")) == "[data],[model]"
    )
    for mesh, left, right in ((X4, "[x],[]", "[x],[]"), (X4, "[x],[]", "[],[x]"), (XY, "[],[x]", "[y],[]"),
                              (XY, "[x],[] P{y}", "[],[y]"), (X4, "[],[x]", "[],[]")):  # fmt: skip
        result, _ = run(torch.matmul, mesh, (a, left), (b, right))
        axes = [axis for dim in result.layout.dims for axis in dim] + list(result.layout.partial)
        assert len(axes) == len(set(axes))
    result, kinds = run(torch.matmul, X4, (a, "[x],[]"), (b, "[],[x]"))
    assert len(kinds) == 1
    for left, right in (((8,), (8, 4)), ((8, 8), (8,)), ((4, 6, 8), (8, 4)), ((4, 6, 8), (4, 8, 4))):
        cut = "[x]" + ",[]" * (len(left) - 1)
        run(torch.matmul, X4, (data(*left), cut), (data(*right), ",".join(["[]"] * len(right))))


def test_elementwise_conflicts() -> None:
    """T36-T38, B13: one of the two is resharded to the other; always the same one."""
    mesh = Mesh.parse("dp=2,tp=2")
    x, y = data(8, 8), data(8, 8)
    assert layout_of(torch.add, mesh, (x, "[dp],[]"), (y, "[],[tp]")) == "[dp],[tp]"  # both are cut further
    for first, second in (("[dp],[]", "[tp],[]"), ("[dp],[]", "[],[dp]"), ("[dp,tp],[]", "[tp,dp],[]")):
        results = {str(run(torch.add, mesh, (x, first), (y, second))[0].layout) for _ in range(3)}
        assert len(results) == 1


def test_reductions() -> None:
    """T39, B10."""
    x = data(8, 4)
    cases: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (lambda x: x.sum(0), "[] P{x}"),
        (lambda x: x.sum(1), "[x]"),
        (lambda x: x.sum(0, keepdim=True), "[],[] P{x}"),
        (torch.sum, "scalar P{x}"),
        (torch.mean, "scalar P{x}"),
        (lambda x: x.mean(1), "[x]"),
        (lambda x: x.amax(0), "[] P{x:max}"),
        (torch.min, "scalar P{x:min}"),
    ]
    for function, expected in cases:
        assert layout_of(function, X4, (x, "[x],[]")) == expected


def test_reshapes() -> None:
    """T40-T42, B19."""
    four = Mesh({"x": 4, "y": 4})
    assert layout_of(lambda v: v.reshape(16), four, (data(4, 4), "[x],[y]")) == "[x,y]"
    assert layout_of(lambda v: v.reshape(4, 4), four, (data(16), "[x,y]")) == "[x],[y]"
    assert layout_of(lambda v: v.reshape(2, 2), X4, (data(4), "[x]")) == "[x:(1)2],[x:(2)2]"
    assert layout_of(lambda v: v.reshape(2, 4, 32), X2, (data(8, 32), "[x],[]")) == "[x],[],[]"
    assert layout_of(torch.squeeze, X2, (data(2, 1, 3), "[x],[],[]")) == "[x],[]"
    _, kinds = run(lambda v: v.reshape(16), X4, (data(4, 4), "[],[x]"))
    assert kinds  # the minor dimension: its parts are not contiguous


@pytest.mark.parametrize("size", [7, 11, 10, 5, 3, 1])
def test_uneven_parts(size: int) -> None:
    """T43, B20."""
    x = data(size, 3)
    for function in (torch.exp, lambda v: v * v + 1, lambda v: v.sum(0), lambda v: v.mean(0), lambda v: v.amax(0),
                     lambda v: v.unsqueeze(0), lambda v: v.softmax(-1), lambda v: v @ v.T, torch.linalg.vector_norm,
                     lambda v: F.layer_norm(v, (3,)), lambda v: v.argmax(1), lambda v: v.cumsum(0)):  # fmt: skip
        run(function, X4, (x, "[x],[]"))
    result, _ = run(torch.neg, X4, (x, "[x],[]"))
    sizes = [len(part) for part in result.parts]
    assert sizes == [result.layout.local_shape((size, 3), rank)[0] for rank in range(4)]
    if size == 5:
        assert sizes == [2, 2, 1, 0]


def test_small_products() -> None:
    """T44."""
    run(torch.matmul, X4, (data(2, 2), "[x],[]"), (data(2, 2), "[],[]"))
    run(torch.matmul, X4, (data(1, 1), "[x],[]"), (data(1, 1), "[],[x]"))
    run(torch.matmul, X4, (data(3, 5), "[],[x]"), (data(5, 3), "[x],[]"))


def test_parts_of_axes() -> None:
    """T45."""
    mesh = Mesh({"d": 8})
    result, kinds = run(F.relu, mesh, (data(16, 32), "[d:(1)2],[d:(2)4]"))
    assert kinds == []
    assert {tuple(part.shape) for part in result.parts} == {(8, 8)}
    run(F.relu, X4, (data(8, 2), "[x:(1)2],[]"))


def test_softmax_of_a_sharded_dimension_reduces() -> None:
    """B16: the maximum and the sum are reduced; if the layout is unknown, the dimension is gathered."""
    x = data(4, 8)
    for dim in (-1, 1):
        for function in (torch.log_softmax, torch.softmax):
            result, kinds = run(lambda x, f=function, dim=dim: f(x, dim), X4, (x, "[],[x]"))
            assert kinds == ["all_reduce", "all_reduce"]
            assert str(result.layout) == "[],[x]"
            unknown = sim.captured(lambda x, f=function, dim=dim: f(x, dim), [x])
            assert [step.call.name for step in unknown.steps] == [function.__name__]
    assert layout_of(lambda x: x.softmax(-1), X4, (data(4, 8), "[x],[]")) == "[x],[]"


def test_a_sharded_vocabulary_is_looked_up_by_parts() -> None:
    """B15."""
    index = torch.randint(0, 50000, (4, 3))
    table = data(50000, 4)
    assert layout_of(F.embedding, X4, (index, "[],[]"), (table, "[x],[]")) == "[],[],[] P{x}"
    logits, target = data(3, 50000), torch.randint(0, 50000, (3, 1))
    assert layout_of(lambda x, t: x.gather(1, t), X4, (logits, "[],[x]"), (target, "[],[]")) == "[],[] P{x}"


def test_losses_of_a_sharded_batch() -> None:
    """A mean divides by the number of elements that are not ignored, over all ranks."""
    x, target = data(8, 5), torch.tensor([0, 1, -100, -100, 2, 3, -100, 4])
    for reduction in ("mean", "sum", "none"):
        result, kinds = run(lambda a, b, r=reduction: F.cross_entropy(a, b, reduction=r), X4, (x, "[x],[]"),
                            (target, "[x]"))  # fmt: skip
        assert kinds == (["all_reduce"] if reduction == "mean" else [])  # the count; the sum stays partial
        assert str(result.layout) == {"mean": "scalar P{x}", "sum": "scalar P{x}", "none": "[x]"}[reduction]


def test_a_norm_moves_one_number() -> None:
    result, kinds = run(torch.linalg.vector_norm, X4, (data(64, 64), "[],[x]"))
    assert kinds == ["all_reduce"]
    assert not result.layout.partial


def test_attention_keeps_heads_and_batches() -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    q, k, v = data(2, 8, 5, 4), data(2, 4, 5, 4), data(2, 4, 5, 4)
    cut = "[dp],[tp],[],[]"

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    assert layout_of(attention, mesh, (q, cut), (k, cut), (v, cut)) == cut
    _, kinds = run(attention, mesh, (q, "[],[],[dp],[]"), (k, "[],[],[],[]"), (v, "[],[],[],[]"))
    assert kinds  # a causal mask depends on the position
    assert layout_of(lambda x: x.tril(), mesh, (data(2, 5, 5), "[dp],[],[]")) == "[dp],[],[]"
    _, kinds = run(torch.tril, mesh, (data(4, 4), "[dp],[]"))
    assert kinds


def test_losses_of_a_sharded_vocabulary() -> None:
    """Logits stay in place: the maximum, the sum, the own class, and the count are reduced."""
    logits, target = data(6, 64), torch.randint(0, 64, (6,))
    _, kinds = run(F.cross_entropy, X4, (logits, "[],[x]"), (target, "[]"))
    assert set(kinds) == {"all_reduce"}
    both = Mesh.parse("dp=2,tp=2")
    run(lambda x, t: F.cross_entropy(x, t, reduction="sum", label_smoothing=0.1), both, (logits, "[dp],[tp]"),
        (target, "[dp]"))  # fmt: skip


def test_norms_of_a_sharded_dimension() -> None:
    x, weight = data(4, 3, 8), data(8)
    for function in (lambda x, w: F.layer_norm(x, (8,), w, w), lambda x, w: F.rms_norm(x, (8,), w, 1e-6),
                     lambda x, w: F.normalize(x, dim=-1) * w, lambda x, w: x.var(-1) + w.std(0),
                     lambda x, w: x.logsumexp((1, 2)) + w[:4]):  # fmt: skip
        _, kinds = run(function, X4, (x, "[],[],[x]"), (weight, "[x]"))
        assert "all_to_all" not in kinds


def test_a_batch_norm_knows_the_whole_batch() -> None:
    x = data(8, 3, 5)
    mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    rng, layouts = random.Random(0), [Layout.parse(X4, text) for text in ("[x],[],[]", "[]", "[]")]
    operands = [sim.spread(v, layout, rng) for v, layout in zip((x, mean, variance), layouts, strict=True)]

    def function(x: Tensor, mean: Tensor, variance: Tensor) -> Any:
        out = F.batch_norm(x, mean, variance, training=True, momentum=0.2)
        return out, mean, variance

    program = sim.captured(function, (x, mean, variance))
    assert set(program.writes) == {1, 2}
    kinds: list[str] = []
    got = sim.run_program(program, operands, X4, kinds)
    for value, reference in zip(got, function(x, mean, variance), strict=True):
        torch.testing.assert_close(value.collected(), reference)
    assert kinds == ["all_reduce", "all_reduce"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_halves_round_once(dtype: torch.dtype) -> None:
    """A sum of only the own part would be infinite in float16."""
    x = (torch.rand(4096) * 40000 + 20000).to(dtype)
    rng, layout = random.Random(0), Layout.parse(X4, "[x]")
    (step,) = sim.captured(torch.mean, [x]).steps
    (value,) = sim.run_call(step.call, [sim.spread(x, layout, rng)], X4)
    mean = sum(part.double() for part in value.parts)
    torch.testing.assert_close(mean, x.double().mean(), rtol=4 * torch.finfo(dtype).eps, atol=0)
