"""Calls that a finalized communicator refuses, and calls that it still supports."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

import torch_overlap as to
from torch_overlap import ReduceOp, StateError, TorchComm
from torch_overlap.testing import run_ranks

X = torch.ones(6)
REFUSED: dict[str, Callable[[TorchComm], object]] = {
    "all_reduce": lambda comm: comm.all_reduce(X, ReduceOp.SUM, False),
    "send": lambda comm: comm.send(X, 1 - comm.get_rank(), True),
    "barrier": lambda comm: comm.barrier(False),
    "split": lambda comm: comm.split([comm.get_rank()]),
    "new_window": lambda comm: comm.new_window(),
    "tensor_register": lambda comm: comm.tensor_register(X),
    "tensor_deregister": lambda comm: comm.tensor_deregister(X),
    "batch_op_create": lambda comm: comm.batch_op_create(),
    "set_timeout": lambda comm: comm.set_timeout(timedelta(seconds=9)),
    "set_hints": lambda comm: comm.set_hints({"custom_collectives": "off"}),
    "register_pre_hook": lambda comm: comm.register_pre_hook(lambda *_: None),
    "register_post_hook": lambda comm: comm.register_post_hook(lambda *_: None),
    "register_abort_hook": lambda comm: comm.register_abort_hook(lambda: None),
    "register_with_comm": lambda comm: to.hooks.FlightRecorderHook(isolated=True).register_with_comm(comm),
    "native_handle": lambda comm: comm.get_native_handle(),
    "finalize": lambda comm: comm.finalize(),
}
REFUSED_OF_WINDOWS: dict[str, Callable[[to.TorchCommWindow], object]] = {
    "put": lambda window: window.put(X[:1], 0, 0, False),
    "signal": lambda window: window.signal(0, False),
    "wait_signal": lambda window: window.wait_signal(0, False),
    "map_remote_tensor": lambda window: window.map_remote_tensor(0),
    "get_attr": lambda window: window.get_attr(0),
}
ALLOWED: tuple[Callable[[TorchComm], object], ...] = (
    TorchComm.get_rank, TorchComm.get_size, TorchComm.get_name, TorchComm.get_device, TorchComm.get_backend,
    TorchComm.get_backend_version, TorchComm.get_options, TorchComm.get_ranks_in_world, TorchComm.get_init_handle,
    TorchComm.get_generation, TorchComm.is_abort_supported, TorchComm.is_aborted, TorchComm.is_finalized, repr,
    TorchComm.abort,
)  # fmt: skip


def run_finalized(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    handle = comm.register_pre_hook(lambda *_: None)
    window = comm.new_window(to.symmetric_empty(4, torch.float32, comm))
    window.get_tensor().fill_(rank)
    comm.finalize()
    for op, call in REFUSED.items():
        with pytest.raises(StateError, match=f"^{op}: expected a live communicator, got '{comm.get_name()}', .*final"):
            call(comm)
    for op, on_window in REFUSED_OF_WINDOWS.items():
        with pytest.raises(StateError, match=f"^{op}: expected a live communicator, got '{comm.get_name()}', .*final"):
            on_window(window)
    for allowed in ALLOWED:
        allowed(comm)
    handle.remove()
    assert (comm.get_rank(), comm.get_size(), comm.is_finalized()) == (rank, size, True)
    assert window.get_tensor().tolist() == [rank] * 4
    assert window.get_size() == 16
    window.tensor_deregister()


@pytest.mark.parametrize("backend", ["gloo", "local", "fake"])
def test_what_would_have_no_effect_is_refused(backend: str) -> None:
    run_ranks(run_finalized, 2, backend=backend)


def run_aborted(comm: TorchComm) -> None:
    comm.abort()
    comm.set_timeout(timedelta(seconds=9))  # used by reconfigure, which may follow
    comm.set_hints({})
    comm.register_abort_hook(lambda: None)
    assert comm.get_options().timeout == timedelta(seconds=9)


def test_an_aborted_communicator_can_still_be_told_things() -> None:
    run_ranks(run_aborted, 2)
