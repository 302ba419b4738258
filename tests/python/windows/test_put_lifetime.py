"""A put keeps its source alive until it has run, whatever the caller drops, and takes the values of the call."""

from __future__ import annotations

import gc
import secrets

import pytest
import torch

import torch_overlap as to
from torch_overlap.testing import run_ranks

ELEMENTS = 1 << 16
PUTS = 12


def expected(seed: int, rank: int, device: torch.device) -> torch.Tensor:
    """Returns the values that `rank` puts: one row for each put."""
    random = torch.Generator().manual_seed(seed + rank)
    return torch.randn(PUTS, ELEMENTS, generator=random).to(device)


def overwrite(device: torch.device) -> list[torch.Tensor]:
    """Writes to memory that was freed just now, if any was."""
    gc.collect()
    return [torch.full((ELEMENTS,), float("nan"), device=device) for _ in range(4)]


def drop_sources(comm: to.TorchComm, seed: int, keeps_work: bool) -> None:
    rank, size, device = comm.get_rank(), comm.get_size(), comm.get_device()
    right, left = (rank + 1) % size, (rank - 1) % size
    window = comm.new_window(to.symmetric_empty((PUTS, ELEMENTS), torch.float32, comm).fill_(float("nan")))
    comm.barrier(False).wait()
    mine = expected(seed, rank, device)
    works = []
    for row in range(PUTS):
        source = mine[row].clone()
        work = window.put(source, right, row * ELEMENTS, async_op=True)
        if keeps_work:
            works.append(work)
        del source, work
        overwrite(device)
    window.signal(right, async_op=True)
    window.wait_signal(left, async_op=False).wait()
    torch.testing.assert_close(window.get_tensor(), expected(seed, left, device), rtol=0, atol=0)
    for work in works:
        work.wait()
    window.tensor_deregister()


@pytest.mark.parametrize("keeps_work", [True, False])
@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_a_source_may_be_dropped_while_its_put_runs(backend: str, keeps_work: bool) -> None:
    run_ranks(drop_sources, 3, secrets.randbits(32), keeps_work, backend=backend)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("keeps_work", [True, False])
def test_a_source_may_be_dropped_while_its_put_runs_on_gpus(keeps_work: bool) -> None:
    run_ranks(drop_sources, 2, secrets.randbits(32), keeps_work, backend="nccl", device="cuda")


def drop_sources_of_another_stream(comm: to.TorchComm, seed: int) -> None:
    """The source is made on a side stream, and its memory is asked for again there while the put has not begun."""
    rank, size, device = comm.get_rank(), comm.get_size(), comm.get_device()
    right, left = (rank + 1) % size, (rank - 1) % size
    window = comm.new_window(to.symmetric_empty((PUTS, ELEMENTS), torch.float32, comm).fill_(float("nan")))
    mine = expected(seed, rank, device)
    comm.barrier(False).wait()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for row in range(PUTS):
        with torch.cuda.stream(side):
            source = mine[row].clone()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda._sleep(20_000_000)  # the put waits for the current stream
        window.put(source, right, row * ELEMENTS, async_op=True)
        del source
        with torch.cuda.stream(side):
            overwrite(device)
    window.signal(right, async_op=True)
    window.wait_signal(left, async_op=False).wait()
    torch.testing.assert_close(window.get_tensor(), expected(seed, left, device), rtol=0, atol=0)
    window.tensor_deregister()


@pytest.mark.gpu(2)
def test_memory_of_a_side_stream_is_not_reused_before_its_put() -> None:
    run_ranks(drop_sources_of_another_stream, 2, secrets.randbits(32), backend="nccl", device="cuda")


def write_after_the_call(comm: to.TorchComm, seed: int) -> None:
    """A synchronous put has read its source when it returns."""
    rank, size, device = comm.get_rank(), comm.get_size(), comm.get_device()
    window = comm.new_window(to.symmetric_empty((PUTS, ELEMENTS), torch.float32, comm).fill_(float("nan")))
    comm.barrier(False)
    source = torch.empty(ELEMENTS)
    mine = expected(seed, rank, device)
    for row in range(PUTS):
        source.copy_(mine[row])
        window.put(source, (rank + 1) % size, row * ELEMENTS, async_op=False)
        source.fill_(float("nan"))
    window.signal((rank + 1) % size, async_op=False)
    window.wait_signal((rank - 1) % size, async_op=False)
    torch.testing.assert_close(window.get_tensor(), expected(seed, (rank - 1) % size, device), rtol=0, atol=0)
    window.tensor_deregister()


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_a_source_may_be_overwritten_after_a_synchronous_put(backend: str) -> None:
    run_ranks(write_after_the_call, 2, secrets.randbits(32), backend=backend)
