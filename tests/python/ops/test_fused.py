"""Fused products against the same in fp64 on one rank: values, gradients, order of transfers and GEMMs."""

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from fused_cases import SIZES, Data, GradientProblem, check, check_gradients, leaf, on_ranks

from torch_overlap import Error, InvalidTypeError, UnsupportedError, ops
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
ALGORITHMS = ["sequential", "pipelined", "p2p", "bulk", "low_latency", "auto"]
FORCED = ALGORITHMS[:-1]


def gather_problem(data, size, shape, features):
    xs = [data(*shape) for _ in range(size)]
    weights = [[data(n, shape[-1]) for n in features] for _ in range(size)]
    biases = [[data(n) for n in features] for _ in range(size)]
    return xs, weights, biases


def all_gather_matmul_rank(comm, algorithm, number, shape, dim, dtype):
    me, size = comm.get_rank(), comm.get_size()
    xs, weights, biases = gather_problem(Data(number, dtype), size, shape, (4, 1, 6))
    gathered = torch.cat(xs, dim)
    biased = [biases[me][0], None, biases[me][2]]
    for with_bias in (False, True):
        for keep in (False, True):
            outputs, kept = ops.all_gather_matmul(
                xs[me], weights[me], comm, biased if with_bias else (),
                gather_dim=dim, return_gathered=keep, algorithm=algorithm,
            )  # fmt: skip
            assert len(outputs) == 3
            for output, weight, bias in zip(outputs, weights[me], biased, strict=True):
                bias = bias.double() if with_bias and bias is not None else None
                check(output, F.linear(gathered.double(), weight.double(), bias))
                assert output.is_contiguous()
            assert torch.equal(kept, gathered if keep else torch.empty(0, dtype=dtype))


@covering(
    {
        "algorithm": ALGORITHMS,
        "size": SIZES,
        "shape,dim": [((3, 5), 0), ((2, 3, 5), 0), ((2, 3, 5), 1), ((2, 3, 2, 5), -2)],
        "dtype": [torch.float64, torch.bfloat16],
    },
    strength=3,
)
def test_all_gather_matmul(size, algorithm, shape, dim, dtype, seed):
    on_ranks(all_gather_matmul_rank, size, algorithm, seed, shape, dim, dtype)


def matmul_reduce_scatter_rank(comm, algorithm, number, shape, dim, dtype, op):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number, dtype)
    xs = [data(*shape) for _ in range(size)]
    weights = [data(4, shape[-1]) for _ in range(size)]
    biases = [data(4) for _ in range(size)]
    total = sum(x.double() @ w.double().t() for x, w in zip(xs, weights, strict=True))
    part = (total / size if op == "avg" else total).chunk(size, dim)[me]
    options = {"scatter_dim": dim, "op": op, "algorithm": algorithm}
    result = ops.matmul_reduce_scatter(xs[me], weights[me], comm, **options)
    check(result, part)
    assert result.is_contiguous()
    check(ops.matmul_reduce_scatter(xs[me], weights[me], comm, biases[me], **options), part + biases[me].double())


@covering(
    {
        "algorithm": ALGORITHMS,
        "size": SIZES,
        "shape,dim": [((12, 5), 0), ((12, 3, 5), 0), ((2, 12, 5), 1), ((2, 12, 3, 5), -3)],
        "dtype": [torch.float64, torch.bfloat16],
        "op": ["sum", "avg"],
    },
    strength=3,
)
def test_matmul_reduce_scatter(size, algorithm, shape, dim, dtype, op, seed):
    on_ranks(matmul_reduce_scatter_rank, size, algorithm, seed, shape, dim, dtype, op)


def matmul_all_reduce_rank(comm, algorithm, number, shape, op):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number)
    xs = [data(*shape) for _ in range(size)]
    weights = [data(4, shape[-1]) for _ in range(size)]
    bias = data(4)
    want = sum(x @ w.t() for x, w in zip(xs, weights, strict=True)) / (size if op == "avg" else 1)
    check(ops.matmul_all_reduce(xs[me], weights[me], comm, op=op, algorithm=algorithm), want)
    check(ops.matmul_all_reduce(xs[me], weights[me], comm, bias, op=op, algorithm=algorithm), want + bias)


@covering(
    {"algorithm": ALGORITHMS, "size": SIZES, "shape": [(1, 5), (9, 5), (2, 7, 5)], "op": ["sum", "avg"]}, strength=3
)
def test_matmul_all_reduce(size, algorithm, shape, op, seed):
    on_ranks(matmul_all_reduce_rank, size, algorithm, seed, shape, op)


# --- Gradients: of the sum of all ranks' losses, first and second order ------------------------------


def all_gather_matmul_gradients_rank(comm, algorithm, parts, dim, keep):
    def sharded(mine):
        x, w1, w2, b2 = mine
        outputs, kept = ops.all_gather_matmul(
            x, [w1, w2], comm, [None, b2], gather_dim=dim, return_gathered=keep, algorithm=algorithm
        )
        return [*outputs, kept] if keep else outputs

    check_gradients(parts[comm.get_rank()], sharded)


@covering(
    {"algorithm": FORCED, "size": SIZES, "shape,dim": [((3, 5), 0), ((2, 3, 5), 1)], "keep": [False, True]}, strength=3
)
def test_gradients_of_all_gather_matmul(size, algorithm, shape, dim, keep, seed):
    data = Data(seed)
    xs, weights, biases = gather_problem(data, size, shape, (4, 6))

    def reference(leaves):
        gathered = torch.cat([mine[0] for mine in leaves], dim)
        return [[F.linear(gathered, w1), F.linear(gathered, w2, b2)] + [gathered] * keep for _, w1, w2, b2 in leaves]

    leaves = [[xs[r], *weights[r], biases[r][1]] for r in range(size)]
    problem = GradientProblem(data, leaves, reference)
    on_ranks(all_gather_matmul_gradients_rank, size, algorithm, problem.parts, dim, keep)


def reduced_gradients_rank(comm, algorithm, parts, kind, dim, op):
    def sharded(mine):
        if kind == "all_reduce":
            return [ops.matmul_all_reduce(mine[0], mine[1], comm, mine[2], op=op, algorithm=algorithm)]
        return [ops.matmul_reduce_scatter(mine[0], mine[1], comm, mine[2], scatter_dim=dim, op=op, algorithm=algorithm)]

    check_gradients(parts[comm.get_rank()], sharded)


@covering(
    {
        "algorithm": FORCED,
        "size": SIZES,
        "op": ["sum", "avg"],
        "kind": ["reduce_scatter 0", "reduce_scatter 1", "all_reduce"],
    },
    strength=3,
)
def test_gradients_of_products_that_are_reduced(size, algorithm, op, kind, seed):
    data = Data(seed)
    shape = (2, 12, 5) if kind == "reduce_scatter 1" else (12, 2, 5)
    dim = 1 if kind == "reduce_scatter 1" else 0

    def reference(leaves):
        total = sum(x @ w.t() for x, w, _ in leaves) / (size if op == "avg" else 1)
        if kind == "all_reduce":
            return [[total + b] for _, _, b in leaves]
        return [[total.chunk(size, dim)[r] + leaves[r][2]] for r in range(size)]

    problem = GradientProblem(data, [[data(*shape), data(4, 5), data(4)] for _ in range(size)], reference)
    on_ranks(reduced_gradients_rank, size, algorithm, problem.parts, kind, dim, op)


def asked_gradients_rank(comm, algorithm, xs, weights):
    me = comm.get_rank()
    for x_needs in (False, True):
        for weight_needs in ((False, True), (True, False), (False, False)):
            x = xs[me].clone().requires_grad_(x_needs)
            ws = [w.clone().requires_grad_(n) for w, n in zip(weights[me], weight_needs, strict=True)]
            outputs, _ = ops.all_gather_matmul(x, ws, comm, algorithm=algorithm)
            if not outputs[1].requires_grad:
                continue
            outputs[1].sum().backward()
            gathered = torch.cat(xs)
            if x_needs:
                ones = torch.ones(3, 6, dtype=torch.float64)
                check(x.grad, sum(ones @ weights[r][1] for r in range(2)))
            assert ws[0].grad is None
            if weight_needs[1]:
                check(ws[1].grad, torch.ones(6, 6, dtype=torch.float64).t() @ gathered)


@pytest.mark.parametrize("algorithm", FORCED)
def test_only_the_gradients_that_are_asked_are_computed(algorithm, seed):
    """Any of the operands may be constant, and any product unused."""
    xs, weights, _ = gather_problem(Data(seed), 2, (3, 5), (4, 6))
    on_ranks(asked_gradients_rank, 2, algorithm, xs, weights)


def rounded_once_rank(comm, algorithm, number, dtype):
    data = Data(number, dtype)
    x, w, v, grad = data(4, 5), data(6, 5) * 64, data(6, 5), data(4, 6)
    leaf_x = leaf(x)
    outputs, _ = ops.all_gather_matmul(leaf_x, [w, -w, v], comm, algorithm=algorithm)
    torch.autograd.backward(outputs, [grad, grad, grad])
    torch.testing.assert_close(leaf_x.grad.double(), grad.double() @ v.double(), rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("algorithm", FORCED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_several_products_is_rounded_once(algorithm, dtype, seed):
    """Two large terms cancel: the rest has the precision of the third only if nothing was rounded before."""
    on_ranks(rounded_once_rank, 1, algorithm, seed, dtype)


# --- Order of transfers and products -----------------------------------------------------------------


def spans(profile):
    """Returns kind -> [(start, end)] of this thread's torch_overlap spans, in order."""
    kinds = {"exchange": "comm", "chunk_comm": "comm", "gemm": "gemm", "chunk_gemm": "gemm", "wait": "wait",
             "chunk_wait": "wait"}  # fmt: skip
    found = {kind: [] for kind in kinds.values()}
    for event in profile.events():
        kind = kinds.get(event.name.removeprefix("torch_overlap::").partition("[")[0])
        if kind and event.name.startswith("torch_overlap::"):
            found[kind].append((event.time_range.start, event.time_range.end))
    return {kind: sorted(times) for kind, times in found.items()}


def assert_transfers_run_behind_products(found, which, steps):
    """Checks that no transfer is waited for before the end of the product that hides it.

    gather: the transfer for product i + 1 is issued before product i ends, and waited for after it. scatter: the result
    of product i is sent before product i + 1 ends, and every wait follows the last product.
    """
    comm, gemm, wait = found["comm"], found["gemm"], found["wait"]
    assert len(gemm) == steps
    assert len(wait) >= steps - 1
    for i in range(steps - 1):
        if which == "gather":
            assert comm[i][0] < gemm[i][1]
            assert wait[i][0] >= gemm[i][1]
        else:
            assert comm[i][0] < gemm[i + 1][1]
    if which == "scatter":
        assert all(start >= gemm[-1][1] for start, _ in wait)


def trace_rank(comm, backward):
    size = comm.get_size()
    x = torch.randn(64, 32, requires_grad=True)
    w = torch.randn(48, 32, requires_grad=True)
    v = torch.randn(32, 48, requires_grad=True)

    def record(fn):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            result = fn()
        return result, spans(profile)

    comm.barrier(async_op=False)
    (y,), found = record(lambda: ops.all_gather_matmul(x, [w], comm, algorithm="pipelined")[0])
    assert_transfers_run_behind_products(found, "gather", size)
    z, found = record(lambda: ops.matmul_reduce_scatter(y, v, comm, algorithm="pipelined"))
    assert_transfers_run_behind_products(found, "scatter", size)
    a, found = record(lambda: ops.matmul_all_reduce(y, v, comm, algorithm="pipelined"))
    assert_transfers_run_behind_products(found, "scatter", 4)
    if backward:
        grad = torch.randn_like(z)
        (gy,), found = record(lambda: torch.autograd.grad(z, y, grad, retain_graph=True))
        assert_transfers_run_behind_products(found, "gather", size)
        _, found = record(lambda: torch.autograd.grad(a, y, torch.randn_like(a), retain_graph=True))
        found["comm"], found["wait"] = found["comm"][1:], found["wait"][1:]  # the first piece hides behind nothing
        assert_transfers_run_behind_products(found, "gather", 4)
        _, found = record(lambda: torch.autograd.grad(y, (x, w), gy))
        assert len(found["comm"]) == 2 * (size - 1)
        assert found["comm"][size - 2][0] < found["gemm"][0][0]  # x is gathered again meanwhile
        found["comm"] = found["comm"][size - 1 :]
        assert_transfers_run_behind_products(found, "scatter", size)
    return sorted(found)


@pytest.mark.parametrize("size", [2, 3])
def test_the_next_transfer_is_issued_before_a_product_ends(size):
    run_ranks(trace_rank, size, True, backend="gloo")


# --- autocast, errors ---------------------------------------------------------------------------------


def test_autocast_casts_the_operands(seed):
    data = Data(seed, torch.float32)
    xs, weights, biases = gather_problem(data, 2, (2, 5), (4,))

    def rank(comm):
        me = comm.get_rank()
        x, w = leaf(xs[me]), leaf(weights[me][0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (y,), _ = ops.all_gather_matmul(x, [w], comm, [biases[me][0]], algorithm="pipelined")
            z = ops.matmul_reduce_scatter(y, w.t(), comm)
            a = ops.matmul_all_reduce(y, w.t(), comm, algorithm="pipelined")
        assert y.dtype == z.dtype == a.dtype == torch.bfloat16
        check(y.detach(), F.linear(torch.cat(xs), weights[me][0], biases[me][0]))
        (z.sum() + a.sum()).backward()
        assert x.grad.dtype == w.grad.dtype == torch.float32

    run_ranks(rank, 2, backend="local")


ERRORS = {
    "algorithm to be one of auto, sequential, pipelined, p2p, bulk, fused, low_latency, got 'tree'": lambda c, x, w: (
        ops.all_gather_matmul(x, [w], c, algorithm="tree")
    ),
    "two or more dimensions, got shape": lambda c, x, w: ops.all_gather_matmul(x[0], [w], c),
    "gather_dim to be a dimension of rows, got 1": lambda c, x, w: ops.all_gather_matmul(x, [w], c, gather_dim=1),
    "one or more weights, got none": lambda c, x, w: ops.all_gather_matmul(x, [], c),
    "one entry for each of the 1 weights, got 2": lambda c, x, w: ops.all_gather_matmul(x, [w], c, [None, None]),
    r"in_features 5 as x, got shape \[5\] for x of shape \[4, 5\]": lambda c, x, w: ops.matmul_all_reduce(x, w[0], c),
    r"^matmul_reduce_scatter: expected a weight \[out_features, in_features\] with in_features 5 as x, got "
    r"shape \[5, 4\] for x of shape \[4, 5\]. Pass weight.t\(\)": lambda c, x, w: ops.matmul_reduce_scatter(
        x, w.t(), c
    ),
    r"expected weights\[1\] .* in_features 5 as x, got shape \[5, 4\]": lambda c, x, w: ops.all_gather_matmul(
        x, [w, w.t()], c
    ),
    r"^all_to_all_matmul: .* in_features 10 as x of all ranks, got shape \[4, 5\]": lambda c, x, w: (
        ops.all_to_all_matmul(x, w, c)
    ),
    r"a bias \[out_features\] of 4 elements, got shape \[3\] for a weight of shape \[4, 5\]": lambda c, x, w: (
        ops.matmul_all_reduce(x, w, c, x[:3, 0])
    ),
    r"expected biases\[1\] .* of 4 elements, got shape \[1, 4\]": lambda c, x, w: ops.all_gather_matmul(
        x, [w, w], c, [None, x[:1, :4]]
    ),
    r"^matmul_reduce_scatter: expected dimension 0 of x divisible by the group size 2, got 7 in shape \[7, 5\]. "
    r"Pad it to a multiple of 2.$": lambda c, x, w: ops.matmul_reduce_scatter(torch.cat([x, x[:3]]), w, c),
    r"^bulk_overlap_matmul: expected dimension 0 of other divisible by the group size 2, got 3": lambda c, x, w: (
        ops.bulk_overlap_matmul(x, w, x[:3], c, collective="reduce_scatter")
    ),
    "op to be one of sum avg, got 'max'": lambda c, x, w: ops.matmul_reduce_scatter(x, w, c, op="max"),
}


@pytest.mark.parametrize("message", ERRORS)
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_mistake_is_an_error_that_says_what_to_do(message, needs_gradient):
    def rank(comm):
        with pytest.raises(ValueError, match=message):
            ERRORS[message](comm, torch.ones(4, 5, requires_grad=needs_gradient), torch.ones(4, 5))
        with pytest.raises(InvalidTypeError, match=r"a weight of dtype torch\.float32 as x, got torch\.float64"):
            ops.matmul_all_reduce(torch.ones(4, 5), torch.ones(4, 5, dtype=torch.float64), comm)

    run_ranks(rank, 2, backend="local")


def test_a_cpu_has_no_fused_kernels():
    def rank(comm):
        x, w = torch.ones(4, 5), torch.ones(4, 5)
        why = "expected what algorithm 'fused' needs, got: fused kernels need GPUs of sm_90, this is cpu. Use 'auto'"
        for call in (lambda: ops.all_gather_matmul(x, [w], comm, algorithm="fused"),
                     lambda: ops.matmul_reduce_scatter(x, w, comm, algorithm="fused"),
                     lambda: ops.matmul_all_reduce(x, w, comm, algorithm="fused")):  # fmt: skip
            with pytest.raises(UnsupportedError, match=why):
                call()

    run_ranks(rank, 2, backend="local")


def test_ranks_with_other_rows_are_told_of_their_shapes():
    def rank(comm):
        x = torch.ones(4 + comm.get_rank(), 5)
        with pytest.raises(
            Error, match=r"expected the same number of rows on all ranks.*Pass equal shapes on all ranks"
        ):
            ops.all_gather_matmul(x, [torch.ones(3, 5)], comm, algorithm="p2p")

    run_ranks(rank, 2, backend="local")


@pytest.mark.parametrize("algorithm", ["p2p", "low_latency"])
def test_what_needs_shared_memory_says_why_it_cannot_run(algorithm):

    def rank(comm):
        for dtype, why in (
            (None, "the communicator has no peers"),
            (torch.int32, "products of torch.int32 are torch's"),
        ):
            x, w = torch.ones(4, 5, dtype=dtype), torch.ones(4, 5, dtype=dtype)
            with pytest.raises(UnsupportedError, match=f"what algorithm '{algorithm}' needs, got: {why}"):
                ops.all_gather_matmul(x, [w], comm, algorithm=algorithm)
            with pytest.raises(UnsupportedError, match=f"what algorithm '{algorithm}' needs, got: {why}"):
                ops.matmul_reduce_scatter(x, w, comm, algorithm=algorithm)
            with pytest.raises(UnsupportedError, match=f"what algorithm '{algorithm}' needs, got: {why}"):
                ops.matmul_all_reduce(x, w, comm, algorithm=algorithm)

    run_ranks(rank, 2, backend="fake")


def gathered_by_some(comm, algorithm, number, users, create_graph):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number)
    xs = [data(4, 5) for _ in range(size)]
    weights = [data(3 + r, 5) for r in range(size)]
    grads = [data(4 * size, 3 + r) for r in range(size)]
    x, w = leaf(xs[me]), leaf(weights[me])
    (out,), gathered = ops.all_gather_matmul(x, [w], comm, return_gathered=True, algorithm=algorithm)
    loss = (out * grads[me]).sum() + (gathered.square().sum() if me in users else 0)
    of_x, of_w = torch.autograd.grad(loss, [x, w], create_graph=create_graph)
    whole = torch.cat(xs)
    total = sum(g @ w for g, w in zip(grads, weights, strict=True)) + 2 * len(users) * whole
    check(of_x.detach(), total.chunk(size)[me])
    check(of_w.detach(), grads[me].t() @ whole)


def gathered_alone(comm, algorithm, number, dtype):
    me, size, data = comm.get_rank(), comm.get_size(), Data(number)
    xs, grads = [data(4, 5) for _ in range(size)], [data(4 * size, 5) for _ in range(size)]
    x, w = leaf(xs[me].to(dtype)), leaf(data(3, 5).to(dtype))
    _, gathered = ops.all_gather_matmul(x, [w], comm, return_gathered=True, algorithm=algorithm)
    (gathered * grads[me].to(dtype)).sum().backward()
    near = {} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(x.grad.double(), sum(grads).double().chunk(size)[me], **near)
    assert w.grad is None


@pytest.mark.parametrize("algorithm", FORCED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_gathered_x_alone_is_used(algorithm, dtype, seed):
    on_ranks(gathered_alone, 2, algorithm, seed, dtype)


@pytest.mark.parametrize("algorithm", FORCED)
@pytest.mark.parametrize("users", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("create_graph", [False, True])
def test_some_ranks_use_the_gathered_x(algorithm, users, create_graph, seed):
    """Each rank also has another number of features: local values do not select another algorithm."""
    on_ranks(gathered_by_some, 2, algorithm, seed, users, create_graph)


@pytest.mark.parametrize("algorithm", FORCED)
def test_eight_ranks(algorithm, seed):
    """A whole host."""
    test_all_gather_matmul(8, algorithm, (2, 3, 5), 1, torch.bfloat16, seed)
    test_gradients_of_all_gather_matmul(8, algorithm, (3, 5), 0, False, seed)
    test_matmul_reduce_scatter(8, algorithm, (2, 16, 5), 1, torch.bfloat16, "avg", seed)
    test_matmul_all_reduce(8, algorithm, (9, 5), "sum", seed)
