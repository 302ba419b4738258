"""Collectives on tensors in windows, in graphs and when a rank is missing. See docs/kernels.md."""

import random
import time
from datetime import timedelta

import pytest
import torch
from small_cases import KI, check_reduced, draw
from timeout_cases import run_until_an_error

import torch_overlap as to
from torch_overlap import ReduceOp

pytestmark = pytest.mark.gpu(2)

MIB = 1024 * KI
ZERO_COPY = {"direct_collectives": "zero_copy"}


@pytest.fixture(scope="module")
def zero(make_comm):
    return make_comm("zero_copy_in_graphs", hints=ZERO_COPY)


class Step:
    """Every operation once, on tensors in a window, between others of the same communicator on plain ones. Inputs
    change with a counter on the device; differences are counted there."""

    def __init__(self, comm, count, dtype=torch.bfloat16):
        self.comm, self.rank, self.size = comm, comm.get_rank(), comm.get_size()
        self.count, self.dtype = count, dtype
        self.step = torch.zeros((), dtype=torch.int64, device="cuda")
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.base = torch.arange(count * self.size, device="cuda") % 97
        self.memory = to.symmetric_empty(2 * count * self.size, dtype, comm)
        self.window = comm.new_window(self.memory)
        self.x, self.out = self.memory.view(2, -1)

    def of(self, rank):
        return ((self.base + 3 * rank + 5 * self.step) % 29).to(self.dtype)  # sums of eight are exact

    def same(self, got, expected):
        self.wrong += (got != expected).sum()

    def __call__(self):
        comm, count, rank = self.comm, self.count, self.rank
        self.step.add_(1).remainder_(1000)
        every = [self.of(r) for r in range(self.size)]
        parts = [one.view(self.size, count) for one in every]
        options = {"async_op": False, "hints": ZERO_COPY}
        self.x.copy_(every[rank])
        self.out.fill_(float("nan"))
        result = self.out[:count]
        comm.reduce_scatter_single(result, self.x, ReduceOp.SUM, **options)
        self.same(result, sum(part[rank] for part in parts))
        comm.all_reduce(self.x[:count], ReduceOp.SUM, **options)
        self.same(self.x[:count], sum(part[0] for part in parts))
        for hint in ("ll", "push", "two_shot"):  # they share epochs
            plain = parts[rank][1].clone()
            comm.all_reduce(plain, ReduceOp.SUM, async_op=False, hints={"direct_collectives": hint})
            self.same(plain, sum(part[1] for part in parts))
        self.x.fill_(float("nan"))
        self.out.fill_(float("nan"))
        comm.all_gather_single(self.out, parts[rank][0], **options)
        self.same(self.out, torch.cat([part[0] for part in parts]))
        self.out.fill_(float("nan"))
        comm.all_to_all_single(self.out, every[rank], async_op=True, hints=ZERO_COPY).wait()
        self.same(self.out, torch.cat([part[rank] for part in parts]))
        for root in (1, self.size - 1):
            self.x[:count] = parts[rank][rank]
            comm.broadcast(self.x[:count], root, **options)
            self.same(self.x[:count], parts[root][root])
        staged = parts[rank][0].clone()  # of nobody in the window
        comm.all_reduce(staged, ReduceOp.SUM, **options)
        self.same(staged, sum(part[0] for part in parts))

    def capture(self):
        self()  # makes the memory, and is a test by itself
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph

    def check(self):
        torch.cuda.synchronize()
        assert self.wrong.item() == 0

    def end(self, *graphs):
        """No rank lets go of what another may still touch."""
        self.comm.barrier(async_op=True).wait_blocking()
        for graph in graphs:
            graph.reset()
        self.window.tensor_deregister()


@pytest.mark.parametrize("count", [8, 5000, 80_008, 600_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_graphs_and_eager_calls_take_turns(comm, zero, seed, count, dtype):
    choose = random.Random(seed)
    steps = [Step(on, count + 8 * i, dtype) for i, on in enumerate((comm, zero, zero))]
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


@pytest.mark.parametrize("count", [64, 5000, 200_000])
def test_two_hundred_replays_with_a_late_rank(zero, seed, count):
    step = Step(zero, count)
    graph = step.capture()
    choose = random.Random(seed)
    for _ in range(200):
        late, delay = choose.randrange(zero.get_size()), choose.uniform(1e-3, 10e-3)
        if zero.get_rank() == late:
            time.sleep(delay)
        graph.replay()
    step.check()
    step.end(graph)


@pytest.mark.slow
@pytest.mark.parametrize("count", [64, 5000, 60_000])
def test_ten_thousand_replays(zero, count):
    step = Step(zero, count)
    graph = step.capture()
    for i in range(10_000):
        graph.replay()
        if i % 1000 == 999:
            torch.cuda.synchronize()
    step.check()
    step.end(graph)


def test_a_graph_keeps_the_window(zero, seed):
    """Its replays do without copies when the window is gone for everybody else."""
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


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"])
def test_a_missing_rank_is_named(comm, make_comm, name):
    """By its step, which also shows that the call before it has staged nothing."""
    lonely = make_comm(f"lonely_zero_{name}", hints=ZERO_COPY)
    size = comm.get_size()
    count = MIB  # 4 MiB, which would be staged in more than one round, and so in more steps
    memory = to.symmetric_empty(2 * count * size, torch.float32, lonely)
    window = lonely.new_window(memory)  # a window lasts as long as this
    whole, out = memory.view(2, -1)
    call = {
        "all_reduce": lambda: lonely.all_reduce(whole, ReduceOp.SUM, async_op=False),
        "reduce_scatter": lambda: lonely.reduce_scatter_single(out[:count], whole, ReduceOp.SUM, async_op=False),
        "all_gather": lambda: lonely.all_gather_single(out, whole[:count], async_op=False),
        "all_to_all": lambda: lonely.all_to_all_single(out, whole, async_op=False),
        "broadcast": lambda: lonely.broadcast(whole, 1, async_op=False),
    }[name]
    call()
    torch.cuda.synchronize()
    lonely.set_timeout(timedelta(milliseconds=700))
    comm.barrier(async_op=True).wait_blocking()
    if comm.get_rank() == 0:
        call()
        torch.cuda.synchronize()
        message = r"'lonely_.*'.*700 ms.*rank [1-9] is missing: expected step 3 of block 0, got step 2"
        with pytest.raises(to.OperationTimeoutError, match=message):
            run_until_an_error(call)
    comm.barrier(async_op=True).wait_blocking()
    lonely.abort()
    torch.cuda.synchronize()
    del window
