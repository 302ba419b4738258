"""Random operations, the same on every rank of a group, and their expected results, for the random tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from rank_values import DTYPES, assert_equal, assert_reduced, is_legal, poisoned, rank_input
from torch import Tensor

import torch_overlap as to

PENDING = 6  # maximal number of pending asynchronous operations
COUNTS = [0, 1, 2, 3, 17, 256, 1000]
MANY = [4099, 65_537, 200_003]  # more than one piece of a message, on every backend; one draw in eight
FACTORS = [0.5, -1.25, 2.0, 0.75, -0.5, 1.5, 0.25, -2.0]  # exact in every type
LATE = [0, 0, 300_000]  # cycles by which an input is late on a GPU

Check = Callable[[], None]
Draw = Callable[["Problem"], tuple[to.TorchWork | None, Check]]


class Inbox:
    """A group's window, in which every draw has elements of its own: nothing is overwritten before it was compared."""

    def __init__(self, comm: to.TorchComm, dtype: torch.dtype, numel: int) -> None:
        self.window = comm.new_window(to.symmetric_empty(numel, dtype, comm))
        self._taken = 0

    def take(self, numel: int) -> slice:
        """Returns the next elements; called by the one thread of the group."""
        begin, self._taken = self._taken, self._taken + numel
        return slice(begin, self._taken)


class Problem:
    """One draw, the same on every rank of the group. The inputs of every rank are available, on the CPU."""

    def __init__(self, dice: random.Random, comm: to.TorchComm, seed: int, inbox: Inbox) -> None:
        self.comm, self.seed, self.inbox = comm, seed, inbox
        self.rank, self.size, self.device = comm.get_rank(), comm.get_size(), comm.get_device()
        self.dtype = dice.choice(DTYPES)
        self.numel = dice.choice(COUNTS if dice.random() < 0.875 else MANY)
        self.root = dice.randrange(self.size)
        self.async_op = dice.random() < 0.7
        kinds = [kind for kind in to.RedOpType.__members__.values() if is_legal(kind, self.dtype)]
        kind = dice.choice(kinds)
        self.late = dice.choice(LATE)
        self.other = dice.randrange(self.size)
        # Matrix from row to column, in elements; and the total of each rank.
        self.table = [[dice.choice(COUNTS[:5]) for _ in range(self.size)] for _ in range(self.size)]
        self.counts = self.table[0]
        self.factors: list[float] | None = None
        self.op = to.ReduceOp(kind) if kind is not to.RedOpType.PREMUL_SUM else self.premul(dice)

    def premul(self, dice: random.Random) -> to.ReduceOp:
        self.factors = [dice.choice(FACTORS) for _ in range(self.size)]
        mine = self.factors[self.rank]
        if dice.random() < 0.5:
            return to.ReduceOp.PREMUL_SUM(mine)
        real = torch.empty(0, dtype=self.dtype).real.dtype if self.dtype.is_complex else self.dtype
        return to.ReduceOp.PREMUL_SUM(torch.tensor(mine, device=self.device).to(real))

    def of(self, rank: int, numel: int | None = None) -> Tensor:
        return rank_input(self.seed, rank, (self.numel if numel is None else numel,), self.dtype)

    def every(self, numel: int | None = None) -> list[Tensor]:
        return [self.of(rank, numel) for rank in range(self.size)]

    def part(self, rank: int, index: int) -> Tensor:
        return self.of(rank, self.size * self.numel)[index * self.numel : (index + 1) * self.numel]

    def here(self, data: Tensor) -> Tensor:
        """Returns x on the device, written late."""
        staged = data.to(self.device)
        if self.device.type != "cuda":
            return staged
        torch.cuda._sleep(self.late)
        return staged.clone()

    def mine(self, numel: int | None = None) -> Tensor:
        return self.here(self.of(self.rank, numel))

    def out(self, numel: int | None = None) -> Tensor:
        return poisoned((self.numel if numel is None else numel,), self.dtype, self.device)

    def check_reduced(self, got: Tensor, inputs: list[Tensor]) -> None:
        assert_reduced(got, self.op, inputs, self.factors)


Drawn = tuple[to.TorchWork | None, Check]


def check_all(outs: list[Tensor], expected: Callable[[int], Tensor], what: str) -> Check:
    def check() -> None:
        for rank, got in enumerate(outs):
            assert_equal(got, expected(rank), what)

    return check


def all_reduce(p: Problem) -> Drawn:
    x = p.mine()
    return p.comm.all_reduce(x, p.op, p.async_op), lambda: p.check_reduced(x, p.every())


def reduce(p: Problem) -> Drawn:
    x = p.mine()

    def check() -> None:
        if p.rank == p.root:
            p.check_reduced(x, p.every())
        else:
            assert_equal(x, p.of(p.rank), "reduce, not the root")

    return p.comm.reduce(x, p.root, p.op, p.async_op), check


def broadcast(p: Problem) -> Drawn:
    x = p.mine() if p.rank == p.root else p.out()
    return p.comm.broadcast(x, p.root, p.async_op), lambda: assert_equal(x, p.of(p.root), "broadcast")


def all_gather(p: Problem) -> Drawn:
    outs = [p.out() for _ in range(p.size)]
    return p.comm.all_gather(outs, p.mine(), p.async_op), check_all(outs, p.of, "all_gather")


def all_gather_v(p: Problem) -> Drawn:
    outs = [p.out(count) for count in p.counts]
    work = p.comm.all_gather_v(outs, p.mine(p.counts[p.rank]), p.async_op)
    return work, check_all(outs, lambda rank: p.of(rank, p.counts[rank]), "all_gather_v")


def all_gather_single(p: Problem) -> Drawn:
    out = p.out(p.size * p.numel)
    work = p.comm.all_gather_single(out, p.mine(), p.async_op)
    return work, lambda: assert_equal(out, torch.cat(p.every()), "all_gather_single")


def reduce_scatter_single(p: Problem) -> Drawn:
    out = p.out()
    work = p.comm.reduce_scatter_single(out, p.mine(p.size * p.numel), p.op, p.async_op)
    return work, lambda: p.check_reduced(out, [p.part(rank, p.rank) for rank in range(p.size)])


def reduce_scatter(p: Problem) -> Drawn:
    out = p.out()
    parts = [p.here(p.part(p.rank, index)) for index in range(p.size)]
    work = p.comm.reduce_scatter(out, parts, p.op, p.async_op)
    return work, lambda: p.check_reduced(out, [p.part(rank, p.rank) for rank in range(p.size)])


def reduce_scatter_v(p: Problem) -> Drawn:
    out = p.out(p.counts[p.rank])
    whole = [one.split(p.counts) for one in p.every(sum(p.counts))]
    work = p.comm.reduce_scatter_v(out, [p.here(part) for part in whole[p.rank]], p.op, p.async_op)
    return work, lambda: p.check_reduced(out, [parts[p.rank] for parts in whole])


def all_to_all(p: Problem) -> Drawn:
    outs = [p.out() for _ in range(p.size)]
    work = p.comm.all_to_all(outs, [p.here(p.part(p.rank, index)) for index in range(p.size)], p.async_op)
    return work, check_all(outs, lambda rank: p.part(rank, p.rank), "all_to_all")


def all_to_all_single(p: Problem) -> Drawn:
    out = p.out(p.size * p.numel)
    work = p.comm.all_to_all_single(out, p.mine(p.size * p.numel), p.async_op)
    expected = torch.cat([p.part(rank, p.rank) for rank in range(p.size)])
    return work, lambda: assert_equal(out, expected, "all_to_all_single")


def all_to_all_v_single(p: Problem) -> Drawn:
    gives, takes = p.table[p.rank], [row[p.rank] for row in p.table]
    out = p.out(sum(takes))
    work = p.comm.all_to_all_v_single(out, p.mine(sum(gives)), takes, gives, p.async_op)
    expected = [p.of(rank, sum(row)).split(row)[p.rank] for rank, row in enumerate(p.table)]
    return work, lambda: assert_equal(out, torch.cat(expected), "all_to_all_v_single")


def scatter(p: Problem) -> Drawn:
    out = p.out()
    parts = [p.here(p.part(p.root, index)) for index in range(p.size)] if p.rank == p.root else []
    work = p.comm.scatter(out, parts, p.root, p.async_op)
    return work, lambda: assert_equal(out, p.part(p.root, p.rank), "scatter")


def gather(p: Problem) -> Drawn:
    outs = [p.out() for _ in range(p.size)] if p.rank == p.root else []
    return p.comm.gather(outs, p.mine(), p.root, p.async_op), check_all(outs, p.of, "gather")


def gather_single(p: Problem) -> Drawn:
    out = p.out(p.size * p.numel) if p.rank == p.root else None
    work = p.comm.gather_single(out, p.mine(), p.root, p.async_op)

    def check() -> None:
        if out is not None:
            assert_equal(out, torch.cat(p.every()), "gather_single")

    return work, check


def message(p: Problem) -> Drawn:
    """Sends from one rank to another, not in a batch; the other ranks have nothing to do."""
    if p.other != p.root and p.rank == p.root:
        x = p.mine()
        return p.comm.send(x, p.other, p.async_op), lambda: assert_equal(x, p.of(p.rank), "send")
    if p.other != p.root and p.rank == p.other:
        out = p.out()
        return p.comm.recv(out, p.root, p.async_op), lambda: assert_equal(out, p.of(p.root), "recv")
    return None, lambda: None


def ring(p: Problem) -> Drawn:
    out = p.out()
    batch = p.comm.batch_op_create()
    batch.send(p.mine(), (p.rank + 1) % p.size)
    before = (p.rank - 1) % p.size
    batch.recv(out, before)
    return batch.issue(p.async_op), lambda: assert_equal(out, p.of(before), "ring")


def written_by_the_one_before(p: Problem) -> Drawn:
    """Puts, with the signal or before it, into the next rank's window."""
    window, numel = p.inbox.window, min(p.numel, COUNTS[-1])
    place = p.inbox.take(numel)
    after, before = (p.rank + 1) % p.size, (p.rank - 1) % p.size
    x = p.here(rank_input(p.seed, p.rank, (numel,), window.dtype))
    with_signal = p.other % 2 == 0
    window.put(x, after, place.start, p.async_op, signal=with_signal)
    if not with_signal:
        window.signal(after, p.async_op)
    # If groups share a stream, in another order on each rank, a wait would delay the operations that it waits for.
    work = window.wait_signal(before, p.async_op or p.device.type == "cuda")
    expected = rank_input(p.seed, before, (numel,), window.dtype)
    return work, lambda: assert_equal(window.get_tensor()[place], expected, "put")


def barrier(p: Problem) -> Drawn:
    return p.comm.barrier(p.async_op), lambda: None


OPS: tuple[Draw, ...] = (
    all_reduce, reduce, broadcast, all_gather, all_gather_v, all_gather_single, reduce_scatter, reduce_scatter_v,
    reduce_scatter_single, all_to_all, all_to_all_single, all_to_all_v_single, scatter, gather, gather_single, message,
    ring, written_by_the_one_before, barrier,
)  # fmt: skip


def run_random(comm: to.TorchComm, seed: int, draws: int) -> None:
    """Runs on three groups with a thread each; on GPUs from three streams, and waited for on any of them."""
    size, rank, device = comm.get_size(), comm.get_rank(), comm.get_device()
    backwards = comm.split(list(reversed(range(size))))
    part = comm.split([0] if rank == 0 else list(range(1, size)))
    assert backwards is not None
    assert part is not None
    groups = [comm, backwards, part]
    streams: list[Any] = [None]  # the thread's own
    if device.type == "cuda":
        streams += [torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)]
    dice = random.Random(seed)
    dtypes = dice.sample(DTYPES, len(groups))
    inboxes = [Inbox(*of, 8 * COUNTS[-1] + 64 * draws) for of in zip(groups, dtypes, strict=True)]
    pending: list[tuple[str, Any, Any]] = []

    def begin() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def issue(draw: Draw, problem: Problem, stream: Any, before: Any) -> Drawn:
        if before is not None:
            before.exception()  # returns when that draw is issued
        with torch.cuda.stream(stream):
            return draw(problem)

    def settle(leave: int) -> None:
        while len(pending) > leave:
            what, stream, future = pending.pop(0)
            try:
                work, check = future.result(60)
                with torch.cuda.stream(stream):
                    if work is not None:
                        work.wait()
                    check()
            except BaseException as error:
                raise AssertionError(f"TEST_SEED={seed}, draw {what}: {error}") from error

    # One thread per group: operations of one communicator are issued in one order, those of different ones in any.
    pools = [ThreadPoolExecutor(1, initializer=begin) for _ in groups]
    # A stream runs what it has in order of issue. All ranks issue on it in the same order, or two groups would wait for
    # each other.
    last_on: list[Any] = [None] * len(streams)
    for turn in range(draws):
        which = dice.randrange(len(groups))
        draw = dice.choice(OPS)
        first, second = dice.choice(list(itertools.product(range(len(streams)), repeat=2)))
        # The number of members of `part` differs by rank: the next draws must not depend on it.
        problem = Problem(random.Random(dice.random()), groups[which], seed + turn, inboxes[which])
        if not problem.async_op:
            second = first  # the result is ready on that stream
        what = f"{turn}: {draw.__name__} of {problem.numel} {problem.dtype}, {problem.op}, group {which}, "
        what += f"window of {dtypes[which]}, "
        what += f"streams {first} and {second}"
        before = last_on[first] if device.type == "cuda" else None
        last_on[first] = pools[which].submit(issue, draw, problem, streams[first], before)
        pending.append((what, streams[second], last_on[first]))
        settle(dice.randrange(PENDING))
    settle(0)
    for pool in pools:
        pool.shutdown()
    for inbox in inboxes:
        inbox.window.tensor_deregister()
    for group in (part, backwards):
        group.finalize()
