"""Buffers over two callbacks of an external framework: a Store, a process group of torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from overlap_cases import AG, BULK, E4M3, PIPELINE, RING, RS, Bulk, Gather, Scatter, make, store_group

import torch_overlap as to
from torch_overlap.testing import run_ranks


def all_methods(group: to.OverlapGroup, seed: int) -> None:
    cases = [
        Gather(group),
        Gather(group, E4M3, fill=True),
        Scatter(group, RING),
        Scatter(group, PIPELINE, torch.bfloat16),
        Bulk(group, AG),
        Bulk(group, RS),
        Scatter(group, RING, E4M3, atomic=True),
    ]
    for turn in range(3):
        for case in cases:
            case.step(seed + turn)
            assert ": shared memory, " in case.buffer.last_path()


def run_store(rank: int, size: int, store: Any, seed: int) -> None:
    group = store_group(rank, size, store)
    assert (group.get_rank(), group.get_size()) == (rank, size)
    all_methods(group, seed)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_store(size: int, seed: int) -> None:
    run_ranks(run_store, size, seed, comm=False)


def c10d_group(group: Any) -> to.OverlapGroup:
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def all_gather(mine: bytes) -> list[bytes]:
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, mine, group)
        return everyone

    return to.OverlapGroup(all_gather, lambda: dist.barrier(group), rank, size, torch.device("cpu"))


def run_c10d(rank: int, size: int, store: Any, seed: int) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    all_methods(c10d_group(None), seed)
    halves = [dist.new_group([r for r in range(size) if r % 2 == part]) for part in (0, 1)]
    all_methods(c10d_group(halves[rank % 2]), seed + rank % 2)


def test_a_process_group_and_parts_of_it(seed: int) -> None:
    run_ranks(run_c10d, 4, seed, comm=False)


def run_errors(rank: int, size: int, store: Any, seed: int) -> None:
    config = to.CommOverlapConfig(RS, PIPELINE, [8, 16], torch.float32, size)
    cpu = torch.device("cpu")

    def group_of(name: str, **changes: Any) -> to.OverlapGroup:
        steps = iter(range(1000))

        def all_gather(mine: bytes) -> list[bytes]:
            step = next(steps)
            store.set(f"{name}/{step}/{rank}", mine)
            return [store.get(f"{name}/{step}/{r}") for r in range(size)]

        everything = {"all_gather": all_gather, "barrier": lambda: None, **changes}
        return to.OverlapGroup(
            everything["all_gather"], everything["barrier"], rank, size, cpu, name, timedelta(seconds=60)
        )

    def raising(mine: bytes) -> list[bytes]:
        raise RuntimeError(f"no way to {rank}")

    with pytest.raises(RuntimeError, match=f"no way to {rank}"):
        to.CommOverlapBase(group_of("raising", all_gather=raising), config)
    with pytest.raises(
        to.InvalidValueError,
        match=rf"all_gather: expected the callback to return what {size} ranks gave, got 1 entries",
    ):
        to.CommOverlapBase(group_of("short", all_gather=lambda mine: [mine]), config)
    for wrong in (None, 3, [1] * size):
        with pytest.raises((TypeError, RuntimeError)):
            to.CommOverlapBase(group_of("type", all_gather=lambda mine, wrong=wrong: wrong), config)
    with pytest.raises(to.InvalidValueError, match="expected tp_size to be the size of the group"):
        to.CommOverlapBase(group_of("tp"), to.CommOverlapConfig(RS, PIPELINE, [8, 16], torch.float32, size + 1))
    with pytest.raises(to.InvalidValueError, match="expected the same on all ranks"):
        to.CommOverlapBase(group_of("digest"), to.CommOverlapConfig(RS, PIPELINE, [8 + rank, 16], torch.float32, size))
    for bad in (-1, size):
        with pytest.raises(to.InvalidValueError, match=rf"OverlapGroup: expected a rank in \[0, {size}\), got {bad}"):
            to.OverlapGroup(raising, lambda: None, bad, size, cpu)
    with pytest.raises(to.InvalidValueError, match="OverlapGroup: expected a rank in"):
        to.OverlapGroup(raising, lambda: None, 0, 0, cpu)
    for not_callable in (None, 3):
        with pytest.raises(TypeError):
            to.OverlapGroup(not_callable, lambda: None, rank, size, cpu)
        with pytest.raises(TypeError):
            to.OverlapGroup(raising, not_callable, rank, size, cpu)
    all_methods(store_group(rank, size, store), seed)


def test_wrong_callbacks(seed: int) -> None:
    run_ranks(run_errors, 2, seed, comm=False)


def run_unreachable(rank: int, size: int, store: Any) -> None:
    """Without a communicator there is no fallback."""
    pretence = to._C._PretendUnreachable()
    try:
        with pytest.raises(
            to.UnsupportedError,
            match="CommOverlap: expected ranks that reach each other's memory, or a communicator; ranks pretend that",
        ):
            make(store_group(rank, size, store), AG, BULK, (8, 16), torch.float32)
    finally:
        del pretence


def test_ranks_out_of_reach_need_a_communicator() -> None:
    run_ranks(run_unreachable, 2, comm=False)


def run_lifetime(rank: int, size: int, store: Any, seed: int) -> None:
    """The buffer outlives the group, and the objects of which the callbacks were made."""
    case = Scatter(store_group(rank, size, store), RING)
    case.comm = None
    for turn in range(3):
        case.step(seed + turn)


def test_the_group_may_go_first(seed: int) -> None:
    run_ranks(run_lifetime, 2, seed, comm=False)
