"""Operations on static buffers, captured by graphs: see test_graphs.py and test_graph_soak.py."""

import time

import pytest
import torch

import torch_overlap as to

COUNT = 3001


class Case:
    """An operation on static buffers: `fill(step)` sets the inputs, `check(step)` compares the outputs."""

    def __init__(self, comm, dtype=torch.float32):
        self.comm, self.rank, self.size = comm, comm.get_rank(), comm.get_size()
        self.x = torch.zeros(COUNT * self.size, dtype=dtype, device="cuda")
        self.out = torch.zeros(COUNT * self.size, dtype=dtype, device="cuda")
        self.base = torch.arange(COUNT * self.size, device="cuda") % 101
        self.wrong = None  # a soak counts differences here, on the device

    def of(self, rank, step):
        """Returns rank `rank`'s input in replay `step`."""
        return (self.base + 3 * rank + 5 * step).to(self.x.dtype)

    def all(self, step):
        return [self.of(r, step) for r in range(self.size)]

    def fill(self, step):
        self.x.copy_(self.of(self.rank, step))
        self.out.fill_(99)

    def same(self, got, expected):
        if self.wrong is None:
            assert torch.equal(got, expected)
        else:
            self.wrong += (got != expected).sum()


class AllReduce(Case):
    def issue(self, async_op):
        return self.comm.all_reduce(self.x, to.ReduceOp.SUM, async_op)

    def check(self, step):
        self.same(self.x, sum(self.all(step)))


class AllReduceComposed(Case):
    def __init__(self, comm):
        super().__init__(comm, torch.int32)

    def issue(self, async_op):
        return self.comm.all_reduce(self.x, to.ReduceOp.BXOR, async_op)

    def check(self, step):
        expected = torch.zeros_like(self.x)
        for part in self.all(step):
            expected ^= part
        self.same(self.x, expected)


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
        self.same(self.x, sum(self.all(step)) * (0.5 * (step + 1)))


class Reduce(Case):
    def issue(self, async_op):
        return self.comm.reduce(self.x, 1, to.ReduceOp.MAX, async_op)

    def check(self, step):
        expected = self.of(self.size - 1, step) if self.rank == 1 else self.of(self.rank, step)
        self.same(self.x, expected)


class Broadcast(Case):
    def issue(self, async_op):
        return self.comm.broadcast(self.x, 1, async_op)

    def check(self, step):
        self.same(self.x, self.of(1, step))


class AllGather(Case):
    def __init__(self, comm):
        super().__init__(comm)
        self.outs = [torch.zeros(COUNT, device="cuda") for _ in range(self.size)]

    def issue(self, async_op):
        return self.comm.all_gather(self.outs, self.x[:COUNT], async_op)

    def check(self, step):
        for r in range(self.size):
            self.same(self.outs[r], self.of(r, step)[:COUNT])


class AllGatherSingle(Case):
    def issue(self, async_op):
        return self.comm.all_gather_single(self.out, self.x[:COUNT], async_op)

    def check(self, step):
        self.same(self.out, torch.cat([part[:COUNT] for part in self.all(step)]))


def counts_of(size):
    """Returns a different number of elements for each rank; one of them has none."""
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
            self.same(self.outs[r], self.of(r, step)[:count])


class ReduceScatter(Case):
    def issue(self, async_op):
        return self.comm.reduce_scatter(self.out[:COUNT], list(self.x.chunk(self.size)), to.ReduceOp.SUM, async_op)

    def check(self, step):
        self.same(self.out[:COUNT], sum(self.all(step)).chunk(self.size)[self.rank])


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
        self.same(self.out[:count], expected)
        self.same(self.out[count:], torch.full_like(self.out[count:], 99))


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
        self.same(self.out[: len(expected)], expected)
        self.same(self.out[len(expected) :], torch.full_like(self.out[len(expected) :], 99))


class AllToAllSingle(Case):
    def issue(self, async_op):
        return self.comm.all_to_all_single(self.out, self.x, async_op)

    def check(self, step):
        self.same(self.out, torch.cat([part.chunk(self.size)[self.rank] for part in self.all(step)]))


class AllToAll(AllToAllSingle):
    def issue(self, async_op):
        return self.comm.all_to_all(list(self.out.chunk(self.size)), list(self.x.chunk(self.size)), async_op)


class Gather(Case):
    def issue(self, async_op):
        outs = list(self.out.chunk(self.size)) if self.rank == 0 else []
        return self.comm.gather(outs, self.x[:COUNT], 0, async_op)

    def check(self, step):
        if self.rank == 0:
            self.same(self.out, torch.cat([part[:COUNT] for part in self.all(step)]))


class GatherSingle(Gather):
    def issue(self, async_op):
        return self.comm.gather_single(self.out if self.rank == 0 else None, self.x[:COUNT], 0, async_op)


class Scatter(Case):
    def issue(self, async_op):
        inputs = list(self.x.chunk(self.size)) if self.rank == 1 else []
        return self.comm.scatter(self.out[:COUNT], inputs, 1, async_op)

    def check(self, step):
        self.same(self.out[:COUNT], self.of(1, step).chunk(self.size)[self.rank])


class Batch(Case):
    def issue(self, async_op):
        batch = self.comm.batch_op_create()
        batch.send(self.x, (self.rank + 1) % self.size)
        batch.recv(self.out, (self.rank - 1) % self.size)
        return batch.issue(async_op)

    def check(self, step):
        self.same(self.out, self.of((self.rank - 1) % self.size, step))


class SendRecv(Case):
    def issue(self, async_op):
        if self.rank == 0:
            return self.comm.send(self.x, 1, async_op)
        if self.rank == 1:
            return self.comm.recv(self.out, 0, async_op)
        return None

    def check(self, step):
        if self.rank == 1:
            self.same(self.out, self.of(0, step))


class Ring(Case):
    """Every rank sends to the next one and receives from the previous one, in pieces."""

    def issue(self, async_op):
        batch = self.comm.batch_op_create()
        for mine, theirs in zip(self.x.chunk(3), self.out.chunk(3), strict=True):
            batch.send(mine, (self.rank + 1) % self.size)
            batch.recv(theirs, (self.rank - 1) % self.size)
        return batch.issue(async_op)

    def check(self, step):
        self.same(self.out, self.of((self.rank - 1) % self.size, step))


class Barrier(Case):
    """No rank leaves before all have entered: by the clock of the one host, with one rank that is late."""

    def fill(self, step):
        super().fill(step)
        if self.rank == step % self.size:
            time.sleep(0.05)
        self.arrivals = time.monotonic()

    def issue(self, async_op):
        return self.comm.barrier(async_op)

    def check(self, step):
        torch.cuda.synchronize()
        times = torch.zeros(self.size, 2, dtype=torch.float64, device="cuda")
        mine = torch.tensor([self.arrivals, time.monotonic()], dtype=torch.float64, device="cuda")
        self.comm.all_gather_single(times, mine, async_op=False)
        arrivals, went = times.unbind(1)
        assert went.min() >= arrivals.max()


class CountedBarrier(Case):
    """Each rank writes the number of its entries into the memory of all ranks, and reads all counts after the
    barrier."""

    def __init__(self, comm):
        super().__init__(comm)
        self.window = comm.new_window(to.symmetric_empty(self.size, torch.int64, comm))
        self.counts = self.window.get_tensor()
        self.others = [self.window.map_remote_tensor(r) for r in range(self.size)]
        self.turn = torch.zeros((), dtype=torch.int64, device="cuda")

    def fill(self, step):
        self.turn += 1
        for counts in self.others:
            torch.add(self.turn, 0, out=counts[self.rank])

    def issue(self, async_op):
        return self.comm.barrier(async_op)

    def check(self, step):
        # A rank that is ahead may have entered the next barrier, and cannot have left it.
        self.wrong += ((self.counts < self.turn) | (self.counts > self.turn + 1)).sum()


CASES = [AllReduce, AllReduceComposed, AllReducePremul, Reduce, Broadcast, AllGather, AllGatherSingle, AllGatherV,
         ReduceScatter, ReduceScatterSingle, ReduceScatterV, AllToAllSingle, AllToAll, AllToAllVSingle, Gather,
         GatherSingle, Scatter, Batch, SendRecv, Ring, Barrier]  # fmt: skip
# Operations that custom collectives run instead of NCCL at this size.
CUSTOM = [AllReduce, Broadcast, AllGather, AllGatherSingle, ReduceScatter, ReduceScatterSingle, AllToAllSingle,
          AllToAll, AllToAllVSingle]  # fmt: skip


def each(kinds):
    """Returns a mark: every operation with the default, and over NCCL those that custom collectives would run."""
    grid = [("comm", kind) for kind in kinds] + [("nccl_comm", kind) for kind in CUSTOM]
    return pytest.mark.parametrize(
        ("on", "kind"), grid, indirect=["on"], ids=lambda value: getattr(value, "__name__", value)
    )


def capture(case, mode):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work = case.issue(mode != "sync")
        if mode == "wait" and work is not None:
            work.wait()
    if work is not None:
        assert not work.is_completed()  # it runs at each replay
        work.wait()  # no-op: the capture is over
    return graph
