"""CUDA graphs: every operation captured and replayed with changing inputs."""

import gc
import time

import pytest
import torch

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)

COUNT = 3001


class Case:
    """An operation on static buffers: `fill(step)` sets the inputs, `check(step)` compares the outputs."""

    def __init__(self, comm, dtype=torch.float32):
        self.comm, self.rank, self.size = comm, comm.get_rank(), comm.get_size()
        self.x = torch.zeros(COUNT * self.size, dtype=dtype, device="cuda")
        self.out = torch.zeros(COUNT * self.size, dtype=dtype, device="cuda")
        self.base = torch.arange(COUNT * self.size, device="cuda") % 101

    def of(self, rank, step):
        """Rank `rank`'s input in replay `step`."""
        return (self.base + 3 * rank + 5 * step).to(self.x.dtype)

    def all(self, step):
        return [self.of(r, step) for r in range(self.size)]

    def fill(self, step):
        self.x.copy_(self.of(self.rank, step))
        self.out.fill_(99)


class AllReduce(Case):
    def issue(self, async_op):
        return self.comm.all_reduce(self.x, to.ReduceOp.SUM, async_op)

    def check(self, step):
        assert torch.equal(self.x, sum(self.all(step)))


class AllReduceComposed(Case):
    def __init__(self, comm):
        super().__init__(comm, torch.int32)

    def issue(self, async_op):
        return self.comm.all_reduce(self.x, to.ReduceOp.BXOR, async_op)

    def check(self, step):
        expected = torch.zeros_like(self.x)
        for part in self.all(step):
            expected ^= part
        assert torch.equal(self.x, expected)


class AllReducePremul(Case):
    def __init__(self, comm):
        super().__init__(comm)
        self.factor = torch.ones((), device="cuda")

    def fill(self, step):
        super().fill(step)
        self.factor.fill_(0.5 * (step + 1))  # read at replay

    def issue(self, async_op):
        return self.comm.all_reduce(self.x, to.ReduceOp.PREMUL_SUM(self.factor), async_op)

    def check(self, step):
        assert torch.equal(self.x, sum(self.all(step)) * (0.5 * (step + 1)))


class Reduce(Case):
    def issue(self, async_op):
        return self.comm.reduce(self.x, 1, to.ReduceOp.MAX, async_op)

    def check(self, step):
        expected = self.of(self.size - 1, step) if self.rank == 1 else self.of(self.rank, step)
        assert torch.equal(self.x, expected)


class Broadcast(Case):
    def issue(self, async_op):
        return self.comm.broadcast(self.x, 1, async_op)

    def check(self, step):
        assert torch.equal(self.x, self.of(1, step))


class AllGather(Case):
    def __init__(self, comm):
        super().__init__(comm)
        self.outs = [torch.zeros(COUNT, device="cuda") for _ in range(self.size)]

    def issue(self, async_op):
        return self.comm.all_gather(self.outs, self.x[:COUNT], async_op)

    def check(self, step):
        for r in range(self.size):
            assert torch.equal(self.outs[r], self.of(r, step)[:COUNT])


class AllGatherSingle(Case):
    def issue(self, async_op):
        return self.comm.all_gather_single(self.out, self.x[:COUNT], async_op)

    def check(self, step):
        assert torch.equal(self.out, torch.cat([part[:COUNT] for part in self.all(step)]))


def counts_of(size):
    """A different number of elements for each rank, one of them none."""
    return [0 if r == size - 1 else COUNT - 7 * r for r in range(size)]


class AllGatherV(Case):
    def __init__(self, comm):
        super().__init__(comm)
        self.counts = counts_of(self.size)
        self.outs = [torch.zeros(count, device="cuda") for count in self.counts]

    def fill(self, step):
        super().fill(step)
        for out in self.outs:
            out.fill_(99)

    def issue(self, async_op):
        return self.comm.all_gather_v(self.outs, self.x[: self.counts[self.rank]], async_op)

    def check(self, step):
        for r, count in enumerate(self.counts):
            assert torch.equal(self.outs[r], self.of(r, step)[:count])


class ReduceScatter(Case):
    def issue(self, async_op):
        return self.comm.reduce_scatter(self.out[:COUNT], list(self.x.chunk(self.size)), to.ReduceOp.SUM, async_op)

    def check(self, step):
        assert torch.equal(self.out[:COUNT], sum(self.all(step)).chunk(self.size)[self.rank])


class ReduceScatterSingle(ReduceScatter):
    def issue(self, async_op):
        return self.comm.reduce_scatter_single(self.out[:COUNT], self.x, to.ReduceOp.SUM, async_op)


class ReduceScatterV(Case):
    def __init__(self, comm):
        super().__init__(comm)
        self.counts = counts_of(self.size)

    def issue(self, async_op):
        inputs = list(self.x[: sum(self.counts)].split(self.counts))
        return self.comm.reduce_scatter_v(self.out[: self.counts[self.rank]], inputs, to.ReduceOp.SUM, async_op)

    def check(self, step):
        count = self.counts[self.rank]
        expected = sum(self.all(step))[: sum(self.counts)].split(self.counts)[self.rank]
        assert torch.equal(self.out[:count], expected)
        assert (self.out[count:] == 99).all()


class AllToAllVSingle(Case):
    def rows(self, sender, receiver):
        return 0 if (sender + receiver) % 3 == 2 else 5 * sender + 3 * receiver + 1

    def sent_by(self, sender, step):
        sizes = [self.rows(sender, r) for r in range(self.size)]
        return self.of(sender, step)[: sum(sizes)].split(sizes)

    def issue(self, async_op):
        to_ranks = [self.rows(self.rank, r) for r in range(self.size)]
        from_ranks = [self.rows(r, self.rank) for r in range(self.size)]
        return self.comm.all_to_all_v_single(
            self.out[: sum(from_ranks)], self.x[: sum(to_ranks)], from_ranks, to_ranks, async_op
        )

    def check(self, step):
        expected = torch.cat([self.sent_by(r, step)[self.rank] for r in range(self.size)])
        assert torch.equal(self.out[: len(expected)], expected)
        assert (self.out[len(expected) :] == 99).all()


class AllToAllSingle(Case):
    def issue(self, async_op):
        return self.comm.all_to_all_single(self.out, self.x, async_op)

    def check(self, step):
        assert torch.equal(self.out, torch.cat([part.chunk(self.size)[self.rank] for part in self.all(step)]))


class AllToAll(AllToAllSingle):
    def issue(self, async_op):
        return self.comm.all_to_all(list(self.out.chunk(self.size)), list(self.x.chunk(self.size)), async_op)


class Gather(Case):
    def issue(self, async_op):
        outs = list(self.out.chunk(self.size)) if self.rank == 0 else []
        return self.comm.gather(outs, self.x[:COUNT], 0, async_op)

    def check(self, step):
        if self.rank == 0:
            assert torch.equal(self.out, torch.cat([part[:COUNT] for part in self.all(step)]))


class GatherSingle(Gather):
    def issue(self, async_op):
        return self.comm.gather_single(self.out if self.rank == 0 else None, self.x[:COUNT], 0, async_op)


class Scatter(Case):
    def issue(self, async_op):
        inputs = list(self.x.chunk(self.size)) if self.rank == 1 else []
        return self.comm.scatter(self.out[:COUNT], inputs, 1, async_op)

    def check(self, step):
        assert torch.equal(self.out[:COUNT], self.of(1, step).chunk(self.size)[self.rank])


class Batch(Case):
    def issue(self, async_op):
        batch = self.comm.batch_op_create()
        batch.send(self.x, (self.rank + 1) % self.size)
        batch.recv(self.out, (self.rank - 1) % self.size)
        return batch.issue(async_op)

    def check(self, step):
        assert torch.equal(self.out, self.of((self.rank - 1) % self.size, step))


class SendRecv(Case):
    def issue(self, async_op):
        if self.rank == 0:
            return self.comm.send(self.x, 1, async_op)
        if self.rank == 1:
            return self.comm.recv(self.out, 0, async_op)
        return None

    def check(self, step):
        if self.rank == 1:
            assert torch.equal(self.out, self.of(0, step))


class Ring(Case):
    """Every rank sends to the next one and receives from the one before, in pieces."""

    def issue(self, async_op):
        batch = self.comm.batch_op_create()
        for mine, theirs in zip(self.x.chunk(3), self.out.chunk(3), strict=True):
            batch.send(mine, (self.rank + 1) % self.size)
            batch.recv(theirs, (self.rank - 1) % self.size)
        return batch.issue(async_op)

    def check(self, step):
        assert torch.equal(self.out, self.of((self.rank - 1) % self.size, step))


class Barrier(Case):
    """Nobody is through before all have come: by the clock of the one host, with one rank that comes late."""

    def fill(self, step):
        super().fill(step)
        if self.rank == step % self.size:
            time.sleep(0.05)
        self.came = time.monotonic()

    def issue(self, async_op):
        return self.comm.barrier(async_op)

    def check(self, step):
        torch.cuda.synchronize()
        times = torch.zeros(self.size, 2, dtype=torch.float64, device="cuda")
        mine = torch.tensor([self.came, time.monotonic()], dtype=torch.float64, device="cuda")
        self.comm.all_gather_single(times, mine, async_op=False)
        came, went = times.unbind(1)
        assert went.min() >= came.max()


CASES = [AllReduce, AllReduceComposed, AllReducePremul, Reduce, Broadcast, AllGather, AllGatherSingle, AllGatherV,
         ReduceScatter, ReduceScatterSingle, ReduceScatterV, AllToAllSingle, AllToAll, AllToAllVSingle, Gather,
         GatherSingle, Scatter, Batch, SendRecv, Ring, Barrier]  # fmt: skip


def capture(case, mode):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work = case.issue(mode != "sync")
        if mode == "wait" and work is not None:
            work.wait()
    if work is not None:
        assert not work.is_completed()  # it runs at each replay
        work.wait()  # the capture is over: nothing to do
    return graph


def replay(graph, case, step, late=False):
    case.fill(step)
    if late and case.rank == step % case.size:
        torch.cuda._sleep(50_000_000)
    graph.replay()
    case.check(step)


@pytest.mark.parametrize("mode", ["sync", "wait", "leaf"])
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_replays_with_changing_inputs_and_a_late_rank(comm, kind, mode):
    case = kind(comm)
    graph = capture(case, mode)
    for step in range(6):
        replay(graph, case, step, late=True)


def test_the_first_operation_of_a_communicator_may_be_captured(make_comm):
    fresh = make_comm("captured_first")
    case = AllReduce(fresh)
    graph = capture(case, "leaf")
    for step in range(3):
        replay(graph, case, step)
    del graph
    fresh.finalize()


def test_several_graphs_and_eager_calls_take_turns(comm):
    cases = [kind(comm) for kind in (AllReduce, AllGatherSingle, AllToAllSingle, ReduceScatterSingle)]
    graphs = [capture(case, mode) for case, mode in zip(cases, ["leaf", "wait", "sync", "leaf"], strict=True)]
    eager = AllReduce(comm)
    for step in range(8):
        for case, graph in zip(cases, graphs, strict=True):
            replay(graph, case, step, late=True)
            eager.fill(step)
            eager.issue(async_op=step % 2 == 0).wait()
            eager.check(step)


def test_many_operations_of_one_capture_run_in_order(comm):
    x = torch.zeros(1 << 16, device="cuda")
    size = comm.get_size()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.fill_(1)
        for step in range(8):  # all unjoined, on two streams and the current one
            hints = {"is_high_priority_stream": str(step % 2 == 0).lower()}
            comm.all_reduce(x, to.ReduceOp.SUM, async_op=step % 4 != 3, hints=hints)
    for _ in range(5):
        graph.replay()
        assert (x == float(size) ** 8).all()


def test_waits_inside_a_capture_order_what_reads_the_result(comm):
    x = torch.zeros(1 << 20, device="cuda")
    y = torch.zeros_like(x)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work = comm.all_reduce(x, to.ReduceOp.SUM, async_op=True)
        z = y * 2  # beside it
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work.wait()
            doubled = x * 2
        torch.cuda.current_stream().wait_stream(side)
        result = doubled + z
    for step in range(5):
        x.fill_(step + comm.get_rank())
        y.fill_(step)
        graph.replay()
        assert (result == 2 * sum(step + r for r in range(comm.get_size())) + 2 * step).all()


def test_memory_of_an_unjoined_operation_is_not_lent_to_the_rest_of_the_graph(comm):
    count, size = 1 << 22, comm.get_size()
    value = torch.zeros((), device="cuda")
    out = torch.zeros(count * size, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = torch.zeros(count, device="cuda") + value
        comm.all_gather_single(out, x, async_op=True)
        del x
        for _ in range(4):
            torch.full((count,), -1.0, device="cuda")
    for step in range(5):
        value.fill_(10 * step + comm.get_rank())
        graph.replay()
        for r, part in enumerate(out.chunk(size)):
            assert (part == 10 * step + r).all()


def test_captures_on_several_streams(comm):
    case = AllReduce(comm)
    graph = torch.cuda.CUDAGraph()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    other = AllGatherSingle(comm)
    with torch.cuda.graph(graph):
        current = torch.cuda.current_stream()
        for stream, one in ((first, case), (second, other)):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                one.issue(async_op=one is other)
        current.wait_stream(first)
        current.wait_stream(second)
    for step in range(5):
        other.fill(step)
        replay(graph, case, step)
        other.check(step)


def test_the_watchdog_does_not_break_a_long_capture(comm):
    case = AllReduce(comm)
    warm = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda._sleep(1_000_000_000)
    pending = comm.all_reduce(warm, to.ReduceOp.SUM, async_op=True)  # something to look at
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()  # the strictest mode: a careless question of any thread breaks it
        deadline = time.monotonic() + 20
        while not pending.is_completed() and time.monotonic() < deadline:  # may be asked during a capture
            time.sleep(0.05)
        status = pending.status()
        case.issue(async_op=True)
        time.sleep(0.3)  # several looks of the watchdog
        graph.capture_end()
    assert status == to.WorkStatus.COMPLETED
    pending.wait()
    assert (warm == comm.get_size()).all()
    for step in range(3):
        replay(graph, case, step, late=True)


def test_waiting_for_eager_work_inside_a_capture_is_an_error_that_leaves_the_capture_whole(comm):
    x = torch.ones(1 << 20, device="cuda")
    y = torch.zeros(8, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)
        eager = comm.all_reduce(x, to.ReduceOp.SUM, async_op=True)
    graph = torch.cuda.CUDAGraph()
    capturing = torch.cuda.Stream()
    with torch.cuda.stream(capturing):
        graph.capture_begin(capture_error_mode="thread_local")
        y.add_(1)
        with pytest.raises(to.StateError, match="before the capture"):
            eager.wait()
        graph.capture_end()
    eager.wait()
    graph.replay()
    torch.cuda.synchronize()
    assert (x == comm.get_size()).all()
    assert (y == 1).all()


def test_finalize_before_the_last_replay(make_comm):
    ending = make_comm("ends_before_its_graph")
    case = AllReduce(ending)
    graph = capture(case, "leaf")
    replay(graph, case, 0)
    torch.cuda.synchronize()
    ending.finalize()
    with pytest.raises(to.StateError):
        case.issue(async_op=True)
    for step in range(1, 5):
        replay(graph, case, step, late=True)
    torch.cuda.synchronize()
    del case, ending
    gc.collect()
    graph.reset()
    time.sleep(1)  # the native communicator goes now, on a thread of its own


def test_the_graph_dies_before_finalize(make_comm):
    ending = make_comm("outlives_its_graph")
    case = AllReduce(ending)
    graph = capture(case, "wait")
    replay(graph, case, 0)
    torch.cuda.synchronize()
    graph.reset()
    del graph
    case.fill(3)
    case.issue(async_op=True).wait()
    case.check(3)
    ending.finalize()


def test_tensors_of_a_graph_go_with_it(comm):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    x = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.broadcast(x, 0, async_op=True)
    del x
    assert torch.cuda.memory_allocated() >= before + (64 << 20)
    graph.replay()
    torch.cuda.synchronize()
    graph.reset()
    deadline = time.monotonic() + 10
    # The random generator of torch keeps two words for captures.
    allowed = before + (1 << 20)
    while torch.cuda.memory_allocated() > allowed and time.monotonic() < deadline:
        time.sleep(0.1)
    assert torch.cuda.memory_allocated() <= allowed
