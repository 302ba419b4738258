"""all_reduce with a residual and an RMSNorm: in one kernel, by LL or Simple, and after other collectives."""

import random
import time
from datetime import timedelta

import pytest
import torch
from norm_cases import DTYPES, EPS, MODES, SHAPES, Problem, draw, last_rank_stays_away, same_everywhere
from small_cases import Poison

import torch_overlap as to
from torch_overlap import ops

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(scope="module")
def by_mode(make_comm):
    return {mode: make_comm(f"norm_{mode}", hints={"custom_collectives": mode}) for mode in MODES}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_shape(by_mode, seed, dtype, mode):
    for i, shape in enumerate(SHAPES):
        problem = Problem(by_mode[mode], seed + i, shape, dtype, has_bias=i % 2 == 0)
        results = problem.run()
        problem.check(results)
        same_everywhere(by_mode[mode], results)


@pytest.mark.parametrize("mode", ["auto", "ll", "ll128", "simple"])
def test_rounded_once(by_mode, seed, mode):
    """The sum stays in fp32 in the kernel until h is stored."""
    problem = Problem(by_mode[mode], seed, (16, 8192), torch.bfloat16)
    _, hidden = problem.run()
    total = problem.every[0].float()
    for x in problem.every[1:]:
        total += x.float()
    total = total + problem.residual.float() + problem.bias.float()
    assert torch.equal(hidden, total.bfloat16())


@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("mode", ["ll", "ll128", "simple", "off"])
def test_any_alignment_on_one_rank(by_mode, seed, mode, offset):
    comm = by_mode[mode]
    problem = Problem(comm, seed, (12, 1000), torch.bfloat16)
    if comm.get_rank() == 0:
        for name in ("x", "residual", "weight", "bias"):
            whole = torch.empty(getattr(problem, name).numel() + offset, dtype=torch.bfloat16, device="cuda")
            inside = whole[offset:].view(getattr(problem, name).shape)
            setattr(problem, name, inside.copy_(getattr(problem, name)))
    results = problem.run()
    problem.check(results)
    same_everywhere(comm, results)


def test_between_other_collectives(by_mode, seed):
    """On one channel: the next kernel uses the blocks and slots that the previous one left."""
    comm = by_mode["auto"]
    choose = random.Random(seed)
    size, rank = comm.get_size(), comm.get_rank()
    problems = [Problem(comm, seed + i, shape, torch.bfloat16) for i, shape in enumerate(SHAPES[:8])]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [problem.run() for problem in problems]
    for _ in range(60):
        kind = choose.choice(["norm", "sum", "gather", "replay"])
        count = choose.choice([3, 5000, 100_000, 1_000_000])
        if kind == "norm":
            problem = choose.choice(problems)
            problem.check(problem.run())
        elif kind == "replay":
            for t in torch.utils._pytree.tree_leaves(captured):
                t.fill_(float("nan"))
            graph.replay()
            for problem, results in zip(problems, captured, strict=True):
                problem.check(results)
        elif kind == "sum":
            x = torch.full((count,), rank + 1.0, device="cuda")
            comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
            assert (x == size * (size + 1) / 2).all()
        else:
            out = torch.empty(size, count, device="cuda")
            comm.all_gather_single(out, torch.full((count,), float(rank), device="cuda"), async_op=False)
            assert (out == torch.arange(size, device="cuda")[:, None]).all()


@pytest.mark.parametrize("mode", MODES)
def test_no_rows(by_mode, seed, mode):
    """Norms without elements, eager and captured, between norms with elements. Gradients are zeros."""
    shapes = [(0, 8), (16, 2048), (2, 0, 8192), (3, 0), (3, 127)]
    for dtype in DTYPES:
        problems = [Problem(by_mode[mode], seed + i, shape, dtype) for i, shape in enumerate(shapes)]
        for shape, problem in zip(shapes, problems, strict=True):
            results = problem.run()
            problem.check(results)
            assert all(t.shape == shape for t in results)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [problem.run() for problem in problems]
        for t in torch.utils._pytree.tree_leaves(captured):
            t.fill_(float("nan"))
        graph.replay()
        for problem, results in zip(problems, captured, strict=True):
            problem.check(results)
        empty = problems[0]
        leaves = [t.requires_grad_() for t in (empty.x, empty.residual, empty.weight, empty.bias)]
        results = empty.run()
        for leaf, gradient in zip(leaves, torch.autograd.grad(results, leaves, results), strict=True):
            assert torch.equal(gradient, torch.zeros_like(leaf))


def test_an_eager_call_keeps_nothing(by_mode, seed):
    problem = Problem(by_mode["auto"], seed, (512, 8192), torch.bfloat16)
    problem.run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        problem.run()
    assert torch.cuda.memory_allocated() <= before


class Product:
    """matmul_all_reduce_rms_norm with inputs that change."""

    def __init__(self, comm, seed, rows, algorithm="sequential", k=256, n=2048):
        self.comm, self.algorithm, size = comm, algorithm, comm.get_size()
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.every_x = [self.draw(rows, k) for _ in range(size)]
        self.every_w = [self.draw(n, k) for _ in range(size)]
        self.residual, self.gain, self.bias = self.draw(rows, n), self.draw(n), self.draw(n)

    def draw(self, *shape):
        return draw(self.generator, *shape, dtype=torch.bfloat16)

    def fill(self):
        for t in (*self.every_x, *self.every_w, self.residual, self.gain, self.bias):
            t.copy_(self.draw(*t.shape))

    def run(self):
        rank = self.comm.get_rank()
        return ops.matmul_all_reduce_rms_norm(
            self.every_x[rank], self.every_w[rank], self.residual, self.gain, self.comm, self.bias, eps=EPS,
            algorithm=self.algorithm,
        )  # fmt: skip

    def check(self, results):
        out, hidden = results
        exact = self.residual.double() + self.bias.double()
        for x, w in zip(self.every_x, self.every_w, strict=True):
            exact = exact + x.double() @ w.double().t()
        size = exact.square().mean().sqrt()
        wrong = ((hidden.double() - exact).abs() > 0.02 * (exact.abs() + size)).sum()
        wide = hidden.double()
        normed = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.gain.double()
        # Algorithms other than one kernel compute with 16 bits in between.
        wrong = wrong + ((out.double() - normed).abs() > 0.02 * normed.abs() + 1e-6).sum()
        self.comm.all_reduce(wrong, to.ReduceOp.SUM, async_op=False, hints={"custom_collectives": "off"})
        assert wrong.item() == 0


@pytest.mark.parametrize("algorithm", ["sequential", "pipelined", "p2p", "low_latency", "auto"])
@pytest.mark.parametrize("rows", [1, 16, 100, 1024])
def test_products_eager_and_captured(comm, seed, rows, algorithm):
    product = Product(comm, seed, rows, algorithm)
    for _ in range(2):
        product.fill()
        product.check(product.run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = product.run()
    for replay in range(4):
        product.fill()
        for t in results:
            t.fill_(float("nan"))
        if comm.get_rank() == replay % comm.get_size():
            torch.cuda._sleep(5_000_000)
        graph.replay()
        product.check(results)


class Replay:
    """Inputs of small integers, the operation and its comparison in one graph: sums are exact. once() runs the same
    eagerly."""

    def __init__(self, comm, rows, n, before=lambda: None):
        size, rank = comm.get_size(), comm.get_rank()
        self.step = torch.zeros((), dtype=torch.int64, device="cuda")
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        at = torch.arange(rows * n, device="cuda").view(rows, n)
        gain = torch.randn(n, device="cuda").bfloat16()
        comm.broadcast(gain, 0, async_op=False)

        def once():
            self.step.add_(1).remainder_(61)
            every = [((at * 7 + at // 13 + 3 * r + 5 * self.step) % 13 - 6).bfloat16() for r in range(size)]
            residual = ((at * 3 + self.step) % 11 - 5).bfloat16()
            before()
            out, hidden = ops.all_reduce_rms_norm(every[rank], residual, gain, comm, eps=EPS)
            want = torch.stack([residual, *every]).float().sum(0)
            normed = want * (want.square().mean(-1, keepdim=True) + EPS).rsqrt() * gain.float()
            self.wrong += (hidden.float() != want).sum()
            self.wrong += ((out.float() - normed).abs() > 0.01 * normed.abs()).sum()

        once()
        self.once = once
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            once()


SOAKS = pytest.mark.parametrize(
    ("mode", "rows", "n"),
    [("ll", 2, 8192), ("ll", 40, 4096), ("ll128", 16, 8192), ("ll128", 90, 4096), ("simple", 64, 8192),
     ("simple", 200, 2048)],
)  # fmt: skip


@pytest.mark.slow
@SOAKS
def test_ten_thousand_replays(by_mode, mode, rows, n):
    replay = Replay(by_mode[mode], rows, n)
    for i in range(10_000):
        replay.graph.replay()
        if i % 1000 == 999:
            assert replay.wrong.item() == 0, i


@pytest.mark.slow
@SOAKS
def test_two_hundred_replays_with_a_late_rank(by_mode, seed, mode, rows, n):
    """Also runs eager calls in between, all on slots that hold NaN."""
    comm = by_mode[mode]
    replay = Replay(comm, rows, n, before=Poison(comm))
    choose = random.Random(seed)
    for _ in range(200):
        late, delay = choose.randrange(comm.get_size()), choose.uniform(1e-3, 10e-3)
        if comm.get_rank() == late:
            time.sleep(delay)
        replay.once() if choose.random() < 0.2 else replay.graph.replay()
    assert replay.wrong.item() == 0


@pytest.mark.parametrize("mode", ["ll", "ll128", "simple"])
def test_a_rank_that_stays_away(comm, make_comm, seed, mode):
    """Blocks of a cluster give up together, and the device continues."""
    lonely = make_comm(f"norm_away_{mode}", timeout=timedelta(seconds=2), hints={"custom_collectives": mode})
    problem = Problem(lonely, seed, (40, 8192), torch.bfloat16)
    problem.check(problem.run())
    last_rank_stays_away(comm, problem, problem.run)


def test_the_recorder_and_hooks_name_it(by_mode, seed):
    comm = by_mode["auto"]
    seen = []
    hook = comm.register_pre_hook(lambda name, op_id, args: seen.append(name))
    Problem(comm, seed, (4, 64), torch.bfloat16).run()
    hook.remove()
    assert seen == [to.OpName.all_reduce_rms_norm]
