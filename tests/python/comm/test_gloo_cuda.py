"""The gloo backend with CUDA tensors, which are staged on the host: values, and the order relative to streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_values import assert_equal, assert_reduced, poisoned, rank_input

import torch_overlap as to
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.gpu(1)

SIZE = 3
SHAPE = (129, 3)


def _busy() -> None:
    """Keeps the current stream busy, so that work that does not wait for it runs too early."""
    torch.cuda._sleep(100_000_000)


class Late:
    """Tensors whose values are written late on the current stream."""

    def __init__(self, comm: to.TorchComm, seed: int, dtype: torch.dtype) -> None:
        self.rank, self.size, self.seed, self.dtype = comm.get_rank(), comm.get_size(), seed, dtype
        self.device = comm.get_device()

    def of(self, rank: int, salt: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
        return rank_input(self.seed + 7919 * salt, rank, shape, self.dtype)

    def every(self, salt: int, shape: tuple[int, ...] = SHAPE) -> list[torch.Tensor]:
        return [self.of(rank, salt, shape) for rank in range(self.size)]

    def mine(self, salt: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
        value = self.of(self.rank, salt, shape).to(self.device)
        tensor = poisoned(shape, self.dtype, self.device)
        _busy()
        return tensor.copy_(value)

    def out(self, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
        return poisoned(shape, self.dtype, self.device)


def _values(comm: Any, seed: int, dtype: torch.dtype, async_op: bool, own_stream: bool) -> None:
    late = Late(comm, seed, dtype)
    rank, size = late.rank, late.size
    rows = (size, *SHAPE)
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        x = late.mine(1)
        comm.all_reduce(x, to.ReduceOp.MAX, async_op).wait()
        assert_reduced(x, to.ReduceOp.MAX, late.every(1))

        x = late.mine(2)
        comm.reduce(x, 1, to.ReduceOp.MIN, async_op).wait()
        if rank == 1:
            assert_reduced(x, to.ReduceOp.MIN, late.every(2))
        else:
            assert_equal(x, late.of(rank, 2), "a rank that is not the root")

        x = late.mine(3)
        comm.broadcast(x, 2, async_op).wait()
        assert_equal(x, late.of(2, 3))

        x, out = late.mine(4), late.out(rows)
        comm.all_gather_single(out, x, async_op).wait()
        assert_equal(out, torch.stack(late.every(4)))
        assert_equal(x, late.of(rank, 4), "the input")

        x, out = late.mine(5, rows), late.out()
        comm.reduce_scatter_single(out, x, to.ReduceOp.MAX, async_op).wait()
        assert_reduced(out, to.ReduceOp.MAX, [every[rank] for every in late.every(5, rows)])

        x, out = late.mine(6, rows), late.out(rows)
        comm.all_to_all_single(out, x, async_op).wait()
        assert_equal(out, torch.stack([every[rank] for every in late.every(6, rows)]))

        parts = [late.out((r + 1, 3)) for r in range(size)]
        comm.all_gather_v(parts, late.mine(7, (rank + 1, 3)), async_op).wait()
        for r, part in enumerate(parts):
            assert_equal(part, late.of(r, 7, (r + 1, 3)), f"from rank {r}")

        x, outs = late.mine(8), [late.out() for _ in range(size)] if rank == 0 else []
        comm.gather(outs, x, 0, async_op).wait()
        for r, out in enumerate(outs):
            assert_equal(out, late.of(r, 8), f"from rank {r}")

        x, out = late.mine(9, rows), late.out()
        comm.scatter(out, list(x.unbind()) if rank == 1 else [], 1, async_op).wait()
        assert_equal(out, late.of(1, 9, rows)[rank])

        x, out = late.mine(10), late.out()
        batch = comm.batch_op_create()
        batch.send(x, (rank + 1) % size)
        batch.recv(out, (rank - 1) % size)
        batch.issue(async_op).wait()
        assert_equal(out, late.of((rank - 1) % size, 10))
    torch.cuda.synchronize()


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_values(seed: int, dtype: torch.dtype, async_op: bool, own_stream: bool) -> None:
    run_ranks(_values, SIZE, seed, dtype, async_op, own_stream, backend="gloo", device="cuda:0", timeout=120)


def _premul(comm: Any, seed: int) -> None:
    late = Late(comm, seed, torch.float32)
    factor = torch.full((), float("nan"), device=late.device)
    x = late.mine(1)
    factor.fill_(0.5)
    comm.all_reduce(x, to.ReduceOp.PREMUL_SUM(factor), async_op=True).wait()
    assert_reduced(x, to.ReduceOp.PREMUL_SUM(0.5), late.every(1), [0.5] * late.size)


def test_a_factor_on_the_device(seed: int) -> None:
    run_ranks(_premul, SIZE, seed, backend="gloo", device="cuda:0", timeout=120)


def _old_contents(comm: Any, seed: int) -> None:
    """Reads of an output's old contents on the stream complete before the result overwrites them."""
    late = Late(comm, seed, torch.float32)
    for root in range(late.size):
        out = late.of(late.rank, 1).to(late.device)
        copy = late.out()
        _busy()
        copy.copy_(out)
        comm.broadcast(out, root, async_op=True).wait()
        assert_equal(copy, late.of(late.rank, 1), "what was there before")
        assert_equal(out, late.of(root, 1))
    above = (late.rank + 1) % late.size
    out = late.of(late.rank, 2).to(late.device)
    copy = late.out()
    _busy()
    copy.copy_(out)
    send = comm.send(late.of(late.rank, 3).to(late.device), (late.rank - 1) % late.size, async_op=True)
    comm.recv(out, above, async_op=True).wait()
    send.wait()
    assert_equal(copy, late.of(late.rank, 2), "what was there before")
    assert_equal(out, late.of(above, 3))


def test_outputs_that_are_still_read(seed: int) -> None:
    run_ranks(_old_contents, SIZE, seed, backend="gloo", device="cuda:0", timeout=120)


def _any_stream(comm: Any, seed: int) -> None:
    """A result is complete when wait() returns: every stream sees it, without an event."""
    late = Late(comm, seed, torch.float32)
    own, other = torch.cuda.Stream(), torch.cuda.Stream()
    for turn in range(10):
        with torch.cuda.stream(own):
            x = late.mine(turn)
            work = comm.all_reduce(x, to.ReduceOp.MAX, async_op=True)
            _busy()  # on the caller's stream, which the result does not wait for
        work.wait()
        with torch.cuda.stream(other):
            seen = x.clone()
        other.synchronize()
        assert_reduced(seen, to.ReduceOp.MAX, late.every(turn))
        torch.cuda.synchronize()


def test_results_are_seen_by_every_stream(seed: int) -> None:
    run_ranks(_any_stream, SIZE, seed, backend="gloo", device="cuda:0", timeout=120)
