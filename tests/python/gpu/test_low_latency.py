"""Products by algorithm "low_latency", whose operands other ranks read or write in place: values of every path
through the kernels, eagerly and in graphs, in any order, with late ranks; the same bits on all ranks; errors."""

import random
import time
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from replays import replay_ten_thousand_times, replay_with_late_ranks
from timeout_cases import expired, run_until_an_error

import torch_overlap as to
from torch_overlap import ops

pytestmark = pytest.mark.gpu(2)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}
KINDS = ["gather", "scatter", "sum"]
# Rows of a rank, features, inner size: one shot and two shots, less than a block, parts that do not divide, and widths
# that no vector divides.
SHAPES = [(1, 8, 64), (3, 264, 72), (16, 2048, 128), (65, 1000, 64), (128, 4104, 64), (5, 7, 9)]


class Problem:
    """An operator, this rank's inputs, and its result from the inputs of all ranks, in fp64."""

    def __init__(self, comm, kind, shape, dtype, op="sum", biased=True):
        self.comm, self.kind, self.op, self.dtype = comm, kind, op, dtype
        self.size, self.rank = comm.get_size(), comm.get_rank()
        rows, features, inner = shape
        if kind == "scatter":
            rows *= self.size
        self.x, self.w, self.bias = (
            torch.empty(s, dtype=dtype, device="cuda") for s in ((rows, inner), (features, inner), (features,))
        )
        self.biased = biased

    def fill(self, seed):
        """The bias is the same on all ranks."""
        draw = torch.Generator().manual_seed(seed)
        self.every = []
        for _ in range(self.size):
            pair = [torch.randn(t.shape, generator=draw, dtype=torch.float64).to(self.dtype) for t in (self.x, self.w)]
            self.every.append(pair)
        self.bias.copy_(torch.randn(self.bias.shape, generator=draw, dtype=torch.float64))
        self.x.copy_(self.every[self.rank][0])
        self.w.copy_(self.every[self.rank][1])

    def run(self, algorithm="low_latency"):
        bias = self.bias if self.biased else None
        if self.kind == "gather":
            (y,), whole = ops.all_gather_matmul(
                self.x, [self.w], self.comm, [bias], return_gathered=True, algorithm=algorithm
            )
            return [y, whole]
        call = ops.matmul_reduce_scatter if self.kind == "scatter" else ops.matmul_all_reduce
        return [call(self.x, self.w, self.comm, bias, op=self.op, algorithm=algorithm)]

    def reference(self):
        bias = self.bias.double().cpu() if self.biased else None
        if self.kind == "gather":
            whole = torch.cat([x for x, _ in self.every]).double()
            return [F.linear(whole, self.w.double().cpu(), bias), whole]
        total = sum(F.linear(x.double(), w.double()) for x, w in self.every)
        if self.op == "avg":
            total = total / self.size
        if self.kind == "scatter":
            total = total.chunk(self.size)[self.rank]
        return [total + bias if self.biased else total]

    def check(self, results):
        product, *whole = zip(results, self.reference(), strict=True)
        terms = 1 if self.kind == "gather" else self.size
        bound = TOLERANCE[self.dtype] * terms * self.x.shape[1] ** 0.5
        torch.testing.assert_close(product[0].double().cpu(), product[1], rtol=TOLERANCE[self.dtype], atol=bound)
        for got, want in whole:
            assert torch.equal(got.double().cpu(), want)


def capture(run):
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def late(comm, step):
    if comm.get_rank() == step % comm.get_size():
        torch.cuda._sleep(5_000_000)


def check_eager_and_captured(comm, seed, problems):
    for i, problem in enumerate(problems):
        problem.fill(seed + i)
        late(comm, i)
        problem.check(problem.run())
    graph, results = capture(lambda: [problem.run() for problem in problems])
    for step in range(4):
        for i, (problem, mine) in enumerate(zip(problems, results, strict=True)):
            problem.fill(seed + 10 * step + i)
            for t in mine:
                t.fill_(float("nan"))
        late(comm, step)
        graph.replay()
        for problem, mine in zip(problems, results, strict=True):
            problem.check(mine)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_eager_and_captured(comm, seed, kind, shape, dtype):
    problems = [
        Problem(comm, kind, shape, dtype, op, biased)
        for op in (("sum", "avg") if kind != "gather" else ("sum",))
        for biased in (False, True)
    ]
    check_eager_and_captured(comm, seed, problems)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_no_features_or_nothing_to_add_up(comm, seed, kind):
    """Runs them between products that have elements."""
    shapes = [(3, 264, 72), (0, 264, 72), (3, 264, 72), (3, 0, 72), (5, 7, 9), (3, 264, 0), (5, 7, 9)]
    check_eager_and_captured(comm, seed, [Problem(comm, kind, shape, torch.bfloat16) for shape in shapes])


def have_the_same_bits(comm, problem):
    (first,) = problem.run()
    every = torch.empty(comm.get_size(), *first.shape, dtype=first.dtype, device="cuda")
    comm.all_gather_single(every, first, async_op=False)
    for other in every:
        assert torch.equal(other, first)
    for step in range(5):
        late(comm, step)
        assert torch.equal(problem.run()[0], first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_sums_have_the_same_bits_everywhere_and_in_every_call(comm, seed, shape, dtype, biased):
    problem = Problem(comm, "sum", shape, dtype, biased=biased)
    problem.fill(seed)
    have_the_same_bits(comm, problem)


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_operands_at_any_offset(comm, seed, kind, offset):
    """The offset of the operands differs by rank."""
    problem = Problem(comm, kind, (33, 264, 72), torch.bfloat16)
    at = offset * (1 + comm.get_rank())
    room = torch.empty(problem.x.numel() + at, dtype=torch.bfloat16, device="cuda")
    problem.x = room[at:].view(problem.x.shape)
    problem.fill(seed)
    problem.check(problem.run())


class Sums:
    """A problem on small integers, whose sums are exact, compared with the same one without channels."""

    def __init__(self, problem, poisonings=1):
        self.problem, self.poisonings = problem, poisonings
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.step = torch.zeros((), dtype=torch.int64, device="cuda")

    def run(self):
        problem = self.problem
        self.step.add_(1)
        for t in (problem.x, problem.w):
            t.fill_(float("nan"))
        for _ in range(self.poisonings):
            problem.run()  # NaN in the memory of the next one's data and results
        for i, t in enumerate((problem.x, problem.w)):
            at = torch.arange(t.numel(), device="cuda").view(t.shape)
            t.copy_((at * 7 + at // 13 + 3 * problem.rank + 5 * self.step + 11 * i) % 3 - 1)
        for got, want in zip(problem.run(), problem.run("sequential"), strict=True):
            self.wrong += (got != want).sum()


def soak_cases(comm):
    return [
        Sums(Problem(comm, kind, shape, dtype, biased=False))
        for kind in KINDS
        for shape, dtype in (
            ((1, 64, 32), torch.bfloat16),
            ((16, 2048, 32), torch.float16),
            ((64, 4096, 32), torch.float32),
            ((3, 9, 7), torch.float64),
        )
    ]


def take_turns(comm, seed, cases):
    """Runs eager calls and replays in any order, with late ranks."""
    for case in cases:
        case.run()
    graphs = [capture(case.run)[0] for case in cases]
    draw = random.Random(seed)  # the same on all ranks
    for _ in range(300):
        i, behind, delay, eager = (
            draw.randrange(len(cases)), draw.randrange(comm.get_size()), draw.uniform(1e-3, 10e-3), draw.random() < 0.3
        )  # fmt: skip
        if comm.get_rank() == behind:
            time.sleep(delay)
        cases[i].run() if eager else graphs[i].replay()
    for case in cases:
        assert case.wrong.item() == 0, (case.problem.kind, tuple(case.problem.x.shape))
    for graph in graphs:
        graph.reset()


def test_any_order_with_late_ranks(comm, seed):
    """Kernels of one and of two shots, and problems without a kernel, share one memory."""
    take_turns(comm, seed, soak_cases(comm))


def check_replays(case, replay):
    case.run()
    graph, _ = capture(case.run)
    replay(graph)
    assert case.wrong.item() == 0


@pytest.mark.parametrize("case", range(12))
def test_two_hundred_replays_with_a_late_rank(comm, seed, case):
    check_replays(soak_cases(comm)[case], lambda graph: replay_with_late_ranks(comm, graph, seed))


@pytest.mark.slow
@pytest.mark.parametrize("case", range(12))
def test_ten_thousand_replays(comm, case):
    check_replays(soak_cases(comm)[case], replay_ten_thousand_times)


@pytest.mark.parametrize("algorithm", ["p2p", "sequential", "pipelined"])
def test_beside_other_algorithms_of_the_same_channels(comm, seed, algorithm):
    problems = [Problem(comm, kind, (64, 256, 64), torch.bfloat16) for kind in KINDS]
    for step in range(12):
        for problem in problems:
            problem.fill(seed + step)
            late(comm, step)
            problem.check(problem.run(algorithm if step % 2 else "low_latency"))


def stay_away(comm, problem, mode):
    """The last rank makes no call of the problem's communicator: the others get an error after the timeout."""
    lonely = problem.comm
    problem.check(problem.run())
    lonely.set_timeout(timedelta(milliseconds=700))
    graph, _ = capture(problem.run)
    comm.barrier(async_op=False)
    torch.cuda.synchronize()
    last = comm.get_size() - 1
    if comm.get_rank() != last:
        graph.replay() if mode == "graph" else problem.run()
        torch.cuda.synchronize()
        with pytest.raises(to.OperationTimeoutError, match=expired(comm, last, "begin")):
            run_until_an_error(problem.run)
    comm.barrier(async_op=True).wait_blocking()
    lonely.abort()
    graph.reset()


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_stays_away(comm, make_comm, seed, kind, mode):
    problem = Problem(make_comm(f"low_latency_away_{kind}_{mode}"), kind, (16, 512, 64), torch.bfloat16)
    problem.fill(seed)
    stay_away(comm, problem, mode)


def differ(problem):
    """The rows of one rank differ: an error on all ranks, before the timeout."""
    torch.cuda.synchronize()
    began = time.monotonic()
    with pytest.raises(to.Error, match=r"expected the same number of rows on all ranks, got \d+ here|has given up"):
        run_until_an_error(lambda: (problem.run(), torch.cuda.synchronize()))
    assert time.monotonic() - began < 30
    problem.comm.abort()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_differ(comm, make_comm, kind):
    other = make_comm(f"low_latency_rows_{kind}", timeout=timedelta(seconds=60))
    Problem(other, kind, (16, 512, 64), torch.bfloat16).run()  # allocates the memory
    rows = 8 if other.get_rank() == other.get_size() - 1 else 16
    differ(Problem(other, kind, (rows, 512, 64), torch.bfloat16))


def replay_two_at_once(comm, problem, alone):
    """On a rank whose first replay waits for another rank, the second finds the first in flight, long before the
    timeout."""
    problem.run()
    streams = [torch.cuda.Stream() for _ in range(2)]
    graphs = []
    for stream in streams:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            problem.run()
        graphs.append(graph)
    torch.cuda.synchronize()
    comm.barrier(async_op=False)
    torch.cuda.synchronize()
    if comm.get_rank() == alone % comm.get_size():
        began = time.monotonic()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        with pytest.raises(to.Error, match="two that ran at once"):
            run_until_an_error(problem.run)
        assert time.monotonic() - began < 30
    comm.barrier(async_op=True).wait_blocking()
    problem.comm.abort()
    for graph in graphs:
        graph.reset()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alone", [0, -1], ids=["first", "last"])
def test_two_replays_at_once(comm, make_comm, seed, kind, alone):
    other = make_comm(f"low_latency_apart_{kind}_{alone}", timeout=timedelta(seconds=60))
    problem = Problem(other, kind, (16, 512, 64), torch.bfloat16)
    problem.fill(seed)
    replay_two_at_once(comm, problem, alone)


def test_explain_and_a_table_of_it(comm, seed):
    problem = Problem(comm, "sum", (16, 512, 64), torch.bfloat16)
    found = to.explain("matmul_all_reduce", problem.x, problem.w, comm, algorithm="low_latency")
    assert (found.algorithm, found.decided_by) == ("low_latency", "caller")
    assert to.explain("matmul_all_reduce", problem.x, problem.w, comm).algorithm != "low_latency"
