"""Products overlapped with an all-to-all, against the same in fp64 on one rank: values, gradients, autocast, errors."""

import random
import time

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from fused_cases import SIZES, Data, GradientProblem, check, check_gradients, leaf, on_ranks

from torch_overlap import _C, InvalidTypeError, _tuning, explain, ops
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
FORCED = ["sequential", "pipelined", "p2p"]
ALGORITHMS = [*FORCED, "auto"]


def to_tokens(xs):
    """Returns all_to_all(x, 0, -1) of all ranks: [tokens, ..., k / size] -> [tokens / size, ..., k]."""
    return [torch.cat([x.chunk(len(xs))[r] for x in xs], -1) for r in range(len(xs))]


def to_heads(ys):
    """Returns its inverse, all_to_all(y, -1, 0)."""
    return [torch.cat([y.chunk(len(ys), -1)[r] for y in ys]) for r in range(len(ys))]


def all_to_all_matmul_rank(comm, algorithm, number, shape, dtype):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number, dtype)
    xs = [data(*shape) for _ in range(size)]
    weights = [data(6, size * shape[-1]) for _ in range(size)]
    bias = data(6)
    want = F.linear(to_tokens(xs)[me].double(), weights[me].double())
    result = ops.all_to_all_matmul(xs[me], weights[me], comm, algorithm=algorithm)
    check(result, want)
    assert result.is_contiguous()
    check(ops.all_to_all_matmul(xs[me], weights[me], comm, bias, algorithm=algorithm), want + bias.double())
    transposed = xs[me].transpose(0, -1).contiguous().transpose(0, -1)
    check(ops.all_to_all_matmul(transposed, weights[me], comm, algorithm=algorithm), want)


# 36 tokens are split into pieces of at most three rows; 12 into pieces of one; none into none.
@covering(
    {
        "algorithm": ALGORITHMS,
        "size": SIZES,
        "shape": [(36, 5), (12, 5), (12, 2, 3), (0, 5)],
        "dtype": [torch.float64, torch.bfloat16],
    },
    strength=3,
)
def test_all_to_all_matmul(size, algorithm, shape, dtype, seed):
    on_ranks(all_to_all_matmul_rank, size, algorithm, seed, shape, dtype)


def matmul_all_to_all_rank(comm, algorithm, number, shape, dtype):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number, dtype)
    xs = [data(*shape) for _ in range(size)]
    weights = [[data(size * n, shape[-1]) for n in (4, 1, 2)] for _ in range(size)]
    biases = [[data(size * 4), None, data(size * 2)] for _ in range(size)]
    for with_bias in (False, True):
        results = ops.matmul_all_to_all(xs[me], weights[me], comm, biases[me] if with_bias else (), algorithm=algorithm)
        assert len(results) == 3
        for i, result in enumerate(results):
            products = []
            for x, ws, bs in zip(xs, weights, biases, strict=True):
                bias = bs[i].double() if with_bias and bs[i] is not None else None
                products.append(F.linear(x.double(), ws[i].double(), bias))
            check(result, to_heads(products)[me])
            assert result.is_contiguous()


@covering(
    {
        "algorithm": ALGORITHMS,
        "size": SIZES,
        "shape": [(7, 5), (3, 2, 5), (0, 5)],
        "dtype": [torch.float64, torch.bfloat16],
    },
    strength=3,
)
def test_matmul_all_to_all(size, algorithm, shape, dtype, seed):
    on_ranks(matmul_all_to_all_rank, size, algorithm, seed, shape, dtype)


# --- Gradients ---------------------------------------------------------------------------------------


def all_to_all_matmul_gradients_rank(comm, algorithm, parts):
    def sharded(mine):
        x, w, b = mine
        return [ops.all_to_all_matmul(x, w, comm, b, algorithm=algorithm)]

    check_gradients(parts[comm.get_rank()], sharded)


@pytest.mark.parametrize("algorithm", FORCED)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(12, 3), (24, 2, 3)])
def test_gradients_of_all_to_all_matmul(size, algorithm, shape, seed):
    data = Data(seed)
    leaves = [[data(*shape), data(4, size * shape[-1]), data(4)] for _ in range(size)]

    def reference(leaves):
        inputs = to_tokens([mine[0] for mine in leaves])
        return [[F.linear(x, w, b)] for x, (_, w, b) in zip(inputs, leaves, strict=True)]

    on_ranks(all_to_all_matmul_gradients_rank, size, algorithm, GradientProblem(data, leaves, reference).parts)


def matmul_all_to_all_gradients_rank(comm, algorithm, parts):
    def sharded(mine):
        x, w1, w2, b2 = mine
        return ops.matmul_all_to_all(x, [w1, w2], comm, [None, b2], algorithm=algorithm)

    check_gradients(parts[comm.get_rank()], sharded)


@pytest.mark.parametrize("algorithm", FORCED)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(5, 3), (3, 2, 3)])
def test_gradients_of_matmul_all_to_all(size, algorithm, shape, seed):
    data = Data(seed)
    leaves = [[data(*shape), data(2 * size, shape[-1]), data(size, shape[-1]), data(size)] for _ in range(size)]

    def reference(leaves):
        first = to_heads([F.linear(x, w1) for x, w1, _, _ in leaves])
        second = to_heads([F.linear(x, w2, b2) for x, _, w2, b2 in leaves])
        return [list(pair) for pair in zip(first, second, strict=True)]

    on_ranks(matmul_all_to_all_gradients_rank, size, algorithm, GradientProblem(data, leaves, reference).parts)


def asked_gradients_rank(comm, algorithm, xs, weights, biases):
    """The second of two results is used."""
    me = comm.get_rank()
    inputs = torch.cat(xs)
    for needs in range(1, 8):
        x, w, b = (
            t.clone().requires_grad_(bool(needs >> i & 1)) for i, t in enumerate((xs[me], weights[me], biases[me]))
        )
        other = weights[me].clone().requires_grad_()
        ops.matmul_all_to_all(x, [other, w], comm, [None, b], algorithm=algorithm)[1].sum().backward()
        assert other.grad is None
        wants = (weights[me].sum(0).expand(3, 5), xs[me].sum(0).expand(4, 5), torch.full((4,), 3.0).double())
        for t, want in zip((x, w, b), wants, strict=True):
            assert (t.grad is None) == (not t.requires_grad)
            if t.requires_grad:
                check(t.grad, want)
    for needs in range(1, 8):
        x, w, b = (
            t.clone().requires_grad_(bool(needs >> i & 1)) for i, t in enumerate((inputs[:, :2], weights[me][:, :4],
                                                                               biases[me]))
        )  # fmt: skip
        ops.all_to_all_matmul(x, w, comm, b, algorithm=algorithm).sum().backward()
        tokens = torch.cat([inputs[3 * me : 3 * me + 3, :2]] * 2, 1)
        # Every rank multiplies its own weight with its part of this rank's features.
        of_x = torch.cat([weights[r][:, 2 * me : 2 * me + 2].sum(0).expand(3, 2) for r in range(2)])
        for t, want in zip((x, w, b), (of_x, tokens.sum(0).expand(4, 4), torch.full((4,), 3.0).double()), strict=True):
            assert (t.grad is None) == (not t.requires_grad)
            if t.requires_grad:
                check(t.grad, want)


@pytest.mark.parametrize("algorithm", FORCED)
def test_only_the_gradients_that_are_asked_are_computed(algorithm, seed):
    data = Data(seed)
    parts = [[data(*shape) for _ in range(2)] for shape in ((3, 5), (4, 5), (4,))]
    on_ranks(asked_gradients_rank, 2, algorithm, *parts)


@pytest.mark.parametrize("algorithm", FORCED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_several_products_is_rounded_once(algorithm, dtype, seed):
    """Two large terms cancel: the rest has the precision of the third only if nothing was rounded before."""
    data = Data(seed, dtype)
    x, w, v, grad = data(4, 5), data(6, 5) * 64, data(6, 5), data(4, 6)

    def rank(comm):
        leaf_x = leaf(x)
        outputs = ops.matmul_all_to_all(leaf_x, [w, -w, v], comm, algorithm=algorithm)
        torch.autograd.backward(outputs, [grad, grad, grad])
        torch.testing.assert_close(leaf_x.grad.double(), grad.double() @ v.double(), rtol=1e-2, atol=2e-3)

    run_ranks(rank, 1, backend="local")


# --- Over channels -------------------------------------------------------------------------------------


def in_sequence_rank(comm, number):
    """Operators that share channels, back to back, with late ranks and streams in another order."""
    me, size, data = comm.get_rank(), comm.get_size(), Data(number)
    late = random.Random(number + me)
    _C._set_interleaving(number + 1)
    try:
        for turn in range(8):
            rows = size * (3 + turn % 3)
            xs = [data(rows, 5) for _ in range(size)]
            w, v = data(6, size * 5), data(2 * size, 5)
            if late.random() < 0.3:
                time.sleep(late.uniform(0, 0.01))
            tokens = ops.all_to_all_matmul(xs[me], w, comm, algorithm="p2p")
            heads, again = ops.matmul_all_to_all(xs[me], [v, v[:size]], comm, algorithm="p2p")
            (gathered,), _ = ops.all_gather_matmul(xs[me], [v], comm, algorithm="p2p")
            check(tokens, F.linear(to_tokens(xs)[me], w))
            check(heads, to_heads([F.linear(x, v) for x in xs])[me])
            check(again, to_heads([F.linear(x, v[:size]) for x in xs])[me])
            check(gathered, F.linear(torch.cat(xs), v))
    finally:
        _C._set_interleaving(0)


@pytest.mark.parametrize("backend", ["gloo", "local"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_operators_over_channels_follow_each_other(size, backend, seed):
    run_ranks(in_sequence_rank, size, seed, backend=backend)


def measured_rank(comm):
    """The algorithm that was measured as the fastest is selected, forward and backward."""
    size = comm.get_size()
    x, w = torch.randn(1024 * size, 4), torch.randn(6, 4 * size)
    y, v = torch.randn(256, 4), torch.randn(2 * size, 4)
    calls = {"all_to_all_matmul": (x, w, comm), "matmul_all_to_all": (y, [v], comm)}
    shapes = {"all_to_all_matmul": (1024 * size, 6, 4 * size), "matmul_all_to_all": (256 * size, 2 * size, 4)}
    entries = {_C._tuning_key(op, *mnk, torch.float32, size, "cpu", False): "p2p" for op, mnk in shapes.items()}
    found = {op: explain(op, *arguments) for op, arguments in calls.items()}
    _C._set_tuning("table", entries)
    try:
        for op, arguments in calls.items():
            assert (found[op].algorithm, found[op].decided_by) == ("pipelined", "rule")
            assert (explain(op, *arguments).algorithm, explain(op, *arguments).decided_by) == ("p2p", "table")
        leaves = [t.clone().requires_grad_() for t in (x, w, y, v)]

        def run(algorithm):
            tokens = ops.all_to_all_matmul(leaves[0], leaves[1], comm, algorithm=algorithm)
            heads = ops.matmul_all_to_all(leaves[2], [leaves[3]], comm, algorithm=algorithm)[0]
            results = [tokens, heads, *torch.autograd.grad(tokens.sum() + heads.sum(), leaves)]
            return [t.detach() for t in results]

        want, (got, events) = run("sequential"), spans(lambda: run("auto"))
        assert not [name for name, *_ in events if name.startswith("chunk_wait")]  # the communicator makes these waits
        torch.testing.assert_close(got, want)
    finally:
        _tuning.load()


def test_what_is_measured_goes_over_channels():
    run_ranks(measured_rank, 2)


# --- Order of transfers and products, autocast, errors -----------------------------------------------


def spans(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = function()
    found = [e for e in profile.events() if e.name.startswith("torch_overlap::chunk")]
    return result, [
        (e.name.removeprefix("torch_overlap::"), e.time_range.start, e.time_range.end)
        for e in sorted(found, key=lambda e: e.time_range.start)
    ]


def order_rank(comm):
    size = comm.get_size()
    x = torch.randn(24, 32, requires_grad=True)
    w = torch.randn(16, size * 32, requires_grad=True)
    v = torch.randn(size * 16, 16, requires_grad=True)
    y, events = spans(lambda: ops.all_to_all_matmul(x, w, comm, algorithm="pipelined"))
    names = [name for name, *_ in events]
    rounds = [f"{kind}[{i}]" for i in range(4) for kind in ("chunk_wait", "chunk_gemm")]
    assert names == [f"chunk_comm[{i}]" for i in range(4)] + rounds
    (z,), events = spans(lambda: ops.matmul_all_to_all(y, [v], comm, algorithm="pipelined"))
    names = [name for name, *_ in events]
    sends = [f"{kind}[{i}]" for i in range(size - 1) for kind in ("chunk_gemm", "chunk_comm")]
    assert names == [*sends, f"chunk_gemm[{size - 1}]", *(f"chunk_wait[{i}]" for i in range(size - 1))]
    grads, events = spans(lambda: torch.autograd.grad(z, (y, v), torch.randn_like(z), retain_graph=True))
    assert [name for name, *_ in events] == [f"chunk_comm[{i}]" for i in range(4)] + rounds
    _, events = spans(lambda: torch.autograd.grad(y, (x, w), grads[0]))
    names = [name for name, *_ in events]
    # x's exchange is in flight before the first product, and is waited for after the last.
    assert names == ["chunk_comm[0]", *sends, f"chunk_gemm[{size - 1}]", "chunk_wait[0]",
                     *(f"chunk_wait[{i}]" for i in range(size - 1))]  # fmt: skip


@pytest.mark.parametrize("size", [2, 3])
def test_transfers_are_issued_before_the_products_that_hide_them(size):
    run_ranks(order_rank, size, backend="gloo")


def test_autocast_casts_the_operands(seed):
    data = Data(seed, torch.float32)
    xs, w, v, b = [data(4, 3) for _ in range(2)], data(5, 6), data(6, 5), data(6)

    def rank(comm):
        me = comm.get_rank()
        x, mine = leaf(xs[me]), leaf(w)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = ops.all_to_all_matmul(x, mine, comm, algorithm="pipelined")
            (z,) = ops.matmul_all_to_all(y, [v], comm, [b])
        assert y.dtype == z.dtype == torch.bfloat16
        products = [F.linear(t, w) for t in to_tokens(xs)]
        check(y.detach(), products[me])
        z.sum().backward()
        assert x.grad.dtype == mine.grad.dtype == torch.float32

    run_ranks(rank, 2, backend="local")


ERRORS = {
    "all_to_all_matmul: expected algorithm to be one of auto sequential pipelined p2p, got 'fused'": (
        lambda c, x, w: ops.all_to_all_matmul(x, w, c, algorithm="fused")
    ),
    "matmul_all_to_all: expected algorithm to be one of auto sequential pipelined p2p, got 'bulk'": (
        lambda c, x, w: ops.matmul_all_to_all(x, [w], c, algorithm="bulk")
    ),
    r"all_to_all_matmul: expected x of two or more dimensions, got shape \[5\]": (
        lambda c, x, w: ops.all_to_all_matmul(x[0], w, c)
    ),
    r"matmul_all_to_all: expected x of two or more dimensions, got shape \[5\]": (
        lambda c, x, w: ops.matmul_all_to_all(x[0], [w], c)
    ),
    "divisible by the group size 2, got 3": lambda c, x, w: ops.all_to_all_matmul(x[:3], w, c),
    "in_features 10 as x of all ranks, got shape": lambda c, x, w: ops.all_to_all_matmul(x, w, c),
    r"all_to_all_matmul: expected a weight \[out_features, in_features\] .*got shape \[5\]": (
        lambda c, x, w: ops.all_to_all_matmul(x, w[0], c)
    ),
    r"a bias \[out_features\] of 4 elements, got shape \[3\]": (
        lambda c, x, w: ops.all_to_all_matmul(x, w.repeat(1, 2), c, x[:3, 0])
    ),
    r"expected weights\[0\] .*in_features 5 as x, got shape \[5, 4\]": lambda c, x, w: ops.matmul_all_to_all(
        x, [w.t()], c
    ),
    "one or more weights, got none": lambda c, x, w: ops.matmul_all_to_all(x, [], c),
    "one entry for each of the 1 weights, got 2": lambda c, x, w: ops.matmul_all_to_all(x, [w], c, [None, None]),
    r"out_features divisible by the group size 2 for weights\[1\], got 3 in shape \[3, 5\]": (
        lambda c, x, w: ops.matmul_all_to_all(x, [w, w[:3]], c)
    ),
}


@pytest.mark.parametrize("message", ERRORS)
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_mistake_is_an_error_that_says_what_to_do(message, needs_gradient):
    def rank(comm):
        with pytest.raises(ValueError, match=message):
            ERRORS[message](comm, torch.ones(4, 5, requires_grad=needs_gradient), torch.ones(4, 5))
        with pytest.raises(InvalidTypeError, match=r"a weight of dtype torch\.float32 as x, got torch\.float64"):
            ops.all_to_all_matmul(torch.ones(4, 5), torch.ones(4, 10, dtype=torch.float64), comm)

    run_ranks(rank, 2, backend="local")


@pytest.mark.parametrize("algorithm", FORCED)
def test_eight_ranks(algorithm, seed):
    """A whole host."""
    test_gradients_of_all_to_all_matmul(8, algorithm, (16, 3), seed)
    test_gradients_of_matmul_all_to_all(8, algorithm, (5, 3), seed)
