"""Random operations against a reference: operation, dtype, size, group, sync or async, thread.

500 draws; `make stress` does 10,000 (TORCH_OVERLAP_STRESS=20). TEST_SEED repeats a run, whose seed a failure prints.
"""

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_overlap as to
from torch_overlap.testing import run_ranks
from torch_overlap.testing.reference import DTYPES, assert_equal, assert_reduced, is_legal, poisoned, rank_input

DRAWS = 500 * int(os.environ.get("TORCH_OVERLAP_STRESS", "1"))
PENDING = 6  # asynchronous operations at a time

Check = Callable[[], None]
Draw = Callable[["Problem"], tuple[to.TorchWork, Check]]


class Problem:
    """One draw, the same on every rank of the group."""

    def __init__(self, dice: random.Random, comm: to.TorchComm, seed: int) -> None:
        self.comm, self.seed = comm, seed
        self.rank, self.size = comm.get_rank(), comm.get_size()
        self.dtype = dice.choice(DTYPES)
        self.numel = dice.choice([0, 1, 2, 3, 17, 256, 1000])
        self.root = dice.randrange(self.size)
        self.async_op = dice.random() < 0.7
        kinds = [kind for kind in to.RedOpType.__members__.values() if is_legal(kind, self.dtype)]
        kind = dice.choice([one for one in kinds if one is not to.RedOpType.PREMUL_SUM])
        self.op = to.ReduceOp(kind)

    def input(self, rank: int, parts: int = 1) -> Tensor:
        return rank_input(self.seed, rank, (parts * self.numel,), self.dtype)

    def inputs(self, parts: int = 1) -> list[Tensor]:
        return [self.input(rank, parts) for rank in range(self.size)]

    def part(self, rank: int, index: int) -> Tensor:
        return self.input(rank, self.size)[index * self.numel : (index + 1) * self.numel]

    def out(self, parts: int = 1) -> Tensor:
        return poisoned((parts * self.numel,), self.dtype)


def all_reduce(p: Problem) -> tuple[to.TorchWork, Check]:
    x = p.input(p.rank)
    return p.comm.all_reduce(x, p.op, p.async_op), lambda: assert_reduced(x, p.op, p.inputs())


def reduce(p: Problem) -> tuple[to.TorchWork, Check]:
    x = p.input(p.rank)

    def check() -> None:
        if p.rank == p.root:
            assert_reduced(x, p.op, p.inputs())
        else:
            assert_equal(x, p.input(p.rank), "reduce, not the root")

    return p.comm.reduce(x, p.root, p.op, p.async_op), check


def broadcast(p: Problem) -> tuple[to.TorchWork, Check]:
    x = p.input(p.rank) if p.rank == p.root else p.out()
    return p.comm.broadcast(x, p.root, p.async_op), lambda: assert_equal(x, p.input(p.root), "broadcast")


def all_gather(p: Problem) -> tuple[to.TorchWork, Check]:
    outs = [p.out() for _ in range(p.size)]

    def check() -> None:
        for rank, got in enumerate(outs):
            assert_equal(got, p.input(rank), "all_gather")

    return p.comm.all_gather(outs, p.input(p.rank), p.async_op), check


def all_gather_single(p: Problem) -> tuple[to.TorchWork, Check]:
    out = p.out(p.size)
    work = p.comm.all_gather_single(out, p.input(p.rank), p.async_op)
    return work, lambda: assert_equal(out, torch.cat(p.inputs()), "all_gather_single")


def reduce_scatter_single(p: Problem) -> tuple[to.TorchWork, Check]:
    out = p.out()
    work = p.comm.reduce_scatter_single(out, p.input(p.rank, p.size), p.op, p.async_op)
    return work, lambda: assert_reduced(out, p.op, [p.part(rank, p.rank) for rank in range(p.size)])


def reduce_scatter(p: Problem) -> tuple[to.TorchWork, Check]:
    out = p.out()
    parts = [p.part(p.rank, index) for index in range(p.size)]
    work = p.comm.reduce_scatter(out, parts, p.op, p.async_op)
    return work, lambda: assert_reduced(out, p.op, [p.part(rank, p.rank) for rank in range(p.size)])


def all_to_all_single(p: Problem) -> tuple[to.TorchWork, Check]:
    out = p.out(p.size)
    work = p.comm.all_to_all_single(out, p.input(p.rank, p.size), p.async_op)
    expected = torch.cat([p.part(rank, p.rank) for rank in range(p.size)])
    return work, lambda: assert_equal(out, expected, "all_to_all_single")


def scatter(p: Problem) -> tuple[to.TorchWork, Check]:
    out = p.out()
    parts = [p.part(p.root, index) for index in range(p.size)] if p.rank == p.root else []
    work = p.comm.scatter(out, parts, p.root, p.async_op)
    return work, lambda: assert_equal(out, p.part(p.root, p.rank), "scatter")


def gather(p: Problem) -> tuple[to.TorchWork, Check]:
    outs = [p.out() for _ in range(p.size)] if p.rank == p.root else []

    def check() -> None:
        for rank, got in enumerate(outs):
            assert_equal(got, p.input(rank), "gather")

    return p.comm.gather(outs, p.input(p.rank), p.root, p.async_op), check


def ring(p: Problem) -> tuple[to.TorchWork, Check]:
    out = p.out()
    batch = p.comm.batch_op_create()
    batch.send(p.input(p.rank), (p.rank + 1) % p.size)
    before = (p.rank - 1) % p.size
    batch.recv(out, before)
    return batch.issue(p.async_op), lambda: assert_equal(out, p.input(before), "ring")


OPS: tuple[Draw, ...] = (
    all_reduce, reduce, broadcast, all_gather, all_gather_single, reduce_scatter, reduce_scatter_single,
    all_to_all_single, scatter, gather, ring,
)  # fmt: skip


def run_random(comm: to.TorchComm, seed: int, draws: int) -> None:
    size, rank = comm.get_size(), comm.get_rank()
    backwards = comm.split(list(reversed(range(size))))
    part = comm.split([0] if rank == 0 else list(range(1, size)))
    assert backwards is not None
    assert part is not None
    groups = [comm, backwards, part]
    dice = random.Random(seed)
    pending: list[tuple[str, Any]] = []

    def settle(leave: int) -> None:
        while len(pending) > leave:
            what, future = pending.pop(0)
            try:
                work, check = future.result(60)
                work.wait()
                check()
            except BaseException as error:
                raise AssertionError(f"TEST_SEED={seed}, draw {what}: {error}") from error

    # A thread a group: operations of one communicator are issued in one order, those of different ones in any.
    pools = [ThreadPoolExecutor(1) for _ in groups]
    for turn in range(draws):
        which = dice.randrange(len(groups))
        draw = dice.choice(OPS)
        # The members of `part` differ in number: what is drawn next must not depend on it.
        problem = Problem(random.Random(dice.random()), groups[which], seed + turn)
        what = f"{turn}: {draw.__name__} of {problem.numel} {problem.dtype}, {problem.op}, group {which}"
        pending.append((what, pools[which].submit(draw, problem)))
        settle(dice.randrange(PENDING))
    settle(0)
    for pool in pools:
        pool.shutdown()
    for group in (part, backwards):
        group.finalize()


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_random_operations_agree_with_the_reference(backend: str, seed: int) -> None:
    run_ranks(run_random, 3, seed, DRAWS // 2, backend=backend, timeout=max(60.0, DRAWS / 5))
