"""A pending operation holds its tensors, even if the caller drops them, and releases them when it has ended."""

import time
import weakref
from typing import Any

import pytest
import torch
from comm_calls import arguments

from torch_overlap import ReduceOp, TorchComm
from torch_overlap.testing import run_ranks


def used(comm: TorchComm, name: str, args: tuple[object, ...]) -> list[torch.Tensor]:
    """Returns the tensors that the operation of this rank reads or writes."""
    tensors: list[torch.Tensor] = []
    for position, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            tensors.append(arg)
        elif isinstance(arg, list) and not (name == "scatter" and position == 1):  # rank 1 is its root
            tensors += [one for one in arg if isinstance(one, torch.Tensor)]
    return tensors


Refs = list["weakref.ref[torch.Tensor]"]


def alive(refs: Refs) -> list[bool]:
    return [ref() is not None for ref in refs]


def assert_let_go(refs: Refs, what: str) -> None:
    """Waits, because the thread that ran the operation may hold the tensors for a moment longer."""
    deadline = time.monotonic() + 60
    while any(alive(refs)):
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def run_dropped(comm: TorchComm) -> None:
    meeting = comm.split([0, 1])
    assert meeting is not None
    for name in arguments(comm):
        args = arguments(comm)[name]
        if comm.get_rank() == 1:
            meeting.barrier(False)
            getattr(comm, name)(*args, True).wait()
            continue
        refs = [weakref.ref(tensor) for tensor in used(comm, name, args)]
        work = getattr(comm, name)(*args, True)
        del args
        assert not work.is_completed(), name
        assert all(alive(refs)), name
        meeting.barrier(False)
        work.wait()
        assert_let_go(refs, name)
    meeting.finalize()


@pytest.mark.parametrize("which", ["gloo", "local"])
def test_tensors_live_until_the_operation_has_ended(which: str) -> None:
    run_ranks(run_dropped, 2, backend=which)


def run_all_dropped(comm: TorchComm) -> None:
    """The factor and the work are dropped too: nothing waits, and the result is still written."""
    meeting = comm.split([0, 1])
    assert meeting is not None
    x = torch.full((1000,), 2.0)
    if comm.get_rank() == 1:
        meeting.barrier(False)
    factor = torch.tensor([0.5])
    ref = weakref.ref(factor)
    comm.all_reduce(x, ReduceOp.PREMUL_SUM(factor), True)
    del factor
    if comm.get_rank() == 0:
        assert alive([ref]) == [True]
        meeting.barrier(False)
    comm.barrier(False)
    assert torch.equal(x, torch.full((1000,), 2.0))
    assert_let_go([ref], "the factor")
    meeting.finalize()


@pytest.mark.parametrize("which", ["gloo", "local"])
def test_a_factor_and_the_work_may_be_dropped(which: str) -> None:
    run_ranks(run_all_dropped, 2, backend=which)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def run_without_graph(comm: TorchComm) -> None:
    meeting = comm.split([0, 1])
    assert meeting is not None
    if comm.get_rank() == 1:
        meeting.barrier(False)
        received = torch.empty(8)
        comm.recv(received, 0, False)
        assert (received == 4).all()
    else:
        y = Square.apply(torch.full((8,), 2.0, requires_grad=True))
        graph = weakref.ref(y.grad_fn)
        work = comm.send(y, 1, True)
        del y
        assert graph() is None
        assert not work.is_completed()
        meeting.barrier(False)
        work.wait()
    meeting.finalize()


def test_a_pending_operation_keeps_no_graph() -> None:
    run_ranks(run_without_graph, 2, backend="local")
