"""Options have effects: timeouts fire, hints are read, precedence holds. It is not enough that they are stored."""

import copy
import functools
import inspect
import pickle
import random
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from comm_calls import LARGE, arguments
from torch.distributed import Store

import torch_overlap as to
from torch_overlap import CommOptions, InvalidTypeError, InvalidValueError, OperationTimeoutError, ReduceOp, TorchComm
from torch_overlap.testing import run_ranks

BLOCKING = ["gloo", "local"]
SHORT = timedelta(milliseconds=300)
# Generous: the test checks which of two very different limits fired. Without SHORT it is the communicator's, of 100 s.
LONG_SECONDS = 40
PATIENT_RANKS = 200


def alone(comm: TorchComm, **split: object) -> TorchComm:
    """Returns a communicator of all ranks that only rank 0 uses."""
    child = comm.split(list(range(comm.get_size())), **split)  # type: ignore[arg-type]
    assert child is not None
    return child


def expect_timeout(comm: TorchComm, child: TorchComm, call: object) -> None:
    if comm.get_rank() == 0:
        start = time.monotonic()
        with pytest.raises(OperationTimeoutError) as caught:
            call(child)  # type: ignore[operator]
        assert time.monotonic() - start < LONG_SECONDS
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, to.Error)
        assert child.get_name() in str(caught.value)
    comm.barrier(False).wait()
    child.abort()


def run_operation_timeout(comm: TorchComm, how: str) -> None:
    x = torch.ones(3)

    def call(child: TorchComm) -> None:
        if how == "keyword":
            child.all_reduce(x, ReduceOp.SUM, False, timeout=SHORT).wait()
        elif how == "keyword over options":
            options = to.BarrierOptions(timeout=timedelta(hours=1))
            child.barrier(False, options=options, timeout=SHORT).wait()
        elif how == "async":
            work = child.all_reduce(x, ReduceOp.SUM, True, timeout=timedelta(seconds=3))
            assert not work.is_completed()
            try:
                work.wait()
            finally:
                assert work.status() is to.WorkStatus.TIMEDOUT
                assert isinstance(work.exception(), OperationTimeoutError)
                assert work.is_completed()

    expect_timeout(comm, alone(comm), call)


HOWS = ["keyword", "keyword over options", "async"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("which", BLOCKING)
def test_the_timeout_of_an_operation_fires(which: str, how: str) -> None:
    run_ranks(run_operation_timeout, 2, how, backend=which, timeout=PATIENT_RANKS)


def run_communicator_timeout(comm: TorchComm) -> None:
    child = alone(comm, timeout=timedelta(seconds=8))  # its creation has this timeout too
    expect_timeout(comm, child, lambda c: c.barrier(False).wait())


@pytest.mark.parametrize("which", BLOCKING)
def test_the_timeout_of_a_communicator_is_its_operations(which: str) -> None:
    run_ranks(run_communicator_timeout, 2, backend=which, timeout=PATIENT_RANKS)


def run_wait_timeout(comm: TorchComm) -> None:
    child = alone(comm)
    if comm.get_rank() == 0:
        x = torch.ones(2)
        work = child.all_reduce(x, ReduceOp.SUM, True)
        with pytest.raises(OperationTimeoutError):
            work.wait(SHORT)
        with pytest.raises(OperationTimeoutError):
            work.wait_blocking(SHORT)
        assert not work.is_completed()
        assert work.status() is to.WorkStatus.INPROGRESS
        assert work.exception() is None
        comm.barrier(False).wait()
        work.wait(timedelta(seconds=LONG_SECONDS))
        assert work.status() is to.WorkStatus.COMPLETED
        assert torch.equal(x, torch.full((2,), 2.0))
    else:
        comm.barrier(False).wait()
        child.all_reduce(torch.ones(2), ReduceOp.SUM, False).wait()
    child.finalize()


@pytest.mark.parametrize("which", BLOCKING)
def test_a_wait_that_times_out_leaves_the_operation_going(which: str) -> None:
    run_ranks(run_wait_timeout, 2, backend=which, timeout=PATIENT_RANKS)


def run_environment_timeout(rank: int, size: int, store: object) -> None:
    comm = to.new_comm("gloo", "cpu", "given", store=store, rank=rank, size=size)  # type: ignore[arg-type]
    options = comm.get_options()
    assert options.timeout == timedelta(seconds=62.5)
    assert options.abort_process_on_timeout_or_error is False
    assert to.CommOptions().timeout == timedelta(seconds=62.5)
    comm.finalize()
    wins = CommOptions()
    wins.timeout = timedelta(seconds=30)
    wins.hints = {"a_hint": "of the options", "another": "x"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        comm = to.new_comm("gloo", "cpu", "o", options=wins, store=store, rank=rank, size=size, hints={"a_hint": "y"})  # type: ignore[arg-type]
    assert comm.get_options().timeout == timedelta(seconds=30)
    assert dict(comm.get_options().hints) == {"a_hint": "y", "another": "x"}
    assert dict(wins.hints)["a_hint"] == "of the options"
    assert comm.get_options().abort_process_on_timeout_or_error is False
    comm.finalize()
    wins.hints = {}
    wins.abort_process_on_timeout_or_error = True
    given: dict[str, Any] = {"options": wins, "store": store, "rank": rank, "size": size}
    with to.new_comm("gloo", "cpu", "options", **given) as comm:
        assert comm.get_options().abort_process_on_timeout_or_error is True
    given |= {"timeout": timedelta(seconds=20), "abort_process_on_timeout_or_error": False}
    with to.new_comm("gloo", "cpu", "arguments", **given) as comm:
        assert comm.get_options().timeout == timedelta(seconds=20)
        assert comm.get_options().abort_process_on_timeout_or_error is False


def test_arguments_override_options_override_the_environment() -> None:
    env = {"TORCHCOMM_TIMEOUT_SECONDS": "62.5", "TORCHCOMM_ABORT_ON_ERROR": "no"}
    run_ranks(run_environment_timeout, 2, comm=False, env=env)


def test_defaults_are_those_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHCOMM_TIMEOUT_SECONDS", "TORCHCOMM_ABORT_ON_ERROR"):
        monkeypatch.delenv(name, raising=False)
    options = CommOptions()
    assert options.timeout == timedelta(seconds=600)
    assert options.abort_process_on_timeout_or_error is True
    assert options.is_high_priority_stream is False
    assert options.enable_reconfigure is False
    assert options.name is None
    assert options.store is None
    assert dict(options.hints) == {}
    with pytest.raises(TypeError):
        options.hints["a"] = "lost"  # type: ignore[index]


def test_enable_reconfigure_comes_from_the_argument_or_the_options() -> None:
    options = CommOptions()
    options.enable_reconfigure = True
    for given in ({"enable_reconfigure": True}, {"options": options}):
        with to.new_comm("fake", "cpu", rank=0, size=1, **given) as comm:
            assert comm.get_options().enable_reconfigure
    with to.new_comm("fake", "cpu", rank=0, size=1, options=options, enable_reconfigure=False) as comm:
        assert not comm.get_options().enable_reconfigure


CLASSES = {
    "send": "SendOptions",
    "recv": "RecvOptions",
    "broadcast": "BroadcastOptions",
    "all_reduce": "AllReduceOptions",
    "reduce": "ReduceOptions",
    "all_gather": "AllGatherOptions",
    "all_gather_v": "AllGatherOptions",
    "all_gather_single": "AllGatherSingleOptions",
    "reduce_scatter": "ReduceScatterOptions",
    "reduce_scatter_v": "ReduceScatterOptions",
    "reduce_scatter_single": "ReduceScatterSingleOptions",
    "all_to_all": "AllToAllOptions",
    "all_to_all_single": "AllToAllSingleOptions",
    "all_to_all_v_single": "AllToAllvSingleOptions",
    "barrier": "BarrierOptions",
    "scatter": "ScatterOptions",
    "gather": "GatherOptions",
    "gather_single": "GatherSingleOptions",
    "batch_op_issue": "BatchP2POptions",
}


def test_the_table_has_every_class() -> None:
    exported = {name for name in to.__all__ if name.endswith("Options")}
    of_a_communicator = {"CommOptions", "BackendOptions", "ReconfigureOptions"}
    assert set(CLASSES.values()) == exported - of_a_communicator


@pytest.mark.parametrize("name", sorted(set(CLASSES.values())))
def test_the_options_of_an_operation_are_copied_and_pickled(name: str, seed: int) -> None:
    rng = random.Random(seed)
    hints = {f"key {i}": str(rng.random()) for i in range(rng.randrange(4))}
    options = getattr(to, name)(hints, timedelta(milliseconds=rng.randrange(10**9)))
    for again in (copy.copy(options), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert type(again) is type(options)
        assert (dict(again.hints), again.timeout, repr(again)) == (hints, options.timeout, repr(options))
        again.hints, again.timeout = {"other": "1"}, timedelta(0)
        assert (dict(options.hints), options.timeout) == (hints, options.timeout)


def operations(comm: TorchComm) -> dict[str, Callable[..., to.TorchWork]]:
    """Returns every operation, with all arguments but async_op and its options."""
    x, peer = torch.ones(LARGE, device=comm.get_device()), 1 - comm.get_rank()

    def batch(async_op: bool, **given: Any) -> to.TorchWork:
        ops = comm.batch_op_create()
        ops.send(x, peer)
        ops.recv(x.clone(), peer)
        return ops.issue(async_op, **given)

    calls: dict[str, Callable[..., to.TorchWork]] = {
        name: functools.partial(getattr(comm, name), *args) for name, args in arguments(comm).items()
    }
    return {**calls, "batch_op_issue": batch}


def run_timeout_of_the_class(comm: TorchComm, name: str) -> None:
    options = getattr(to, CLASSES[name])(timeout=SHORT)
    expect_timeout(comm, alone(comm), lambda child: operations(child)[name](False, options=options).wait())


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("which", BLOCKING)
def test_the_timeout_of_every_options_class_fires(which: str, name: str) -> None:
    run_ranks(run_timeout_of_the_class, 2, name, backend=which, timeout=PATIENT_RANKS)


def run_every_class(comm: TorchComm) -> None:
    assert operations(comm).keys() == CLASSES.keys()
    for name, call in operations(comm).items():
        kind = getattr(to, CLASSES[name])
        options = kind(hints={"is_high_priority_stream": "true"}, timeout=timedelta(seconds=60))
        assert options.timeout == timedelta(seconds=60)
        assert dict(options.hints) == {"is_high_priority_stream": "true"}
        call(False, options=options).wait()
        call(async_op=True, hints=options.hints, timeout=options.timeout).wait()
        bad = {"is_high_priority_stream": "perhaps"}
        for how in ({"hints": bad}, {"options": kind(hints=bad)}):
            with pytest.raises(InvalidValueError, match="is_high_priority_stream"):
                call(False, **how)
        wrong = to.SendOptions() if kind is not to.SendOptions else to.RecvOptions()
        with pytest.raises(InvalidTypeError, match=f"{name}: expected .*{kind.__name__} for options, got"):
            call(False, options=wrong)
        with pytest.raises(InvalidValueError, match=f"{name}: expected a timeout >= 0"):
            call(False, timeout=timedelta(seconds=-1))


def test_every_operation_takes_its_own_options(any_backend: str, device: str) -> None:
    run_ranks(run_every_class, 2, backend=any_backend, device=device)


def run_unknown_hints(comm: TorchComm, name: str) -> None:
    """A process warns once about a name, whichever communicator gets it."""

    def reconfigure(hints: dict[str, str]) -> None:
        comm.reconfigure(1, [comm.get_init_handle()], hints=hints)

    def make(hints: dict[str, str]) -> None:
        kind, where = comm.get_backend(), comm.get_device()
        to.new_comm(kind, where, store=torch.distributed.HashStore(), rank=0, size=1, hints=hints).finalize()

    def split(hints: dict[str, str]) -> None:
        child = comm.split([0], hints=hints)
        assert child is not None
        child.finalize()

    ways = {
        "operation": lambda hints: comm.barrier(False, hints=hints).wait(),
        "new_comm": make, "split": split, "set_hints": comm.set_hints, "reconfigure": reconfigure,
    }  # fmt: skip
    for way, call in ways.items():
        hints = {f"{name}_{way}_{i}": "x" for i in range(2)}
        with pytest.warns(UserWarning, match="hints are ignored") as caught:
            call(hints)
        assert len(caught) == 1, way
        where = "barrier" if way == "operation" else comm.get_backend()
        message = str(caught[0].message)
        assert f"{where}: unknown hints are ignored: [{', '.join(hints)}]; known ones are [" in message
        known = {"operation": ["is_high_priority_stream", "custom_collectives"]}
        own = {"gloo": ["hostname", "interface"], "local": ["local::delay"], "nccl": ["maxCTAs", "graph_timeouts"],
               "fake": []}[comm.get_backend()]  # fmt: skip
        for hint in known.get(way, [*own, "is_high_priority_stream", "check_mismatch", "custom_collectives"]):
            assert hint in message, (way, hint)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if way != "reconfigure":
                call(hints)


def run_unknown_hints_here(rank: int, size: int, store: Store, backend: str, device: str, name: str) -> None:
    comm = to.new_comm(backend, device, store=store, rank=rank, size=size, enable_reconfigure=True)
    run_unknown_hints(comm, name)
    comm.finalize()


def test_unknown_hints_are_named_in_one_warning(any_backend: str, device: str, seed: int) -> None:
    run_ranks(run_unknown_hints_here, 1, any_backend, device, f"hint_{seed}", comm=False)


UNREADABLE = {
    "fake": {"is_high_priority_stream": "perhaps"},
    "gloo": {"hostname": "127.0.0.1", "interface": "lo"},
    "local": {"local::delay": "soon"},
    "nccl": {"minCTAs": "many"},
}


def run_unreadable_hints(rank: int, size: int, store: Store, backend: str, device: str) -> None:
    hints = UNREADABLE[backend]
    comm = to.new_comm(backend, device, store=store, rank=rank, size=size, enable_reconfigure=True)
    for call in (comm.set_hints, lambda hints: comm.reconfigure(1, [comm.get_init_handle()], hints=hints)):
        with pytest.raises(InvalidValueError):
            call(hints)
        assert not hints.keys() & dict(comm.get_options().hints).keys()
        comm.barrier(False).wait()  # unchanged
    comm.finalize()


def test_hints_that_cannot_be_read_change_nothing(any_backend: str, device: str) -> None:
    run_ranks(run_unreadable_hints, 1, any_backend, device, comm=False)


def test_hints_that_are_arguments_override_the_options() -> None:
    options = CommOptions()
    options.is_high_priority_stream = False
    hints = {"is_high_priority_stream": "true"}
    with to.new_comm("fake", "cpu", "by_hint", rank=0, size=1, options=options, hints=hints) as comm:
        assert comm.get_options().is_high_priority_stream is True
    given = {"options": options, "hints": hints, "is_high_priority_stream": False}
    with to.new_comm("fake", "cpu", "by_field", rank=0, size=1, **given) as comm:  # type: ignore[arg-type]
        assert comm.get_options().is_high_priority_stream is False


@pytest.mark.parametrize("key", ["is_high_priority_stream", "torchcomm::ncclx::high_priority_stream"])
def test_both_spellings_of_the_priority_hint_are_the_option(key: str) -> None:
    with to.new_comm("fake", "cpu", f"hint_{len(key)}", rank=0, size=1, hints={key: "true"}) as comm:
        assert comm.get_options().is_high_priority_stream is True
        assert dict(comm.get_options().hints) == {}


def run_priority(comm: TorchComm) -> None:
    x = torch.ones(4, device=comm.get_device())

    def priority(work: to.TorchWork) -> int:
        stream = work.stream
        assert stream is not None
        kind = stream.device_type
        return torch.cuda.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=kind
        ).priority

    normal = comm.all_reduce(x, ReduceOp.SUM, True)
    assert priority(normal) == 0
    for key in ("is_high_priority_stream", "torchcomm::ncclx::high_priority_stream"):
        raised = comm.all_reduce(x, ReduceOp.SUM, True, hints={key: "true"})
        assert priority(raised) < 0
        raised.wait()
    normal.wait()


@pytest.mark.gpu(2)
def test_a_priority_hint_puts_the_operation_on_a_stream_of_high_priority() -> None:
    run_ranks(run_priority, 2, backend="nccl", device="cuda")


def test_operations_say_what_they_take() -> None:
    """help() shows every argument by name."""
    for name in ("all_reduce", "send", "all_to_all_v_single"):
        parameters = [name for name in inspect.signature(getattr(TorchComm, name)).parameters if name != "tag"]
        assert parameters[-4:] == ["async_op", "hints", "timeout", "options"]
