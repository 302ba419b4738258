"""The gloo backend: failures of real processes, and the address on which it listens."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

import torch_overlap as to
from torch_overlap.testing import run_ranks


def _message(call: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


def _missing_rank(comm: Any) -> tuple[str, float] | None:
    meeting = comm.split([0, 1, 2])
    meeting.barrier(False)
    result = None
    if comm.get_rank() != 2:
        begin = time.monotonic()
        x = torch.ones(8)
        soon = timedelta(seconds=2)
        message = _message(lambda: comm.all_reduce(x, to.ReduceOp.SUM, comm.get_rank() == 1, timeout=soon).wait())
        result = message, time.monotonic() - begin
        assert "rank 2" in _message(lambda: comm.barrier(False))
    meeting.barrier(False)  # leaving earlier would be another error
    comm.abort()
    meeting.finalize()
    return result


def test_a_missing_rank_is_named_within_the_timeout() -> None:
    for result in run_ranks(_missing_rank, 3, backend="gloo")[:2]:
        message, elapsed = result
        assert "rank 2 did not arrive within the timeout of 2000 ms" in message
        assert elapsed < 2 + 30


def _nobody_listens(rank: int, size: int, store: Any) -> tuple[str, str]:
    if rank == 1:
        os.environ["TORCHCOMM_GLOO_INTERFACE"] = "nowhere"
    try:
        with pytest.raises(to.Error) as caught:
            to.new_comm("gloo", "cpu", "deaf", store=store, rank=rank, size=size, timeout=timedelta(seconds=8))
    finally:
        os.environ.pop("TORCHCOMM_GLOO_INTERFACE", None)
    return type(caught.value).__name__, str(caught.value)


def test_ranks_that_gloo_cannot_connect_get_our_errors() -> None:
    waiting, deaf = run_ranks(_nobody_listens, 2, comm=False)
    assert waiting[0] == "OperationTimeoutError"
    assert "new_comm: expected gloo to connect 2 ranks within 8000 ms, got" in waiting[1]
    assert deaf[0] == "Error"
    assert "nowhere" in deaf[1]


def _abort_while_waiting(comm: Any) -> str | None:
    if comm.get_rank() == 1:
        x = torch.ones(4)  # its peer leaves
        message = _message(lambda: comm.recv(x, 0, True).wait())
        comm.abort()
        return message
    threading.Timer(0.2, comm.abort).start()
    return _message(lambda: comm.recv(torch.ones(4), 1, False))


def test_abort_wakes_the_waiter_and_the_peer() -> None:
    mine, peers = run_ranks(_abort_while_waiting, 2, backend="gloo")
    assert "was aborted" in mine
    assert "rank 0" in peers


def _sizes_differ(comm: Any) -> str:
    x = torch.ones(4 + 4 * comm.get_rank())
    message = _message(lambda: comm.broadcast(x, 0, False, timeout=timedelta(milliseconds=300)))
    comm.abort()
    return message


def test_sizes_that_differ_are_an_error_not_the_end_of_the_process() -> None:
    for message in run_ranks(_sizes_differ, 2, backend="gloo"):
        assert "broadcast #" in message


def _many_in_flight(comm: Any) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    works, received = [], []
    for step in range(10):
        for peer in range(size):
            if peer == rank:
                continue
            works.append(comm.send(torch.full((100 + step,), 10.0 * rank + step), peer, True))
            received.append((peer, step, torch.full((100 + step,), -1.0)))
            works.append(comm.recv(received[-1][2], peer, True))
        x = torch.full((20_000,), float(rank))
        works.append(comm.all_reduce(x, to.ReduceOp.SUM, True))
    for work in works:
        work.wait()
    for peer, step, tensor in received:
        assert torch.equal(tensor, torch.full((100 + step,), 10.0 * peer + step))


def test_sends_receives_and_collectives_are_in_flight_together() -> None:
    run_ranks(_many_in_flight, 3, backend="gloo")


def _listen_somewhere(comm: Any, hints: dict[str, str]) -> None:
    child = comm.split(list(range(comm.get_size())), hints=hints)
    x = torch.ones(3)
    child.all_reduce(x, to.ReduceOp.SUM, False)
    assert torch.equal(x, torch.full((3,), float(comm.get_size())))
    child.finalize()


@pytest.mark.parametrize("hints", [{"hostname": "127.0.0.1"}, {"interface": "lo"}])
def test_hints_say_where_to_listen(hints: dict[str, str]) -> None:
    run_ranks(_listen_somewhere, 2, hints, backend="gloo")


def _listen_although(rank: int, size: int, store: Any) -> None:
    for hints in ({"hostname": "127.0.0.1"}, {"interface": "lo"}):
        with to.new_comm("gloo", "cpu", "hinted", store=store, rank=rank, size=size, hints=hints) as comm:
            x = torch.ones(3)
            comm.all_reduce(x, to.ReduceOp.SUM, False)
            assert torch.equal(x, torch.full((3,), float(size)))


@pytest.mark.parametrize("variable", ["TORCHCOMM_GLOO_HOSTNAME", "TORCHCOMM_GLOO_INTERFACE"])
def test_a_hint_wins_over_the_environment(variable: str) -> None:
    run_ranks(_listen_although, 2, comm=False, env={variable: "nowhere"})


def _two_places(comm: Any) -> str:
    return _message(lambda: comm.split([0], hints={"hostname": "127.0.0.1", "interface": "lo"}))


def test_two_places_to_listen_are_refused() -> None:
    (message,) = run_ranks(_two_places, 1, backend="gloo")
    assert "expected a hostname or an interface" in message


def _hinted(rank: int, size: int, store: Any, hints: dict[str, str]) -> list[float]:
    comm = to.new_comm("gloo", "cpu", "hinted", store=store, rank=rank, size=size, hints=hints)
    x = torch.tensor([rank + 1.0])
    comm.all_reduce(x, to.ReduceOp.SUM, False)
    child = comm.split(list(range(size)))
    assert child is not None
    child.all_reduce(x, to.ReduceOp.SUM, True).wait()
    child.finalize()
    comm.finalize()
    return x.tolist()


@pytest.mark.parametrize(
    "hints", [{"lazy": "true", "persistent_store": "true"}, {"lazy": "", "hostname": "127.0.0.1"}, {"lazy": "0"}]
)
@pytest.mark.filterwarnings("error")
def test_gloo_takes_torchcomms_hints(hints: dict[str, str]) -> None:
    assert run_ranks(_hinted, 3, hints, comm=False) == [[18.0]] * 3


@pytest.mark.parametrize("name", ["lazy", "persistent_store"])
def test_a_hint_that_does_not_parse_is_named(name: str) -> None:
    with pytest.raises(to.InvalidValueError, match=f"hint {name}"):
        to.new_comm("gloo", "cpu", rank=0, size=1, store=torch.distributed.HashStore(), hints={name: "maybe"})
