"""The fused Hopper kernels of `algorithm="fused"`: odd shapes, every layout of the weight, graphs, late ranks."""

import random
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from graph_nodes import nodes_of
from test_low_latency import differ, replay_two_at_once
from timeout_cases import expired, run_until_an_error

import torch_overlap as to
from torch_overlap import _C, _tuning, ops

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="the kernels are for sm_90"
    ),
]

# Rows of a rank, input and output features of a layer. Tiles are 128 or 256 rows and 128 to 256 columns, stages of k
# 64.
SHAPES = [(1, 8, 8), (24, 64, 136), (128, 256, 256), (200, 72, 1000), (257, 1096, 520), (512, 2048, 1024)]
FULL = [(4096, 4096, 7168), (1024, 4096, 2048)]
LARGE = (2048, 264, 4160)  # rows of a reduce-scatter are sent in pieces, by copy engines
PIECES = (4200, 72, 2056)  # the second piece is the smaller one
WIDE = (500, 264, 7112)  # the gather uses tiles of 128 x 224; the last ones are partial in both dimensions


def everybodys(comm, own):
    return [t.double() for t in comm_gather(comm, own)]


def comm_gather(comm, own):
    own = own.contiguous()
    out = [torch.empty_like(own) for _ in range(comm.get_size())]
    comm.all_gather(out, own, False)
    return out


def close(got, want, k):
    """Products are rounded once, partial sums of other ranks once more."""
    step = torch.finfo(got.dtype).eps
    bound = 2 * step * want.abs() + 2 * step * k**0.5 + 1e-4
    assert torch.isfinite(got).all()
    worst = ((got.double() - want).abs() / bound).max().item() if got.numel() else 0
    assert worst <= 1, f"{worst} times the bound"


class Gather:
    """An all-gather with two products: copy engines bring the rows."""

    def __init__(self, comm, rows, features_in, features_out, dtype, transposed=False, bias=True):
        self.comm, self.k = comm, features_in
        self.x = torch.empty(rows, features_in, dtype=dtype, device="cuda")
        second = max(8, features_out // 16 * 8)
        self.weights = [torch.empty(n, features_in, dtype=dtype, device="cuda") for n in (features_out, second)]
        if transposed:
            self.weights = [w.t().contiguous().t() for w in self.weights]
        self.bias = torch.empty(features_out, dtype=dtype, device="cuda") if bias else None
        self.fill()

    def fill(self):
        for t in [self.x, *self.weights] + ([self.bias] if self.bias is not None else []):
            t.normal_()

    def run(self):
        biases = [self.bias, None][: len(self.weights)] if self.bias is not None else []
        outs, whole = ops.all_gather_matmul(
            self.x, self.weights, self.comm, biases, return_gathered=True, algorithm="fused"
        )
        return [*outs, whole]

    def check(self, outs):
        x = torch.cat(everybodys(self.comm, self.x))
        bias = self.bias.double() if self.bias is not None else None
        *products, whole = outs
        for product, weight, added in zip(products, self.weights, [bias, None], strict=False):
            close(product, F.linear(x, weight.double(), added), self.k)
        assert torch.equal(whole, torch.cat(comm_gather(self.comm, self.x)))


class GatherOfOne(Gather):
    """An all-gather with one product: its kernel brings the rows itself if they are few."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.weights = self.weights[:1]


class Scatter:
    def __init__(self, comm, rows, features_in, features_out, dtype, transposed=False, bias=True, op="sum"):
        self.comm, self.k, self.op = comm, features_in * comm.get_size(), op
        self.x = torch.empty(rows * comm.get_size(), features_in, dtype=dtype, device="cuda")
        self.weight = torch.empty(features_out, features_in, dtype=dtype, device="cuda")
        if transposed:
            self.weight = self.weight.t().contiguous().t()
        self.bias = torch.empty(features_out, dtype=dtype, device="cuda") if bias else None
        self.fill()

    def fill(self):
        for t in [self.x, self.weight] + ([self.bias] if self.bias is not None else []):
            t.normal_()

    def run(self):
        return [ops.matmul_reduce_scatter(self.x, self.weight, self.comm, self.bias, op=self.op, algorithm="fused")]

    def check(self, outs):
        xs, ws = everybodys(self.comm, self.x), everybodys(self.comm, self.weight)
        rank, size = self.comm.get_rank(), self.comm.get_size()
        total = sum(x.chunk(size)[rank] @ w.t() for x, w in zip(xs, ws, strict=True))
        if self.op == "avg":
            total /= size
        close(outs[0], total + (self.bias.double() if self.bias is not None else 0), self.k)


class AllReduce(Scatter):
    """The fused product and reduce-scatter in blocks of rows; each block is gathered during the next one's kernel."""

    def run(self):
        return [ops.matmul_all_reduce(self.x, self.weight, self.comm, self.bias, op=self.op, algorithm="fused")]

    def check(self, outs):
        xs, ws = everybodys(self.comm, self.x), everybodys(self.comm, self.weight)
        total = sum(x @ w.t() for x, w in zip(xs, ws, strict=True))
        if self.op == "avg":
            total /= self.comm.get_size()
        close(outs[0], total + (self.bias.double() if self.bias is not None else 0), self.k)


KINDS = [Gather, GatherOfOne, Scatter, AllReduce]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("transposed", [False, True], ids=["along_k", "along_n"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, LARGE, WIDE, PIECES], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_values(comm, kind, shape, dtype, transposed, bias):
    case = kind(comm, *shape, dtype, transposed, bias)
    for _ in range(3):
        case.fill()
        case.check(case.run())


def gather_tiles(case):
    """Returns the tiles in the names of the kernels of a captured call."""
    kernels, _ = nodes_of(case.run)
    names = [kernel.name for kernel in kernels if "fused_gather_kernel" in kernel.name]
    return [tuple(map(int, re.search(r"Li(\d+)ELi(\d+)E", name).groups())) for name in names]


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        (WIDE, (128, 224)),
        ((4096, 264, 2048), (128, 256)),
        ((4096, 512, 6336), (128, 192)),
        ((1024, 4096, 512), (128, 128)),
    ],
    ids=str,
)
@pytest.mark.parametrize("transposed", [False, True], ids=["along_k", "along_n"])
def test_tiles_of_the_gather(comm, shape, tile, transposed):
    case = Gather(comm, *shape, torch.bfloat16, transposed, bias=False)
    case.run()  # memory is shared before the capture
    assert gather_tiles(case)[0] == tile


@pytest.mark.parametrize("shape", FULL, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_full_shapes(comm, kind, shape):
    case = kind(comm, *shape, torch.bfloat16)
    case.check(case.run())


@pytest.mark.parametrize("kind", [Scatter, AllReduce], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("shape", [(200, 136, 264), LARGE, PIECES], ids=str)
def test_a_mean(comm, shape, kind):
    case = kind(comm, *shape, torch.bfloat16, op="avg")
    case.check(case.run())


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize(("rows", "columns"), [(129, 65536), (4200, 2056)])
def test_ranks_with_fewer_rows_in_pieces(comm, op, rows, columns):
    """The last rank's rows end within a tile; with 129 rows only the first piece contains any of them."""
    size = comm.get_size()
    columns = min(columns, (32 << 20) // (rows * size) // 8 * 8)  # one block of rows
    x = torch.randn(rows * size - size + 1, 64, device="cuda").bfloat16()
    w, bias = torch.randn(columns, 64, device="cuda").bfloat16(), torch.randn(columns, device="cuda").bfloat16()
    got = ops.matmul_all_reduce(x, w, comm, bias, op=op, algorithm="fused")
    xs, ws = everybodys(comm, x), everybodys(comm, w)
    want = sum(a @ b.t() for a, b in zip(xs, ws, strict=True)) / (size if op == "avg" else 1)
    close(got, want + bias.double(), 64 * size)


@pytest.mark.parametrize("shape", [(300, 520, 1032), LARGE, PIECES], ids=str)
def test_the_same_bits_every_time(comm, shape):
    for kind in KINDS:
        case = kind(comm, *shape, torch.bfloat16)
        first = [t.clone() for t in case.run()]
        for _ in range(5):
            for got, want in zip(case.run(), first, strict=True):
                assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(150, 520, 264), LARGE], ids=str)
def test_operands_that_tensor_copies_cannot_read(comm, shape):
    """Misaligned rows, and columns, are copied first, on the rank that has them."""
    case = Scatter(comm, *shape, torch.bfloat16)
    rows, k = case.x.shape
    if comm.get_rank() == 0:
        case.x = torch.randn(rows, k + 3, device="cuda").bfloat16()[:, 3:]
    if comm.get_rank() == 1:
        case.x = torch.randn(k, rows, device="cuda").bfloat16().t()
    case.check(case.run())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_gradients(comm, kind):
    case = kind(comm, 136, 264, 520, torch.bfloat16)
    gathers = isinstance(case, Gather)
    leaves = [case.x, *(case.weights if gathers else [case.weight])]
    results = {}
    for algorithm in ("fused", "sequential"):
        inputs = [t.detach().clone().requires_grad_() for t in leaves]
        if gathers:
            outs, _ = ops.all_gather_matmul(inputs[0], inputs[1:], comm, algorithm=algorithm)
        else:
            reduce = ops.matmul_reduce_scatter if kind is Scatter else ops.matmul_all_reduce
            outs = [reduce(inputs[0], inputs[1], comm, algorithm=algorithm)]
        torch.manual_seed(comm.get_rank())
        results[algorithm] = torch.autograd.grad(outs, inputs, [torch.randn_like(o) for o in outs])
    for got, want in zip(results["fused"], results["sequential"], strict=True):
        torch.testing.assert_close(got, want, rtol=3e-2, atol=0.5)


def test_gradients_where_ranks_have_more_features(comm):
    """The tiles that ranks send each other are the same, for any k."""
    # The gradient of x is smaller than 16 MiB, and k by itself would select different tiles.
    rows, features = (1024, 2048) if comm.get_size() == 2 else (512, 3840)
    x, w = (torch.randn(n, 4096, device="cuda").bfloat16() for n in (rows, features + 64 * (comm.get_rank() % 2)))
    grad = torch.randn(rows * comm.get_size(), w.shape[0], device="cuda").bfloat16()
    results = {}
    for algorithm in ("fused", "sequential"):
        inputs = [t.clone().requires_grad_() for t in (x, w)]
        outs, _ = ops.all_gather_matmul(inputs[0], inputs[1:], comm, algorithm=algorithm)
        results[algorithm] = [*outs, *torch.autograd.grad(outs, inputs, [grad])]
    for got, want in zip(results["fused"], results["sequential"], strict=True):
        torch.testing.assert_close(got, want, rtol=3e-2, atol=2.0)


def gradients_of_gathered(comm, inputs, grad, algorithm, is_user):
    x, w = (t.clone().requires_grad_() for t in inputs)
    (out,), gathered = ops.all_gather_matmul(x, [w], comm, return_gathered=True, algorithm=algorithm)
    loss = (out * grad).sum() + (gathered.sum() if is_user else 0)
    return torch.autograd.grad(loss, [x, w])


@pytest.mark.parametrize("is_used", [False, True])
def test_a_gathered_x_that_is_used(comm, is_used):
    """The gradient of the gathered x is multiplied by an identity."""
    inputs = [torch.randn(n, 512, device="cuda").bfloat16() for n in (256, 264)]
    grad = torch.randn(256 * comm.get_size(), 264, device="cuda").bfloat16()
    got, want = (gradients_of_gathered(comm, inputs, grad, way, is_used) for way in ("fused", "sequential"))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=0.5)


@pytest.mark.parametrize("algorithm", ["fused", "auto"])
def test_a_gathered_x_that_one_rank_uses(comm, algorithm):
    """All ranks use the fused kernel; that of the rank that uses it has a longer k."""
    inputs = [torch.randn(n, 512, device="cuda").bfloat16() for n in (256, 264)]
    grad = torch.randn(256 * comm.get_size(), 264, device="cuda").bfloat16()
    is_user = comm.get_rank() == 0
    got, want = (gradients_of_gathered(comm, inputs, grad, way, is_user) for way in (algorithm, "sequential"))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=0.5)


def test_what_it_cannot_do_is_an_error(comm):
    x, w = torch.randn(128, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    with pytest.raises(to.UnsupportedError, match="bfloat16 or float16"):
        ops.all_gather_matmul(x, [w], comm, algorithm="fused")
    with pytest.raises(to.UnsupportedError, match="k that is a multiple of 8"):
        ops.matmul_reduce_scatter(x[:, :12].bfloat16(), w[:, :12].bfloat16(), comm, algorithm="fused")
    with pytest.raises(to.UnsupportedError, match="bfloat16 or float16"):
        ops.matmul_all_reduce(x, w, comm, algorithm="fused")
    none, half = x[:0].bfloat16(), w.bfloat16()
    for op, weight in (
        (ops.all_gather_matmul, [half]),
        (ops.matmul_reduce_scatter, half),
        (ops.matmul_all_reduce, half),
    ):
        with pytest.raises(to.UnsupportedError, match="there is nothing to compute"):
            op(none, weight, comm, algorithm="fused")
    with pytest.raises(to.InvalidValueError, match="one of auto sequential pipelined bulk, got 'fused'"):
        ops.bulk_overlap_matmul(x, w, x, comm, collective="all_gather", algorithm="fused")
    assert to.explain("matmul_all_reduce", x.bfloat16(), w.bfloat16(), comm, algorithm="fused").algorithm == "fused"
    assert to.explain("all_gather_matmul", x.bfloat16(), [w.bfloat16()], comm, algorithm="fused").algorithm == "fused"


def capture(run):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    return graph, outs


def poison(case, run):
    """Runs `run` on NaN operands, and so leaves NaN in the memory that receives operands of other ranks or the next
    results."""
    travelling = [getattr(case, name) for name in ("x", "of_x") if hasattr(case, name)]
    kept = [t.clone() for t in travelling]
    for t in travelling:
        t.view(torch.uint8).fill_(0xFF)  # NaN in all types
    run()
    for t, value in zip(travelling, kept, strict=True):
        t.copy_(value)


def soak(step, wrong):
    """Replays `step` 10,000 times; it adds the number of wrong elements to `wrong`."""
    graph, _ = capture(step)
    wrong.zero_()
    for _ in range(10_000):
        graph.replay()
    torch.cuda.synchronize()
    assert wrong.item() == 0


def replay(comm, seed, cases):
    """Replays graphs with changing inputs, a late rank, and eager calls in between; all written memory holds NaN
    before each one."""
    choice = random.Random(seed)  # equal on all ranks
    for case in cases:
        case.fill()
    graphs = [capture(case.run) for case in cases]
    for _ in range(300):  # about 210 of them replay
        i = choice.randrange(len(cases))
        late, eager = choice.randrange(comm.get_size()), choice.random() < 0.3
        cycles = choice.randrange(2, 20) * 1_000_000  # 1 to 10 ms
        case, (graph, outs) = cases[i], graphs[i]
        case.fill()
        if comm.get_rank() == late:
            torch.cuda._sleep(cycles)
        poison(case, case.run if eager else graph.replay)
        if eager:
            case.check(case.run())
            continue
        for out in outs:
            out.view(torch.uint8).fill_(0xFF)
        graph.replay()
        case.check(outs)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_replays_with_changing_inputs_late_ranks_and_eager_calls(comm, seed, kind):
    shapes = [(200, 264, 520), (512, 1024, 1032), LARGE, WIDE, PIECES]
    replay(comm, seed, [kind(comm, *shape, torch.bfloat16) for shape in shapes])


@pytest.mark.parametrize("algorithm", ["fused", "p2p"])
def test_blocks_of_rows_in_graphs_with_late_ranks(comm, algorithm):
    """A block is gathered while the next one's kernel waits for other ranks."""
    size, rank = comm.get_size(), comm.get_rank()
    x, w = (torch.empty(n, 128, dtype=torch.bfloat16, device="cuda") for n in (8192, 6144))  # three blocks

    def run():
        return ops.matmul_all_reduce(x, w, comm, algorithm=algorithm)

    graph, out = capture(run)
    for turn in range(40):
        for t in (x, w):
            t.random_(-2, 3)  # sums are exact
        out.fill_(float("nan"))
        if rank == turn % size:
            torch.cuda._sleep(2_000_000 * (1 + turn % 5))
        graph.replay()
        want = x.float() @ w.float().t()
        comm.all_reduce(want, to.ReduceOp.SUM, async_op=False)
        assert torch.equal(out, want.bfloat16())
        if turn % 4 == 0:
            assert torch.equal(run(), want.bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [*((kind, (192, 328, 520)) for kind in KINDS), (Scatter, WIDE), (Scatter, PIECES)],
    ids=[*(kind.__name__ for kind in KINDS), "Scatter of many tiles", "Scatter in pieces"],
)
def test_ten_thousand_replays(comm, kind, shape, dtype):
    """No rank is delayed. Within the graph, inputs are made, the memory that the operator writes is poisoned, and
    results are compared with those of the copy engines' algorithm."""
    case = kind(comm, *shape, dtype)

    def gathered():
        biases = [case.bias, None][: len(case.weights)]
        return ops.all_gather_matmul(case.x, case.weights, comm, biases, algorithm="p2p")[0][0]

    p2p = {
        Gather: gathered,
        GatherOfOne: gathered,
        Scatter: lambda: ops.matmul_reduce_scatter(case.x, case.weight, comm, case.bias, algorithm="p2p"),
        AllReduce: lambda: ops.matmul_all_reduce(case.x, case.weight, comm, case.bias, algorithm="p2p"),
    }[kind]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def step():
        case.x.mul_(1.7).add_(0.3).cos_()
        poison(case, case.run)
        got, want = case.run()[0].float(), p2p().float()
        wrong.add_((~((got - want).abs() <= 0.02 * want.abs() + 0.15)).sum())

    soak(step, wrong)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [*((kind, (128, 256, 256)) for kind in KINDS), (Scatter, LARGE)],
    ids=[*(kind.__name__ for kind in KINDS), "Scatter in pieces"],
)
def test_a_rank_that_stays_away(comm, make_comm, kind, shape, mode):
    lonely = make_comm(f"fused_away_{kind.__name__}_{shape[0]}_{mode}", timeout=timedelta(seconds=2))
    case = kind(lonely, *shape, torch.bfloat16)
    case.check(case.run())
    graph, _ = capture(case.run)
    graph.replay()
    torch.cuda.synchronize()
    comm.barrier(async_op=False)
    torch.cuda.synchronize()
    last = comm.get_size() - 1
    if comm.get_rank() == last:
        time.sleep(6)
    else:
        begin = time.monotonic()
        (graph.replay if mode == "graph" else case.run)()
        torch.cuda.synchronize()
        assert 1.8 < time.monotonic() - begin < 10
        with pytest.raises(to.Error, match=expired(comm, last, "begin")):
            run_until_an_error(case.run)
    graph.reset()


WHOLE = pytest.mark.parametrize("kind", [GatherOfOne, Scatter], ids=lambda kind: kind.__name__)  # operations


@WHOLE
def test_rows_that_differ(comm, make_comm, kind):
    other = make_comm(f"fused_rows_{kind.__name__}", timeout=timedelta(seconds=60))
    kind(other, 128, 264, 520, torch.bfloat16).run()  # allocates the memory
    rows = 64 if other.get_rank() == other.get_size() - 1 else 128
    differ(kind(other, rows, 264, 520, torch.bfloat16))


def test_a_rank_that_gathers_another_way(comm, make_comm):
    other = make_comm("fused_ways", timeout=timedelta(seconds=60))
    case = GatherOfOne(other, 128, 264, 520, torch.bfloat16)
    case.run()
    way = "p2p" if other.get_rank() == 0 else "fused"
    torch.cuda.synchronize()

    def gather():
        ops.all_gather_matmul(case.x, case.weights, other, algorithm=way)
        torch.cuda.synchronize()

    with pytest.raises(to.Error, match=r"expected the same operator and algorithm on all ranks|has given up"):
        run_until_an_error(gather)
    other.abort()


def test_ranks_whose_tiles_differ(comm, make_comm):
    """A k that differs by rank is an error, which is detected if it leads to other tiles: the signatures then
    differ."""
    if comm.get_size() != 4:
        pytest.skip("sizes at which four ranks choose different tiles")
    other = make_comm("fused_tiles", timeout=timedelta(seconds=60))
    k = 3072 if other.get_rank() == 0 else 4608
    x, w = (torch.randn(n, k, device="cuda").bfloat16() for n in (2048, 4096))
    ops.matmul_reduce_scatter(x[:, :3072].contiguous(), w[:, :3072].contiguous(), other, algorithm="fused")
    torch.cuda.synchronize()

    def scatter():
        ops.matmul_reduce_scatter(x, w, other, algorithm="fused")
        torch.cuda.synchronize()

    with pytest.raises(to.Error, match=r"expected the same operator and algorithm on all ranks|has given up"):
        run_until_an_error(scatter)
    other.abort()


@WHOLE
@pytest.mark.parametrize("alone", [0, -1], ids=["first", "last"])
def test_two_replays_at_once(comm, make_comm, kind, alone):
    other = make_comm(f"fused_apart_{kind.__name__}_{alone}", timeout=timedelta(seconds=60))
    replay_two_at_once(comm, kind(other, 128, 264, 520, torch.bfloat16), alone)


@pytest.mark.parametrize(("rows", "k", "algorithm"), [(256, 128, "fused"), (255, 128, "sequential"), (256, 129, None)])
def test_what_nobody_measured(comm, seed, rows, k, algorithm):
    """By rule these kernels are selected if they support the problem and it has enough rows: of a rank, or of one of
    the four pieces of matmul_all_reduce."""
    torch.manual_seed(seed + comm.get_rank())
    size = comm.get_size()
    x, whole, pieces, w = (torch.randn(n, k, device="cuda").half() for n in (rows, rows * size, 4 * rows, 264))
    calls = {
        "all_gather_matmul": ((x, [w], comm), lambda: ops.all_gather_matmul(x, [w], comm)[0][0]),
        "matmul_reduce_scatter": ((whole, w, comm), lambda: ops.matmul_reduce_scatter(whole, w, comm)),
        "matmul_all_reduce": ((pieces, w, comm), lambda: ops.matmul_all_reduce(pieces, w, comm)),
    }

    def summed(x):
        return sum(a @ b.t() for a, b in zip(everybodys(comm, x), everybodys(comm, w), strict=True))

    want = {
        "all_gather_matmul": torch.cat(everybodys(comm, x)) @ w.double().t(),
        "matmul_reduce_scatter": summed(whole)[comm.get_rank() * rows :][:rows],
        "matmul_all_reduce": summed(pieces),
    }
    _C._set_tuning("table", {})
    try:
        for op, (arguments, call) in calls.items():
            got = call()
            found = to.explain(op, *arguments)
            assert found.decided_by == "rule"
            other = "pipelined" if op == "matmul_all_reduce" else "p2p"
            assert found.algorithm == (algorithm or other), found
            close(got, want[op], k * size)
    finally:
        _tuning.load()
