"""split: its members, their order, and its options."""

import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from rank_values import assert_equal, assert_reduced, rank_input

from torch_overlap import (
    CommOptions,
    InvalidTypeError,
    InvalidValueError,
    ReduceOp,
    TorchComm,
    comm_names,
    get_comm,
    new_comm,
)
from torch_overlap.testing import run_ranks


def check_works(comm: TorchComm, members: list[int], seed: int) -> None:
    """Only the members take part; rank r of the child is members[r]."""
    assert comm.get_size() == len(members)
    tensor = rank_input(seed, members[comm.get_rank()], (9,), torch.int32).to(comm.get_device())
    gathered = tensor.new_empty((len(members), 9))
    comm.all_gather_single(gathered, tensor, False).wait()
    assert_equal(gathered, torch.stack([rank_input(seed, rank, (9,), torch.int32) for rank in members]))
    comm.all_reduce(tensor, ReduceOp.SUM, True).wait()
    assert_reduced(tensor, ReduceOp.SUM, [rank_input(seed, rank, (9,), torch.int32) for rank in members])


def run_groups(comm: TorchComm, seed: int) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    groupings = [
        [list(range(size))],  # all
        [list(reversed(range(size)))],  # all, in another order
        [[r] for r in range(size)],  # one rank each
        [[r for r in range(size) if r % 2 == parity] for parity in range(2)],  # interleaved
        [list(range(size // 2)), list(range(size // 2, size))],  # halves
    ]
    for groups in groupings:
        members = next(group for group in groups if rank in group)
        child = comm.split(members)
        assert child is not None
        assert child.get_rank() == members.index(rank)
        assert child.get_ranks_in_world() == members
        assert child.get_backend() == comm.get_backend()
        assert child.get_device() == comm.get_device()
        check_works(child, members, seed)
        child.finalize()
    comm.barrier(False).wait()


def test_groups_and_their_order(backend: str, size: int, device: str, seed: int) -> None:
    run_ranks(run_groups, size, seed, backend=backend, device=device)


def run_outsiders(comm: TorchComm, seed: int) -> None:
    rank = comm.get_rank()
    child = comm.split([1, 0] if rank < 2 else [])
    if rank < 2:
        assert child is not None
        check_works(child, [1, 0], seed)
        child.finalize()
    else:
        assert child is None
    comm.barrier(False).wait()


@pytest.mark.sizes(3, 4, 8)
def test_an_empty_list_gives_none(backend: str, size: int, device: str, seed: int) -> None:
    run_ranks(run_outsiders, size, seed, backend=backend, device=device)


def run_nested(comm: TorchComm, seed: int) -> None:
    rank = comm.get_rank()
    outer_members = [3, 2, 1, 0]
    outer = comm.split(outer_members, name="outer")
    assert outer is not None
    inner_ranks = [0, 2] if outer.get_rank() % 2 == 0 else [3, 1]
    inner = outer.split(inner_ranks, name="inner")
    assert inner is not None
    world = [outer_members[r] for r in inner_ranks]
    assert inner.get_ranks_in_world() == world
    assert world[inner.get_rank()] == rank
    check_works(inner, world, seed)
    outer.finalize()
    check_works(inner, world, seed)  # a child outlives its parent
    inner.finalize()


@pytest.mark.sizes(4)
def test_splits_of_splits(backend: str, size: int, device: str, seed: int) -> None:
    run_ranks(run_nested, size, seed, backend=backend, device=device)


NAMED = """
import torch, torch_overlap as to
store = torch.distributed.HashStore()
with to.new_comm("nccl", torch.device("cuda"), "the_parent", store=store, rank=0, size=1) as comm:
    with comm.split([0], "the_child") as child, child.split([0]) as grandchild:
        print(grandchild.get_name())
"""


@pytest.mark.gpu(1)
def test_the_name_reaches_nccl_in_splits_too(tmp_path: Path) -> None:
    log = tmp_path / "nccl"
    env = os.environ | {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ENV", "NCCL_DEBUG_FILE": str(log)}
    done = subprocess.run([sys.executable, "-c", NAMED], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"Comm name set to (.+)", log.read_text())
    assert told == ["the_parent", "the_child", done.stdout.strip()]


BAD_LISTS = {
    "own rank missing": ([1], [1]),
    "twice": ([0, 0, 1], [0, 1]),
    "out of range": ([0, 5], [0, 1]),
    "negative": ([0, -1], [0, 1]),
    "lists differ": ([0, 1], [1, 0]),
    "one side only": ([0, 1], []),
}


def run_bad_list(comm: TorchComm, what: str) -> None:
    lists = BAD_LISTS[what]
    with pytest.raises(InvalidValueError, match=r"^split: expected"):
        comm.split(lists[comm.get_rank()])
    comm.barrier(False).wait()
    child = comm.split([0, 1])
    assert child is not None
    child.finalize()


@pytest.mark.parametrize("what", BAD_LISTS)
@pytest.mark.parametrize("which", ["gloo", "local", pytest.param("nccl", marks=pytest.mark.gpu(2))])
def test_one_bad_list_is_an_error_on_every_rank(which: str, what: str) -> None:
    run_ranks(run_bad_list, 2, what, backend=which, device="cuda" if which == "nccl" else "cpu")


UNREADABLE = {
    "too large": {"ranks": [2**40, 0]},
    "no integers": {"ranks": [0.5, 1]},
    "no list": {"ranks": "x"},
    "hints": {"ranks": [0, 1], "hints": {"a": 1}},
    "timeout": {"ranks": [0, 1], "timeout": 5},
    "name": {"ranks": [0, 1], "name": 7},
}


def run_unreadable(comm: TorchComm, what: str) -> None:
    good: dict[str, object] = {"ranks": [0, 1]}
    given = UNREADABLE[what] if comm.get_rank() == 0 else good
    error = InvalidTypeError if comm.get_rank() == 0 else InvalidValueError
    with pytest.raises(error, match=r"^split: (expected|rank 0 of .* could not take part: split: expected)"):
        comm.split(**given)  # type: ignore[arg-type]
    child = comm.split([0, 1])
    assert child is not None
    child.finalize()


@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("which", ["gloo", "local"])
def test_what_cannot_be_read_on_one_rank_is_an_error_on_every_rank(which: str, what: str) -> None:
    run_ranks(run_unreadable, 2, what, backend=which)


def run_inherited(comm: TorchComm) -> None:
    everyone = list(range(comm.get_size()))
    comm.set_timeout(timedelta(seconds=31))  # these values differ from the defaults
    comm.set_hints({"is_high_priority_stream": "true", "custom_collectives": "off"})
    child, changed = comm.split(everyone, "child"), comm.split(everyone, "changed", timeout=timedelta(seconds=7))
    assert child is not None
    assert changed is not None
    assert child.get_name() == "child"
    assert get_comm("child") is child
    mine, theirs = comm.get_options(), child.get_options()
    assert isinstance(theirs, CommOptions)
    for field in ("abort_process_on_timeout_or_error", "timeout", "hints", "is_high_priority_stream"):
        assert getattr(theirs, field) == getattr(mine, field) != getattr(CommOptions(), field), field
    assert changed.get_options().timeout == timedelta(seconds=7)
    child.finalize()
    changed.finalize()
    if comm.get_backend() != "local":  # there the name belongs to the other ranks too
        assert "child" not in comm_names()


def test_options_are_the_parents(any_backend: str, any_size: int, device: str) -> None:
    run_ranks(run_inherited, any_size, backend=any_backend, device=device)


@pytest.mark.parametrize("enable", [False, True])
def test_what_can_be_reconfigured_stays_so(enable: bool) -> None:
    with new_comm("fake", "cpu", rank=0, size=2, enable_reconfigure=enable) as comm, comm.split([0, 1]) as child:
        assert child.get_options().enable_reconfigure is enable
