"""Every public method says which argument it wanted and what came, in an error that is ours and a TypeError."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

import torch_overlap as to
from torch_overlap import BatchSendRecv, InvalidTypeError, ReduceOp, TorchComm, TorchCommWindow, TorchWork

X, FLAT = torch.ones(2), torch.ones(6)
LIST = [X, X, X]
SUM = ReduceOp.SUM

# Arguments that each method takes, on a communicator of three ranks. What has none is called with one too many.
METHODS: dict[type, dict[str, tuple[Any, ...]]] = {
    TorchComm: {
        "send": (X, 0, False), "recv": (X, 0, False), "broadcast": (X, 0, False), "all_reduce": (X, SUM, False),
        "reduce": (X, 0, SUM, False), "barrier": (False,), "all_gather": (LIST, X, False),
        "all_gather_v": (LIST, X, False), "all_gather_single": (FLAT, X, False), "gather": (LIST, X, 0, False),
        "gather_single": (FLAT, X, 0, False), "reduce_scatter": (X, LIST, SUM, False),
        "reduce_scatter_v": (X, LIST, SUM, False), "reduce_scatter_single": (X, FLAT, SUM, False),
        "scatter": (X, LIST, 0, False), "all_to_all": (LIST, LIST, False), "all_to_all_single": (FLAT, FLAT, False),
        "all_to_all_v_single": (FLAT, FLAT, [2, 2, 2], [2, 2, 2], False), "split": ([0], "child", {}, timedelta(0)),
        "reconfigure": (1, ["handle"], timedelta(seconds=1), {}), "set_timeout": (timedelta(seconds=1),),
        "set_hints": ({},), "new_window": (X,), "tensor_register": (X,), "tensor_deregister": (X,),
        "register_pre_hook": (print,), "register_post_hook": (print,), "register_abort_hook": (print,),
    },
    TorchCommWindow: {
        "tensor_register": (X, True), "put": (X, 0, 0, False), "signal": (0, False), "wait_signal": (0, False),
        "map_remote_tensor": (0,), "get_attr": (0,),
    },
    BatchSendRecv: {"send": (X, 0), "recv": (X, 0), "issue": (False,)},
    TorchWork: {"wait": (timedelta(0),), "wait_blocking": (timedelta(0),)},
}  # fmt: skip
PYTHON = {TorchComm: {"get_mem_allocator"}}  # of no arguments, written in Python


def public_methods(owner: type) -> Iterator[str]:
    for name, value in vars(owner).items():
        if not name.startswith("_") and callable(value) and name not in PYTHON.get(owner, set()):
            yield name


def wrong_calls() -> Iterator[Any]:
    for owner, table in METHODS.items():
        for name in public_methods(owner):
            good = table.get(name, ())
            for index in range(len(good)):
                yield pytest.param(owner, name, (*good[:index], object(), *good[index + 1 :]),
                                   id=f"{owner.__name__}.{name}-{index}")  # fmt: skip
            yield pytest.param(owner, name, (*good, *[object()] * 9), id=f"{owner.__name__}.{name}-too-many")


@pytest.fixture
def objects() -> Iterator[dict[type, Any]]:
    comm = to.new_comm("fake", "cpu", rank=1, size=3)
    window, batch = comm.new_window(), comm.batch_op_create()
    work = comm.barrier(True)
    yield {TorchComm: comm, TorchCommWindow: window, BatchSendRecv: batch, TorchWork: work}
    if not comm.is_finalized():
        comm.abort()


def assert_ours(error: Exception, op: str) -> None:
    assert isinstance(error, InvalidTypeError)
    assert isinstance(error, TypeError)
    assert isinstance(error, RuntimeError)
    assert re.match(rf"{op}: expected .*, got .", str(error)), str(error)
    assert "object at 0x" not in str(error) or "(object)" in str(error)
    assert "pybind" not in str(error)
    assert "Invoked with" not in str(error)


@pytest.mark.parametrize(("owner", "name", "arguments"), list(wrong_calls()))
def test_a_wrong_type_is_our_error(
    objects: dict[type, Any], owner: type, name: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(TypeError) as raised:
        getattr(objects[owner], name)(*arguments)
    assert_ours(raised.value, "batch_op_issue|issue" if name == "issue" else name)


def test_what_has_arguments_is_in_the_table() -> None:
    for owner, table in METHODS.items():
        names = set(public_methods(owner))
        assert table.keys() <= names
        for name in names - table.keys():
            first = str(getattr(owner, name).__doc__).splitlines()[0]
            assert re.match(rf"{name}\(self: [\w.]+\) ->", first), first


NEW_COMM: dict[str, tuple[Any, ...]] = {
    "backend": (5, None, b"gloo"),
    "device": (None, [], 1.5),
    "name": (5, b"x"),
    "timeout": (5, 1.5, "1"),
    "hints": ([], "a", {"a": 1}, {1: "a"}),
    "store": ("tcp", 5),
    "abort_process_on_timeout_or_error": (1, "yes"),
    "is_high_priority_stream": (1, "yes"),
    "enable_reconfigure": (1, "yes"),
    "options": ({}, 5),
    "rank": ("0", 1.0),
    "size": ("3", 3.0),
}


@pytest.mark.parametrize(("what", "value"), [(what, value) for what, values in NEW_COMM.items() for value in values])
def test_new_comm_names_the_argument(what: str, value: Any) -> None:
    arguments = {"backend": "fake", "device": "cpu", "rank": 1, "size": 3, what: value}
    with pytest.raises(TypeError, match=f"expected {what} as ") as raised:
        to.new_comm(**arguments)
    assert_ours(raised.value, "new_comm")


def test_new_comm_with_the_name_of_no_device() -> None:
    with pytest.raises(
        to.InvalidValueError, match=r"new_comm: expected device as a torch\.device or its name, got 'nowhere'"
    ):
        to.new_comm("fake", "nowhere", rank=0, size=1)


OTHERS: dict[str, Callable[[], object]] = {
    "get_comm": lambda: to.get_comm(5),  # type: ignore[arg-type]
    "get_window": lambda: to.get_window(None),  # type: ignore[arg-type]
    "CommOptions": lambda: to.CommOptions(5),  # type: ignore[call-arg]
    "CommOptions.name": lambda: setattr(to.CommOptions(), "name", 5),
    "CommOptions.store": lambda: setattr(to.CommOptions(), "store", 5),
    "AllReduceOptions": lambda: to.AllReduceOptions(hints=[]),  # type: ignore[arg-type]
    "SendOptions": lambda: to.SendOptions(timeout=5),  # type: ignore[arg-type]
    "P2POp": lambda: to.P2POp("send", X, 0),  # type: ignore[arg-type]
    "batch_op_issue": lambda: to.new_comm("fake", "cpu", rank=0, size=1).batch_op_create().issue(False, options=5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_public_names(name: str) -> None:
    with pytest.raises(TypeError) as raised:
        OTHERS[name]()
    assert_ours(raised.value, name)


def test_what_came_is_shown_and_no_tensor_is_printed(objects: dict[type, Any]) -> None:
    comm = objects[TorchComm]
    expected = (
        r"^send: expected arguments \(tensor: torch.Tensor, dst: int, async_op: bool, .*\), got \(Tensor, 'one', "
    )
    with pytest.raises(InvalidTypeError, match=expected + r"False, timeout=Tensor\)$"):
        comm.send(X, "one", False, timeout=X)
    with pytest.raises(InvalidTypeError, match=r"got \(list, ReduceOp, None\)$"):
        comm.all_reduce([X], SUM, None)


def test_an_error_of_python_in_a_call_stays_what_it_is(objects: dict[type, Any]) -> None:
    def hook(*_: object) -> None:
        raise TypeError("hook(): of the user")

    objects[TorchComm].register_pre_hook(hook)
    with pytest.raises(TypeError, match=r"hook\(\): of the user") as raised:
        objects[TorchComm].all_reduce(X, SUM, False)
    assert not isinstance(raised.value, to.Error)


def test_timeouts_of_any_length(objects: dict[type, Any]) -> None:
    comm = objects[TorchComm]
    for longest in (timedelta.max, timedelta(days=366)):
        comm.set_timeout(longest)
        assert comm.get_options().timeout == timedelta(days=365)
        comm.barrier(True, timeout=longest).wait(longest)
    comm.set_timeout(timedelta(microseconds=1))
    assert comm.get_options().timeout == timedelta(milliseconds=1)
    negative = (timedelta.min, timedelta(microseconds=-1), timedelta(days=-400))
    calls: dict[str, Callable[[timedelta], object]] = {
        "set_timeout": comm.set_timeout,
        "barrier": lambda t: comm.barrier(False, timeout=t),
        "split": lambda t: comm.split([1], timeout=t),
        "wait": lambda t: comm.barrier(True).wait(t),
        "wait_blocking": lambda t: comm.barrier(True).wait_blocking(t),
        "SendOptions": lambda t: to.SendOptions(timeout=t),
        "CommOptions|new_comm": lambda t: to.new_comm("fake", "cpu", rank=0, size=1, timeout=t),
    }
    for name, call in calls.items():
        for one in negative:
            with pytest.raises(to.InvalidValueError, match=f"^({name}): expected a timeout >= 0, got "):
                call(one)
