"""Collectives on tensors in windows, in graphs and with a missing rank. See docs/design/kernels.md."""

import random
import time
from datetime import timedelta

import pytest
import torch
from replays import replay_at_once, replay_ten_thousand_times, replay_with_late_ranks
from small_cases import KI, NOT_BFLOAT16, Poison, at_call, check_reduced, draw
from timeout_cases import run_until_an_error

import torch_overlap as to
from torch_overlap import ReduceOp

pytestmark = pytest.mark.gpu(2)

MIB = 1024 * KI
ZERO_COPY = {"custom_collectives": "zero_copy"}


@pytest.fixture(scope="module")
def zero(make_comm):
    return make_comm("zero_copy_in_graphs", hints=ZERO_COPY)


class Step:
    """Runs every operation once with all ranks' tensors in a window, and once with one rank's outside; operations of
    the same communicator run in between. Inputs change with a counter on the device; differences are counted there.
    Outputs hold NaN before, or a number that no input has, and so does, by `before`, the staging memory."""

    CALLS = 6  # of `before`

    def __init__(self, comm, count, dtype=torch.bfloat16, *, before=lambda: None):
        self.comm, self.rank, self.size = comm, comm.get_rank(), comm.get_size()
        self.count, self.dtype, self.before = count, dtype, before
        self.step = torch.zeros((), dtype=torch.int64, device="cuda")
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.base = torch.arange(count * self.size, device="cuda") % 97
        # The offset differs by rank.
        vector = 16 // dtype.itemsize
        self.memory = to.symmetric_empty((2, count * self.size + vector * self.size), dtype, comm)
        self.window = comm.new_window(self.memory)
        self.places = self.memory[:, vector * self.rank :][:, : count * self.size]
        is_odd = self.rank == self.size - 1
        self.odd_places = torch.empty_like(self.places) if is_odd else self.places

    def of(self, rank):
        return ((self.base + 3 * rank + 5 * self.step) % 29).to(self.dtype)  # sums of eight are exact

    def same(self, got, expected):
        self.wrong += (got != expected).sum()

    def clear(self, *tensors):
        for t in tensors:
            t.view(torch.uint8).fill_(0xFF)

    def every_operation(self, every, x, out, before):
        comm, count, rank = self.comm, self.count, self.rank
        parts = [one.view(self.size, count) for one in every]
        options = {"async_op": False, "hints": ZERO_COPY}
        before()
        x.copy_(every[rank])
        self.clear(out)
        comm.reduce_scatter_single(out[:count], x, ReduceOp.SUM, **options)
        self.same(out[:count], sum(part[rank] for part in parts))
        before()
        comm.all_reduce(x[:count], ReduceOp.SUM, **options)
        self.same(x[:count], sum(part[0] for part in parts))
        before()
        self.clear(x, out)
        comm.all_gather_single(out, parts[rank][0], **options)
        self.same(out, torch.cat([part[0] for part in parts]))
        before()
        self.clear(out)
        comm.all_to_all_single(out, every[rank], async_op=True, hints=ZERO_COPY).wait()
        self.same(out, torch.cat([part[rank] for part in parts]))
        for root in (1, self.size - 1):
            before()
            self.clear(x)
            if rank == root:
                x[:count] = parts[root][root]
            comm.broadcast(x[:count], root, **options)
            self.same(x[:count], parts[root][root])

    def __call__(self):
        self.step.add_(1).remainder_(1000)
        every = [self.of(r) for r in range(self.size)]
        self.every_operation(every, *self.places, lambda: None)
        for hint in ("ll", "simple", "two_shot"):  # they share epochs
            plain = every[self.rank][self.count :].clone()
            self.comm.all_reduce(plain, ReduceOp.SUM, async_op=False, hints={"custom_collectives": hint})
            self.same(plain, sum(one[self.count :] for one in every))
        self.every_operation(every, *self.odd_places, self.before)

    def capture(self):
        self()  # allocates the memory, and is a test by itself
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph

    def check(self):
        """Also checks that the memory around the tensors is unchanged."""
        torch.cuda.synchronize()
        assert self.wrong.item() == 0
        self.places.zero_()
        assert not self.memory.any()

    def end(self, *graphs):
        """No rank releases memory that another may still access."""
        self.comm.barrier(async_op=True).wait_blocking()
        for graph in graphs:
            graph.reset()
        self.window.tensor_deregister()


SIZES = [(count, torch.bfloat16) for count in (8, 5000, 80_008, 600_000)]
SIZES += [(5000, dtype) for dtype in NOT_BFLOAT16]


@pytest.mark.parametrize(("count", "dtype"), SIZES, ids=str)
def test_graphs_and_eager_calls_take_turns(comm, zero, seed, count, dtype):
    choose = random.Random(seed)
    steps = [
        Step(on, count + 8 * i, dtype, before=before)
        for i, (on, before) in enumerate(((comm, Poison(comm)), (zero, lambda: None), (zero, Poison(zero))))
    ]
    graphs = [step.capture() for step in steps]
    for _ in range(40):
        which = choose.randrange(len(steps))
        if choose.randrange(5 * comm.get_size()) == comm.get_rank():
            torch.cuda._sleep(4_000_000)
        graphs[which].replay()
        if choose.random() < 0.5:
            steps[choose.randrange(len(steps))]()
    for step in steps:
        step.check()
    for step, graph in zip(steps, graphs, strict=True):
        step.end(graph)


def test_two_communicators_at_once(make_comm):
    """Replays on streams of their own, which nothing orders."""
    comms = [make_comm(f"zero_copy_at_once_{i}", hints=ZERO_COPY) for i in range(2)]
    steps = [Step(one, count) for one, count in zip(comms, (3000, 20_008), strict=True)]
    graphs = [step.capture() for step in steps]
    replay_at_once(graphs, 200)
    for step in steps:
        step.check()
    for step, graph in zip(steps, graphs, strict=True):
        step.end(graph)


LATE = [(count, torch.bfloat16) for count in (64, 5000, 200_000)] + [(5000, dtype) for dtype in NOT_BFLOAT16]


@pytest.mark.parametrize(("count", "dtype"), LATE, ids=str)
def test_two_hundred_replays_with_a_late_rank(zero, seed, count, dtype):
    step = Step(zero, count, dtype, before=Poison(zero))
    graph = step.capture()
    replay_with_late_ranks(zero, graph, seed)
    step.check()
    step.end(graph)


@pytest.mark.slow
@pytest.mark.parametrize("count", [64, 5000, 60_000])
def test_ten_thousand_replays(zero, count):
    step = Step(zero, count, before=Poison(zero))
    graph = step.capture()
    replay_ten_thousand_times(graph)
    step.check()
    step.end(graph)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NOT_BFLOAT16, ids=str)
def test_ten_thousand_replays_of_other_dtypes(zero, dtype):
    """Graphs take turns; in each one the slots are filled with NaN before another of the operations that are staged."""
    poison, calls = Poison(zero), Step.CALLS
    steps = [Step(zero, 5000, dtype, before=at_call(i, calls, poison)) for i in range(calls)]
    graphs = [step.capture() for step in steps]
    replay_ten_thousand_times(*graphs)
    for step in steps:
        step.check()
    for step, graph in zip(steps, graphs, strict=True):
        step.end(graph)


def test_a_graph_keeps_the_window(zero, seed):
    """Its replays still copy nothing when all other references to the window are dropped."""
    count, rank = 50_000, zero.get_rank()
    tensor = to.symmetric_empty(count, torch.float32, zero)
    window = zero.new_window(tensor)
    zero.all_reduce(tensor, ReduceOp.SUM, async_op=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        zero.all_reduce(tensor, ReduceOp.SUM, async_op=False)
    window.tensor_deregister()
    del window
    others = [zero.new_window(to.symmetric_empty(count, torch.float32, zero)) for _ in range(2)]
    for step in range(5):
        parts = [draw(zero, seed + step, torch.float32, count, r) for r in range(zero.get_size())]
        tensor.copy_(parts[rank])
        graph.replay()
        check_reduced(tensor, ReduceOp.SUM, parts)
    zero.barrier(async_op=True).wait_blocking()
    graph.reset()
    for other in others:
        other.tensor_deregister()


# --- Failures ----------------------------------------------------------------------------------------------------


NAMES = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]


@pytest.fixture
def lonely(comm, make_comm):
    """A communicator, and a call that all ranks have made once, and rank 0 makes again. It is aborted after the
    test."""
    made = []

    def make(what, name):
        one = make_comm(f"lonely_zero_{what}_{name}", hints=ZERO_COPY)
        size, count = comm.get_size(), MIB  # 4 MiB, which would be staged in more than one round, with more steps
        memory = to.symmetric_empty(2 * count * size, torch.float32, one)
        made.append((one, one.new_window(memory)))
        whole, out = memory.view(2, -1)
        call = {
            "all_reduce": lambda: one.all_reduce(whole, ReduceOp.SUM, async_op=False),
            "reduce_scatter": lambda: one.reduce_scatter_single(out[:count], whole, ReduceOp.SUM, async_op=False),
            "all_gather": lambda: one.all_gather_single(out, whole[:count], async_op=False),
            "all_to_all": lambda: one.all_to_all_single(out, whole, async_op=False),
            "broadcast": lambda: one.broadcast(whole, 1, async_op=False),
        }[name]
        call()
        torch.cuda.synchronize()
        one.set_timeout(timedelta(milliseconds=700))
        comm.barrier(async_op=True).wait_blocking()
        return one, call

    yield make
    comm.barrier(async_op=True).wait_blocking()
    for one, _ in made:
        one.abort()
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_rank_is_named(lonely, name):
    """The step in the error also shows that the previous call staged nothing."""
    silent, call = lonely("call", name)
    if silent.get_rank() != 0:
        return
    call()
    torch.cuda.synchronize()
    message = r"'lonely_.*'.*700 ms.*rank [1-9] is missing: expected step 3 of block 0, got step 2"
    with pytest.raises(to.OperationTimeoutError, match=message):
        run_until_an_error(call)


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_that_nobody_watches_ends_too(comm, lonely, name):
    silent, call = lonely("replay", name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    comm.barrier(async_op=False)
    graph.replay()
    comm.barrier(async_op=False)
    torch.cuda.synchronize()
    if comm.get_rank() == 0:
        graph.replay()
        torch.cuda.synchronize()
        deadline = time.monotonic() + 10
        while not silent.is_aborted() and time.monotonic() < deadline:
            time.sleep(0.01)
        message = (
            r"custom collectives of 'lonely_.*': expected rank [1-9] to come to step 3 of block \d+ within 700 ms, "
            r"got step 2"
        )
        with pytest.raises(to.OperationTimeoutError, match=message):
            call()
    comm.barrier(async_op=True).wait_blocking()
    graph.reset()
