"""check_mismatch: ranks whose operations differ get an error that shows both sides, and the communicator stays
usable."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from every_op import NAMES, operation

import torch_overlap as to
from torch_overlap.testing import run_ranks

BACKENDS = ["gloo", "local"]
SUM, MAX = to.ReduceOp.SUM, to.ReduceOp.MAX


def ones(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def calls(comm: to.TorchComm) -> dict[str, tuple[Callable[[], Any], ...]]:
    """Cases by the difference: the call of rank 0, the call of the others, and (as the last) nothing."""
    n = comm.get_size()
    f64 = torch.float64
    return {
        "operation": (lambda: comm.all_reduce(ones(4), SUM, False), lambda: comm.broadcast(ones(4), 0, False)),
        "barrier": (lambda: comm.all_reduce(ones(4), SUM, False), lambda: comm.barrier(False)),
        "order": (lambda: comm.reduce(ones(2), 0, SUM, False), lambda: comm.all_reduce(ones(2), SUM, False)),
        "size": (lambda: comm.all_reduce(ones(4), SUM, False), lambda: comm.all_reduce(ones(5), SUM, False)),
        "dtype": (lambda: comm.all_reduce(ones(4), SUM, False), lambda: comm.all_reduce(ones(4, f64), SUM, False)),
        "bytes": (lambda: comm.broadcast(ones(4), 0, False), lambda: comm.broadcast(ones(2, f64), 0, False)),
        "reduction": (lambda: comm.all_reduce(ones(4), SUM, False), lambda: comm.all_reduce(ones(4), MAX, False)),
        "root": (lambda: comm.broadcast(ones(4), 0, False), lambda: comm.broadcast(ones(4), 1, False)),
        "gather": (
            lambda: comm.gather([ones(3) for _ in range(n)], ones(3), 0, False),
            lambda: comm.gather([], ones(4), 0, False),
        ),
        "scatter": (
            lambda: comm.scatter(ones(3), [ones(3) for _ in range(n)], 0, False),
            lambda: comm.scatter(ones(2), [], 0, False),
        ),
        "all_gather_v": (
            lambda: comm.all_gather_v([ones(r + 1) for r in range(n)], ones(1), False),
            lambda: comm.all_gather_v([ones(r + 2) for r in range(n)], ones(comm.get_rank() + 2), False),
        ),
        "reduce_scatter_v": (
            lambda: comm.reduce_scatter_v(ones(1), [ones(r + 1) for r in range(n)], SUM, False),
            lambda: comm.reduce_scatter_v(ones(2), [ones(2) for r in range(n)], SUM, False),
        ),
        "splits": (
            lambda: comm.all_to_all_v_single(ones(n), ones(n + 1), [1] * n, [1] * (n - 1) + [2], False),
            lambda: comm.all_to_all_v_single(ones(n), ones(n), [1] * n, [1] * n, False),
        ),
    }


def run_differences(comm: to.TorchComm) -> None:
    comm.set_hints({"check_mismatch": "true"})
    assert comm.get_options().hints["check_mismatch"] == "true"
    for what, (first, others) in calls(comm).items():
        mine = first if comm.get_rank() == 0 else others
        with pytest.raises(to.InvalidValueError, match=r"the same operation on all ranks of .* got ") as raised:
            mine()
        text = str(raised.value)
        assert " on rank 0 and " in text, (what, text)
        assert "nothing was sent" in text, (what, text)
        # Nothing was sent: the communicator stays usable.
        x = torch.full((3,), comm.get_rank() + 1.0)
        comm.all_reduce(x, SUM, async_op=comm.get_rank() == 0).wait()
        assert x.tolist() == [sum(range(1, comm.get_size() + 1))] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_difference_is_shown_on_every_rank(backend: str) -> None:
    run_ranks(run_differences, 3, backend=backend)


def run_agreement(comm: to.TorchComm) -> None:
    comm.set_hints({"check_mismatch": "true"})
    for name in NAMES:
        if name == "reconfigure":  # for communicators made with it: test_reconfigure.py
            continue
        issue = operation(comm, name, comm.get_size() - 1, numel=64)
        for async_op in (True, False):
            issue(async_op).wait()
    half = comm.split([comm.get_rank()] if comm.get_rank() == 0 else list(range(1, comm.get_size())))
    assert half is not None
    assert half.get_options().hints["check_mismatch"] == "true"
    half.barrier(False)
    half.finalize()
    comm.set_hints({"check_mismatch": "false"})
    comm.barrier(False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_operation_that_agrees_goes_through(backend: str) -> None:
    run_ranks(run_agreement, 3, backend=backend)


def meeting_of(comm: to.TorchComm) -> to.TorchComm:
    """Returns a second communicator of all ranks, whose barriers show when the others are done with the first."""
    meeting = comm.split(list(range(comm.get_size())))
    assert meeting is not None
    return meeting


def run_absent(comm: to.TorchComm) -> None:
    meeting = meeting_of(comm)
    comm.set_hints({"check_mismatch": "true"})
    comm.barrier(False)
    if comm.get_rank() != 1:
        begin = time.monotonic()
        with pytest.raises(to.OperationTimeoutError, match=r"all_reduce #.* 3000 ms, got none of ranks \[1\]"):
            comm.all_reduce(ones(4), SUM, True, timeout=timedelta(seconds=3))
        assert time.monotonic() - begin < 3 + 30
        with pytest.raises(to.StateError, match="aborted"):
            comm.barrier(False)
    meeting.barrier(False)
    comm.abort()
    meeting.finalize()


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_does_not_come_is_named_and_ends_the_communicator(backend: str) -> None:
    run_ranks(run_absent, 3, backend=backend)


def run_hint(comm: to.TorchComm, how: str) -> None:
    """Rank 1 never calls: rank 0's error names the check, unless the check has already seen the call."""
    meeting = meeting_of(comm)
    if how == "compared pair":
        comm.set_hints({"check_mismatch": "true"})
    other = 1 - comm.get_rank()
    short = timedelta(seconds=3)
    if comm.get_rank() == 0:
        works = {
            "pair": lambda: comm.recv(ones(5), other, True, timeout=short),
            "collective": lambda: comm.all_reduce(ones(4), SUM, True, timeout=short),
            "compared pair": lambda: comm.recv(ones(4), other, True, timeout=short),
        }
        with pytest.raises(to.OperationTimeoutError) as raised:
            works[how]().wait()
        advice = '; hints={"check_mismatch": "true"} tells whether the ranks called different things'
        assert str(raised.value).endswith(advice) == (how != "compared pair")
        assert ("check_mismatch" in str(raised.value)) == (how != "compared pair")
    meeting.barrier(False)
    comm.abort()
    meeting.finalize()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["pair", "collective", "compared pair"])
def test_a_timeout_says_how_to_compare_the_ranks_where_they_were_not(backend: str, how: str) -> None:
    run_ranks(run_hint, 2, how, backend=backend)


def run_pairs(comm: to.TorchComm) -> None:
    meeting = meeting_of(comm)
    comm.set_hints({"check_mismatch": "true"})
    me = comm.get_rank()
    # Matching calls, in an order in which neither may wait for the other: receive first, then send.
    out = torch.zeros(4)
    received = comm.recv(out, 1 - me, True)
    sent = comm.send(ones(4) * (me + 1), 1 - me, True)
    received.wait()
    sent.wait()
    assert out.tolist() == [2.0 - me] * 4
    if me == 0:
        comm.send(ones(4), 1, True)
        meeting.barrier(False)  # rank 1 is second, and sees it
    else:
        meeting.barrier(False)
        both = (
            r"got a recv of 2 torch.float64 elements on rank 1 and a send of 4 torch.float32 elements on rank 0; "
            r"nothing was sent"
        )
        with pytest.raises(to.InvalidValueError, match=both):
            comm.recv(torch.zeros(2, dtype=torch.float64), 0, False)
    meeting.barrier(False)
    comm.abort()
    meeting.finalize()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_second_of_a_pair_sees_that_the_two_do_not_fit(backend: str) -> None:
    run_ranks(run_pairs, 2, backend=backend)


def run_environment(rank: int, size: int, store: Any) -> None:
    options: dict[str, Any] = {"store": store, "rank": rank, "size": size, "timeout": timedelta(seconds=60)}
    comm = to.new_comm("gloo", "cpu", "checked", **options)
    with pytest.raises(to.InvalidValueError, match="expected the same operation"):
        comm.all_reduce(ones(rank + 1), SUM, False)
    comm.finalize()
    hints = {"check_mismatch": "no"} if rank == 0 else {}
    with pytest.raises(to.InvalidValueError, match=r"the same request for 'other' on all ranks.*check_mismatch"):
        to.new_comm("gloo", "cpu", "other", hints=hints, **options)


def test_the_environment_turns_it_on_and_all_ranks_must() -> None:
    run_ranks(run_environment, 2, comm=False, env={"TORCH_OVERLAP_CHECK_MISMATCH": "1"})
    with pytest.raises(to.Error, match="check_mismatch"):
        to.new_comm("fake", "cpu", rank=0, size=2, hints={"check_mismatch": "perhaps"})
