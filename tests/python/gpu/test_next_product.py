"""The product that follows all_reduce_rms_norm: its kernel loads the weight while the norm waits for the ranks."""

import random
import re
import time
from datetime import timedelta

import pytest
import torch
from norm_cases import EPS, Problem, draw, last_rank_stays_away
from small_cases import Poison

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.quantize import ScalingMode

pytestmark = pytest.mark.gpu(2)
MODES = ["auto", "ll", "ll128", "simple", "off"]
# Rows, their length and features: one, two and four blocks of a cluster along k, also with uneven parts; one to four
# tiles of a block; tiles and stages that end early; the most rows; and what other kernels multiply: more rows, features
# that are no multiple of 8, nothing.
SHAPES = [(1, 4096, 3072), (7, 1000, 200), (16, 4096, 14336), (17, 2048, 64), (32, 8192, 1536), (3, 64, 8),
          (32, 512, 40), (5, 200, 72), (33, 4096, 3072), (2, 1024, 7), (0, 128, 64), (4, 128, 0), (1, 16384, 4096),
          (8, 264, 9000), (16, 128, 30000), (32, 1024, 17408),
          (9, 1088, 640), (20, 1344, 128), (48, 4096, 1040), (64, 2048, 14336), (65, 512, 512)]  # fmt: skip
FAST_SUMS = 2.0**-10  # of 8-bit floats: Hopper keeps about 14 bits of partial sums
SCALINGS = [ScalingMode.DELAYED_TENSOR_SCALING, ScalingMode.ROW_SCALING]  # of which the norm's kernel quantizes rows


@pytest.fixture(scope="module")
def by_mode(make_comm):
    return {mode: make_comm(f"next_{mode}", hints={"custom_collectives": mode}) for mode in MODES}


def check_product(out, rows, weight):
    """Compares with the product of the rows in fp64. Sums are in fp32; cuBLAS may round parts of them to 16 bits."""
    exact = rows.double() @ weight.double().t()
    size = exact.abs() + exact.square().mean().sqrt() if exact.numel() else exact
    is_ours = out.dtype != torch.float32 and len(rows) <= 32 and weight.size(0) % 8 == 0 and weight.is_contiguous()
    tolerance = torch.finfo(out.dtype).eps * (1 if is_ours else 2)
    assert out.shape == exact.shape
    assert ((out.double() - exact).abs() <= tolerance * size + 1e-5 * size).all()


class NextProblem(Problem):
    """A norm, with its product by a weight of this rank. With a scaling both are 8-bit floats."""

    def __init__(self, comm, seed, shape, dtype, scaling=None):
        rows, length, features = shape
        super().__init__(comm, seed, (rows, length), dtype)
        self.generator = torch.Generator("cuda").manual_seed(seed + 1 + comm.get_rank())
        self.scaling, self.shape = scaling, (features, length)
        self.scale = torch.full((1,), 23.0, device="cuda") if scaling == SCALINGS[0] else None
        self.next, self.next_scale_inv = self.draw_next()

    def draw_next(self):
        """Returns a weight, and its scales."""
        weight = draw(self.generator, *self.shape, dtype=self.dtype)
        return (weight, None) if self.scaling is None else ops.quantize(weight, self.scaling)[:2]

    def call(self, next_weight=None, next_weight_scale_inv=None):
        operands = (self.x, self.residual, self.weight, self.comm, self.bias)
        if self.scaling is None:
            return ops.all_reduce_rms_norm(*operands, eps=EPS, next_weight=next_weight)
        return ops.all_reduce_rms_norm_quantize(
            *operands, scaling_mode=self.scaling, scale=self.scale, eps=EPS, next_weight=next_weight,
            next_weight_scale_inv=next_weight_scale_inv,
        )  # fmt: skip

    def run_next(self):
        return self.call(self.next, self.next_scale_inv)

    def check_next(self, results):
        rows, *others = self.call()
        for got, wanted in zip(results[1:], others, strict=True):
            assert torch.equal(got, wanted)
        if self.scaling is None:
            self.check((rows, *others))
            check_product(results[0], rows, self.next)
        else:
            values = ops.dequantize(rows, others[0], self.scaling, torch.float32)
            weight = ops.dequantize(self.next, self.next_scale_inv, self.scaling, torch.float32)
            check_scaled_product(results[0], values, weight)


def check_scaled_product(out, rows, weight):
    rows, weight = rows.double(), weight.double()
    exact, size = rows @ weight.t(), rows.abs() @ weight.abs().t()
    assert out.shape == exact.shape
    assert ((out.double() - exact).abs() <= torch.finfo(out.dtype).eps * exact.abs() + FAST_SUMS * size).all()


def bits(t):
    return t.view(torch.uint8) if t.element_size() == 1 else t


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_shape(by_mode, seed, dtype, mode):
    for i, shape in enumerate(SHAPES):
        problem = NextProblem(by_mode[mode], seed + i, shape, dtype)
        problem.check_next(problem.run_next())


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("mode", ["auto", "ll", "ll128", "off"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_shape_of_8_bits(by_mode, seed, dtype, mode, scaling):
    for i, shape in enumerate(SHAPES):
        if shape[1] % 16 == 0 and shape[2] % 8 == 0:
            problem = NextProblem(by_mode[mode], seed + i, shape, dtype, scaling)
            problem.check_next(problem.run_next())


@pytest.mark.parametrize("offset", [1, 4])
def test_weights_that_tensor_copies_do_not_take(by_mode, seed, offset):
    problem = NextProblem(by_mode["auto"], seed, (8, 1024, 256), torch.bfloat16)
    whole = torch.empty(problem.next.numel() + offset, dtype=torch.bfloat16, device="cuda")
    problem.next = whole[offset:].view(problem.next.shape).copy_(problem.next)
    problem.check_next(problem.run_next())
    problem.next = problem.next.t().contiguous().t()  # [in, out] in memory
    problem.check_next(problem.run_next())
    problem.next = torch.empty(256, 1024 + offset, dtype=torch.bfloat16, device="cuda")[:, :1024].normal_()
    problem.check_next(problem.run_next())


@pytest.mark.parametrize("scaling", [None, *SCALINGS], ids=str)
@pytest.mark.parametrize("mode", ["ll", "ll128", "simple", "off"])
@pytest.mark.parametrize("shape", [(1, 4096, 3072), (32, 4096, 14336), (16, 8192, 1024), (48, 4096, 3072)])
def test_a_weight_that_is_written_right_before(by_mode, seed, mode, shape, scaling):
    """In a graph whose kernels before the norm write the weight and its scales: nothing old may be loaded. One rank is
    late."""
    problem = NextProblem(by_mode[mode], seed, shape, torch.bfloat16, scaling)
    targets = [bits(t) for t in (problem.next, problem.next_scale_inv) if t is not None]
    sources = [t.clone() for t in targets]
    problem.run_next()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for source, target in zip(sources, targets, strict=True):
            torch.add(source, 0, out=target)
        results = problem.run_next()
    for replay in range(6):
        for source, target, new in zip(sources, targets, problem.draw_next(), strict=False):
            source.copy_(bits(new))
            target.fill_(255 if target.dtype == torch.uint8 else float("nan"))
        for t in results:
            bits(t).fill_(255 if t.element_size() == 1 else float("nan"))
        if problem.comm.get_rank() == replay % problem.comm.get_size():
            torch.cuda._sleep(3_000_000)
        graph.replay()
        problem.check_next(results)


@pytest.mark.parametrize("rows", [1, 20, 32, 33])
def test_both_products(comm, seed, rows):
    """With the product before, whose operands kernels right before it write, one of which lets it start early."""
    problem = NextProblem(comm, seed, (rows, 2048, 512), torch.bfloat16)
    size, rank = comm.get_size(), comm.get_rank()
    everyone = torch.Generator("cuda").manual_seed(seed)
    gates = [torch.empty(rows, 2 * 1024, dtype=torch.bfloat16, device="cuda") for _ in range(size)]
    sources = [torch.empty(2048, 1024, dtype=torch.bfloat16, device="cuda") for _ in range(size)]
    weight = torch.empty(2048, 1024, dtype=torch.bfloat16, device="cuda")

    def run():
        torch.mul(sources[rank], 1, out=weight)
        return ops.matmul_all_reduce_rms_norm(
            ops.swiglu(gates[rank]), weight, problem.residual, problem.weight, comm, problem.bias, eps=EPS,
            algorithm="sequential", next_weight=problem.next,
        )  # fmt: skip

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(5):
        for t in (*gates, *sources):
            t.copy_(draw(everyone, *t.shape, dtype=t.dtype))
        weight.fill_(float("nan"))
        graph.replay()
        weight.fill_(float("nan"))
        eager = run()
        assert torch.equal(captured[0], eager[0])
        assert torch.equal(captured[1], eager[1])
        terms = [ops.swiglu(gate).double() @ w.double().t() for gate, w in zip(gates, sources, strict=True)]
        exact = problem.residual.double() + problem.bias.double() + sum(terms)
        size = sum(t.abs() for t in terms) + exact.abs()  # each is rounded
        hidden = eager[1].double()
        assert ((hidden - exact).abs() <= 2**-8 * size + 1e-3 * exact.square().mean().sqrt()).all()
        normed = hidden * (hidden.square().mean(-1, keepdim=True) + EPS).rsqrt() * problem.weight.double()
        product = normed @ problem.next.double().t()
        assert ((eager[0].double() - product).abs() <= 0.01 * (product.abs() + product.square().mean().sqrt())).all()


def kernels_of(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    return " ".join(event.name for event in recorded.events())


def starts_early(call):
    """Returns, for each product of few rows, whether its kernel loads the weight early."""
    return [found == "true" for found in re.findall(r"SmallMGemmConfig<[^>]*, (true|false)>", kernels_of(call))]


def test_scales_that_are_not_read_in_place(by_mode, seed):
    """A copy of them would be a kernel behind the norm."""
    problem = NextProblem(by_mode["auto"], seed, (8, 4096, 3072), torch.bfloat16, ScalingMode.ROW_SCALING)
    table = torch.randn(3072, 4, device="cuda")
    table[:, 1:2] = problem.next_scale_inv
    for scales in (table[:, 1:2], torch.cat([table[:1, :1], problem.next_scale_inv])[1:]):
        problem.next_scale_inv = scales
        problem.check_next(problem.run_next())
        assert starts_early(problem.run_next) == [False]


def test_the_kernel_that_starts_early(by_mode, seed):
    """It computes up to 32 rows behind a norm of one kernel, and both products of the operator that has two."""
    for mode, shape, expected in (("auto", (32, 4096, 3072), True), ("ll", (1, 1024, 20000), True),
                                  ("auto", (33, 4096, 3072), False), ("auto", (8, 1024, 7), False),
                                  ("off", (8, 1024, 512), False)):  # fmt: skip
        problem = NextProblem(by_mode[mode], seed, shape, torch.bfloat16)
        problem.run_next()
        assert starts_early(problem.run_next) == ([True] if expected else []), (mode, shape)
    for scaling in SCALINGS:
        for mode, rows, expected in (("auto", 1, [True]), ("auto", 48, [True]), ("off", 8, [False]), ("auto", 65, [])):
            problem = NextProblem(by_mode[mode], seed, (rows, 4096, 3072), torch.bfloat16, scaling)
            problem.run_next()
            assert starts_early(problem.run_next) == expected, (mode, rows)
    comm, problem = by_mode["auto"], NextProblem(by_mode["auto"], seed, (8, 2048, 512), torch.bfloat16)
    x, w = (draw(problem.generator, n, 256, dtype=torch.bfloat16) for n in (8, 2048))
    for algorithm in ("auto", "sequential"):
        found = starts_early(lambda algorithm=algorithm: ops.matmul_all_reduce_rms_norm(
            x, w, problem.residual, problem.weight, comm, algorithm=algorithm, next_weight=problem.next))  # fmt: skip
        assert found == [False, True], algorithm
    eight = NextProblem(comm, seed, (8, 2048, 512), torch.bfloat16, ScalingMode.ROW_SCALING)

    def run(**following):
        return ops.matmul_all_reduce_rms_norm_quantize(
            x, w, eight.residual, eight.weight, comm, scaling_mode=eight.scaling, algorithm="sequential", **following
        )

    following = {"next_weight": eight.next, "next_weight_scale_inv": eight.next_scale_inv}
    assert starts_early(lambda: run(**following)) == [False, True]
    (product, *others), (values, *wanted) = run(**following), run()
    rows = ops.dequantize(values, wanted[0], eight.scaling, torch.float32)
    check_scaled_product(product, rows, ops.dequantize(eight.next, eight.next_scale_inv, eight.scaling, torch.float32))
    assert ((others[1] - wanted[1]).abs() <= 0.02 * wanted[1].abs() + 0.02).all()


def test_two_communicators_at_the_same_time(make_comm, comm, seed):
    """Two streams, each with work before its norms, and with delays that differ between the ranks. In one order."""
    comms = [make_comm(f"next_at_once_{i}", timeout=timedelta(seconds=20)) for i in range(2)]
    problems = [NextProblem(c, seed + i, (16, 4096, 14336), torch.bfloat16) for i, c in enumerate(comms)]
    streams = [torch.cuda.Stream() for _ in comms]
    every = [draw(torch.Generator("cuda").manual_seed(seed + i), 512, 4096, dtype=torch.bfloat16) for i in range(2)]
    for problem in problems:
        problem.check_next(problem.run_next())
    torch.cuda.synchronize()
    choose = random.Random(seed + comm.get_rank())
    results = [None, None]
    for _ in range(200):
        for i, problem in enumerate(problems):
            with torch.cuda.stream(streams[i]):
                if choose.random() < 0.3:
                    torch.cuda._sleep(choose.randrange(2_000_000))
                for _ in range(3):
                    every[i] @ every[i].t()  # holds all SMs
                    problem.x.mul_(1)
                    results[i] = problem.run_next()
    torch.cuda.synchronize()
    for problem, result in zip(problems, results, strict=True):
        problem.check_next(result)


def test_beside_other_collectives(make_comm, comm, seed):
    """Another communicator's sums on another stream, in another order on each rank."""
    other = make_comm("next_beside", timeout=timedelta(seconds=20))
    problem = NextProblem(comm, seed, (32, 8192, 28672), torch.bfloat16)
    problem.check_next(problem.run_next())
    stream, rank, size = torch.cuda.Stream(), comm.get_rank(), comm.get_size()
    totals = torch.zeros(3, 1 << 20, device="cuda")
    torch.cuda.synchronize()
    choose = random.Random(seed + rank)

    def sums(step):
        with torch.cuda.stream(stream):
            for each, count in zip(totals, (3, 5000, 1 << 20), strict=True):
                each[:count].fill_(rank + step)
                other.all_reduce(each[:count], to.ReduceOp.SUM, async_op=False)

    def norms(_):
        for _ in range(3):
            problem.run_next()

    sums(0)  # the first call prepares memory with the other ranks
    torch.cuda.synchronize()
    for step in range(100):
        for call in choose.sample([sums, norms], 2):
            call(step)
            if choose.random() < 0.2:
                time.sleep(choose.uniform(0, 2e-3))
    torch.cuda.synchronize()
    for each, count in zip(totals, (3, 5000, 1 << 20), strict=True):
        assert (each[:count] == size * (size - 1) / 2 + 99 * size).all()
    problem.check_next(problem.run_next())


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "rows", "length", "features", "scaling"),
                         [("ll", 1, 4096, 3072, None), ("ll128", 32, 4096, 14336, None),
                          ("simple", 8, 8192, 1024, None), ("ll", 1, 4096, 3072, SCALINGS[0]),
                          ("ll128", 32, 4096, 14336, SCALINGS[1])])  # fmt: skip
def test_ten_thousand_replays(by_mode, seed, mode, rows, length, features, scaling):
    """Replays a graph with weights of small integers and slots that hold NaN, sometimes with a late rank."""
    comm = by_mode[mode]
    problem = NextProblem(comm, seed, (rows, length, features), torch.bfloat16, scaling)
    poison = Poison(comm)
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    at = torch.arange(features * length, device="cuda").view(features, length)
    scales = None if scaling is None else problem.next_scale_inv.clone()

    def once():
        step.add_(1).remainder_(61)
        problem.next.copy_((at * 7 + at // 13 + 5 * step) % 13 - 6)
        if scaling is not None:
            problem.next_scale_inv.copy_(scales * 2.0 ** (step % 3))
        poison()
        out, *_ = problem.run_next()
        rows, scale_inv, *_ = problem.call()
        weight = problem.next.float()
        if scaling is not None:
            rows, weight = rows.float() * scale_inv, weight * problem.next_scale_inv
        exact = rows.float() @ weight.t()
        allowed = (0.01 if scaling is None else 0.05) * (exact.abs() + exact.square().mean().sqrt())
        wrong.add_((~((out.float() - exact).abs() <= allowed)).sum())

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    choose = random.Random(seed)
    for i in range(10_000):
        late, is_late = choose.randrange(comm.get_size()), choose.random() < 0.01
        if is_late and comm.get_rank() == late:
            time.sleep(1e-3)
        graph.replay()
        if i % 1000 == 999:
            assert wrong.item() == 0, i


def test_a_rank_that_stays_away(comm, make_comm, seed):
    """The product behind a norm that gives up ends too, and the device continues."""
    lonely = make_comm("next_away", timeout=timedelta(seconds=2))
    problem = NextProblem(lonely, seed, (16, 4096, 14336), torch.bfloat16)
    problem.check_next(problem.run_next())
    last_rank_stays_away(comm, problem, problem.run_next)
