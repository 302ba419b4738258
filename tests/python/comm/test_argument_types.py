"""Every public method names the expected and the actual argument in an error that is both ours and a TypeError."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import torch_overlap as to
from torch_overlap import BatchSendRecv, InvalidTypeError, ReduceOp, TorchComm, TorchCommWindow, TorchWork

X, FLAT = torch.ones(2), torch.ones(6)
LIST = [X, X, X]
SUM = ReduceOp.SUM

# Valid arguments of each method, on a communicator of three ranks. Methods without arguments get one too many.
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


def public_methods(owner: type) -> Iterator[str]:
    for name, value in vars(owner).items():
        if not name.startswith("_") and callable(value):
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


def arguments_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    return [p for name, p in inspect.signature(function).parameters.items() if name != "self"]


def test_what_has_arguments_is_in_the_table() -> None:
    for owner, table in METHODS.items():
        names = set(public_methods(owner))
        assert table.keys() <= names
        assert [name for name in names - table.keys() if arguments_of(getattr(owner, name))] == []


@pytest.mark.parametrize("owner", METHODS)
def test_what_is_missing_unknown_or_given_twice_is_named(objects: dict[type, Any], owner: type) -> None:
    for name in public_methods(owner):
        method, good = getattr(objects[owner], name), METHODS[owner].get(name, ())
        parameters = arguments_of(getattr(owner, name))
        needed = [p.name for p in parameters if p.default is p.empty]
        for index, missing in enumerate(needed):
            with pytest.raises(InvalidTypeError, match=rf"^{name}: expected a value for {missing}, got none; pass "):
                method(*good[:index], **dict(zip(needed[index + 1 :], good[index + 1 :], strict=False)))
        with pytest.raises(
            InvalidTypeError, match=rf"^{name}: expected (one of the keywords \w+|no keywords).*, got asynch=1"
        ):
            method(*good, asynch=1)
        if good:
            with pytest.raises(InvalidTypeError, match=rf"^{name}: expected {parameters[0].name} once, got it by "):
                method(*good, **{parameters[0].name: good[0]})


def test_signatures_are_those_of_python() -> None:
    signature = inspect.signature(TorchComm.all_reduce)
    assert [p for p in signature.parameters][1:] == ["tensor", "op", "async_op", "hints", "timeout", "options"]
    assert signature.parameters["async_op"].annotation == "bool"
    assert signature.parameters["timeout"].default is None
    assert TorchComm.all_reduce.__qualname__ == "TorchComm.all_reduce"
    with pytest.raises(TypeError, match="async_op"):
        signature.bind(None, X, SUM)


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
    with pytest.raises(TypeError, match=f" for {what}, got ") as raised:
        to.new_comm(**arguments)
    assert_ours(raised.value, "new_comm")


def test_new_comm_with_the_name_of_no_device() -> None:
    with pytest.raises(
        to.InvalidValueError, match=r"new_comm: expected the name of a device for device, got 'nowhere'"
    ):
        to.new_comm("fake", "nowhere", rank=0, size=1)


OTHERS: list[tuple[str, Callable[[], object]]] = [
    ("get_comm", lambda: to.get_comm(5)),  # type: ignore[arg-type]
    ("get_window", lambda: to.get_window(None)),  # type: ignore[arg-type]
    ("CommOptions", lambda: to.CommOptions(5)),  # type: ignore[call-arg]
    ("CommOptions", lambda: setattr(to.CommOptions(), "name", 5)),
    ("CommOptions", lambda: setattr(to.CommOptions(), "store", 5)),
    ("CommOptions", lambda: setattr(to.CommOptions(), "enable_reconfigure", "yes")),
    ("AllReduceOptions", lambda: to.AllReduceOptions(hints=[])),  # type: ignore[arg-type]
    ("AllReduceOptions", lambda: to.AllReduceOptions(hint={})),  # type: ignore[call-arg]
    ("SendOptions", lambda: to.SendOptions(timeout=5)),  # type: ignore[arg-type]
    ("BackendOptions", lambda: to.BackendOptions(backends=5)),  # type: ignore[arg-type]
    ("BackendOptions", lambda: setattr(to.BackendOptions(), "hints", 5)),
    ("BackendWrapper", lambda: to._BackendWrapper(None)),  # type: ignore[arg-type]
    ("P2POp", lambda: to.P2POp("send", X, 0)),  # type: ignore[arg-type]
    ("ReduceOp", lambda: to.ReduceOp(0)),  # type: ignore[arg-type]
    ("ReduceOp.PREMUL_SUM", lambda: ReduceOp.PREMUL_SUM("two")),  # type: ignore[arg-type]
    ("issue", lambda: to.new_comm("fake", "cpu", rank=0, size=1).batch_op_create().issue(1)),  # type: ignore[arg-type]
    ("batch_op_issue", lambda: to.new_comm("fake", "cpu", rank=0, size=1).batch_op_create().issue(False, options=5)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("name", "call"), OTHERS)
def test_other_public_names(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(TypeError) as raised:
        call()
    assert_ours(raised.value, name)


SHOWN: list[tuple[str, Callable[[TorchComm], object]]] = [
    ("all_reduce: expected a torch.Tensor for tensor, got numpy.ndarray; convert it with torch.from_numpy",
     lambda c: c.all_reduce(np.ones(2), SUM, False)),  # type: ignore[arg-type]
    ("all_reduce: expected a torch.Tensor for tensor, got list", lambda c: c.all_reduce([X], SUM, False)),  # type: ignore[arg-type]
    ("all_reduce: expected a ReduceOp for op, got torch.Tensor; write torch_overlap.ReduceOp.SUM, for example",
     lambda c: c.all_reduce(X, X, False)),  # type: ignore[arg-type]
    ("all_reduce: expected a bool for async_op, got None", lambda c: c.all_reduce(X, SUM, None)),  # type: ignore[arg-type]
    ("all_gather: expected a sequence of torch.Tensors for tensor_list, got torch_overlap.ReduceOp",
     lambda c: c.all_gather(SUM, X, False)),  # type: ignore[arg-type]
    ("all_gather: expected a torch.Tensor for tensor_list[1], got None",
     lambda c: c.all_gather([X, None, X], X, False)),
    ("gather: expected a sequence of torch.Tensors for output_tensor_list, got 5 (int)",
     lambda c: c.gather(5, X, 0, False)),  # type: ignore[arg-type]
    ("send: expected an int for dst, got 'one' (str)", lambda c: c.send(X, "one", False)),  # type: ignore[arg-type]
    ("send: expected a datetime.timedelta for timeout, got torch.Tensor; write timedelta(seconds=...)",
     lambda c: c.send(X, 0, False, timeout=X)),  # type: ignore[arg-type]
    ("barrier: expected a dict of strings for hints, got 'fast' (str)", lambda c: c.barrier(False, "fast")),  # type: ignore[arg-type]
    ("barrier: expected torch_overlap.BarrierOptions for options, got torch_overlap.SendOptions",
     lambda c: c.barrier(False, options=to.SendOptions())),  # type: ignore[arg-type]
    ("set_timeout: expected a value for timeout, got none; pass timeout=...", lambda c: c.set_timeout()),  # type: ignore[call-arg]
]  # fmt: skip


@pytest.mark.parametrize(("text", "call"), SHOWN, ids=[text.split(":")[0] for text, _ in SHOWN])
def test_an_error_is_one_line_that_names_the_argument(
    objects: dict[type, Any], text: str, call: Callable[[TorchComm], object]
) -> None:
    with pytest.raises(InvalidTypeError) as raised:
        call(objects[TorchComm])
    assert str(raised.value) == text


def test_a_number_of_too_many_bits_is_a_wrong_value(objects: dict[type, Any]) -> None:
    with pytest.raises(to.InvalidValueError, match=r"^send: expected a number of 32 bits for dst, got 4294967296$"):
        objects[TorchComm].send(X, 1 << 32, False)
    with pytest.raises(to.InvalidValueError, match=r"^put: expected a number of 32 bits for dst_rank, got 4294967296$"):
        objects[TorchCommWindow].put(X, 1 << 32, 0)


def test_bools_of_numpy_are_taken(objects: dict[type, Any]) -> None:
    for value in (True, False, np.True_, np.False_):
        objects[TorchComm].barrier(value).wait()


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
