"""Ranks whose numbers of rows differ: an error on all of them, with both numbers, and at once."""

from __future__ import annotations

import time

import pytest
import torch
from overlap_cases import Draw, Gather
from test_failures import METHODS, call_of

import torch_overlap as to
from torch_overlap.testing import run_ranks

SECONDS = 60  # limit of a wait: the error is raised long before


def run_differing_tokens(comm: to.TorchComm, name: str, seed: int) -> None:
    case, other = METHODS[name][1](comm), Gather(comm)
    call = call_of(name, case)
    call()
    rank, last = comm.get_rank(), comm.get_size() - 1
    if rank == last:
        case.buffer.set_active_tokens(case.tokens - 1)
        case.active -= 1
        case.tokens -= 1
        case.rows = case.buffer.get_buffer(local_chunk=True).shape[0]
        call = call_of(name, case)
    begin = time.monotonic()
    with pytest.raises(to.Error) as info:
        call()
    assert time.monotonic() - begin < SECONDS
    text = str(info.value)
    assert "expected the same number of rows on all ranks" in text, text
    assert f"got {case.tokens} on rank {rank} and {25 - case.tokens} on rank" in text, text
    with pytest.raises(to.StateError, match="expected a usable buffer"):
        call()
    comm.barrier(async_op=False)
    other.step(seed)  # another buffer of the same ranks


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), ("local", 2)])
def test_active_tokens_that_differ(name: str, backend: str, size: int, seed: int) -> None:
    run_ranks(run_differing_tokens, size, name, seed, backend=backend, timeout=120)


def run_differing_shapes(comm: to.TorchComm, seed: int) -> None:
    """The channel of the operator exists, so the mismatch is detected only on the device."""
    draw = Draw(seed)
    weight = draw(8, 16)
    to.ops.all_gather_matmul(draw(32, 16), [weight], comm, algorithm="p2p")
    rows = 16 + comm.get_rank()
    with pytest.raises(to.InvalidValueError, match=f"number of rows on all ranks, got {2 * rows} on rank"):
        to.ops.all_gather_matmul(draw(rows, 16), [weight], comm, algorithm="p2p")
    with pytest.raises(to.UnsupportedError, match="an earlier operation ended half way; reconfigure"):
        to.ops.all_gather_matmul(draw(32, 16), [weight], comm, algorithm="p2p")
    # The communicator stays usable.
    (y,), _ = to.ops.all_gather_matmul(torch.ones(4, 16), [torch.ones(8, 16)], comm, algorithm="pipelined")
    assert (y == 16).all()


def test_shapes_that_differ(seed: int) -> None:
    run_ranks(run_differing_shapes, 2, seed, timeout=120)


def run_differing_ways(comm: to.TorchComm, seed: int) -> None:
    """The operators write to different places, and wait for different flags: one would read memory that nobody
    wrote."""
    draw = Draw(seed)
    rank = comm.get_rank()
    x, weight, other = draw(2, 8), draw(16, 8), draw(32, 16)  # also two rows of a shared buffer

    def scatter() -> None:
        to.ops.matmul_reduce_scatter(x, weight, comm, algorithm="p2p")

    def bulk() -> None:
        to.ops.bulk_overlap_matmul(x, weight, other, comm, collective="reduce_scatter", algorithm="bulk")

    scatter()
    bulk()
    ways = ("each rank's rows as one", "pieces of all columns, 1")
    got = f"got {ways[rank]} on rank {rank} and {ways[1 - rank]} on rank {1 - rank}"
    with pytest.raises(to.InvalidValueError, match=f"expected the same operator and algorithm on all ranks, {got}"):
        (scatter, bulk)[rank]()


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_operators_that_differ(backend: str, seed: int) -> None:
    run_ranks(run_differing_ways, 2, seed, backend=backend, timeout=120)
