"""Options have effects: timeouts fire, hints are read, precedence holds. What is stored is not enough."""

import inspect
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch

import torch_overlap as to
from torch_overlap import CommOptions, InvalidTypeError, InvalidValueError, OperationTimeoutError, ReduceOp, TorchComm
from torch_overlap.testing import run_ranks

BLOCKING = ["gloo", "local"]
SHORT = timedelta(milliseconds=300)
# Generous: what is asked is which of two far apart limits fired. Without SHORT it is the communicator's, of 100 s.
LONG_SECONDS = 40
PATIENT_RANKS = 200
LARGE = 1 << 16  # elements: more than a transport takes before the peer asks for them


def alone(comm: TorchComm, **split: object) -> TorchComm:
    """A communicator of all ranks that only rank 0 is going to use."""
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
    child = alone(comm, timeout=timedelta(seconds=4))  # in which it is also made
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
    comm.finalize()


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
    for arguments in ({"enable_reconfigure": True}, {"options": options}):
        with to.new_comm("fake", "cpu", rank=0, size=1, **arguments) as comm:
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


def arguments(comm: TorchComm) -> dict[str, tuple[Any, ...]]:
    """Of every operation in two ranks, before async_op: roots and peers so that rank 0 waits for rank 1."""
    x, peer = torch.ones(LARGE), 1 - comm.get_rank()
    rows, flat = [x.clone() for _ in range(2)], x.repeat(2)
    p2p = [("send", (x, peer)), ("recv", (x.clone(), peer))]
    return {
        **dict(p2p if peer else reversed(p2p)),
        "broadcast": (x, 1), "all_reduce": (x, ReduceOp.SUM), "reduce": (x, 0, ReduceOp.SUM), "barrier": (),
        "all_gather": (rows, x), "all_gather_v": (rows, x), "all_gather_single": (flat, x), "gather": (rows, x, 0),
        "gather_single": (flat, x, 0), "reduce_scatter": (x, rows, ReduceOp.SUM),
        "reduce_scatter_v": (x, rows, ReduceOp.SUM), "reduce_scatter_single": (x, flat, ReduceOp.SUM),
        "scatter": (x, rows, 1), "all_to_all": (rows, [row.clone() for row in rows]),
        "all_to_all_single": (flat, flat.clone()), "all_to_all_v_single": (flat, flat.clone(), [], []),
    }  # fmt: skip


def run_timeout_of_the_class(comm: TorchComm, name: str) -> None:
    options = getattr(to, CLASSES[name])(timeout=SHORT)

    def call(child: TorchComm) -> None:
        if name == "batch_op_issue":
            batch = child.batch_op_create()
            batch.recv(torch.ones(3), 1)
            batch.issue(False, options).wait()
        else:
            getattr(child, name)(*arguments(child)[name], False, options=options).wait()

    expect_timeout(comm, alone(comm), call)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("which", BLOCKING)
def test_the_timeout_of_every_options_class_fires(which: str, name: str) -> None:
    run_ranks(run_timeout_of_the_class, 2, name, backend=which, timeout=PATIENT_RANKS)


def run_every_class(comm: TorchComm) -> None:
    for name, args in arguments(comm).items():
        kind = getattr(to, CLASSES[name])
        options = kind(hints={"is_high_priority_stream": "true"}, timeout=timedelta(seconds=60))
        assert options.timeout == timedelta(seconds=60)
        assert dict(options.hints) == {"is_high_priority_stream": "true"}
        getattr(comm, name)(*args, False, options=options).wait()
        getattr(comm, name)(*args, async_op=True, hints=options.hints, timeout=options.timeout).wait()
        bad = {"is_high_priority_stream": "perhaps"}
        for how in ({"hints": bad}, {"options": kind(hints=bad)}):
            with pytest.raises(InvalidValueError, match="is_high_priority_stream"):
                getattr(comm, name)(*args, False, **how)
        wrong = to.SendOptions() if kind is not to.SendOptions else to.RecvOptions()
        with pytest.raises(InvalidTypeError, match=f"{name}: expected options as .*{kind.__name__}, got"):
            getattr(comm, name)(*args, False, options=wrong)
        with pytest.raises(InvalidValueError, match=f"{name}: expected a timeout >= 0"):
            getattr(comm, name)(*args, False, timeout=timedelta(seconds=-1))


def test_every_operation_takes_its_own_options(any_backend: str) -> None:
    if any_backend != "nccl":
        run_ranks(run_every_class, 2, backend=any_backend)


def test_unknown_hints_are_named_in_one_warning() -> None:
    def body(comm: TorchComm) -> None:
        with pytest.warns(UserWarning, match="unknown hints are ignored: .*no_such_hint_1"):
            comm.barrier(False, hints={"no_such_hint_1": "x"})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            comm.barrier(False, hints={"no_such_hint_1": "x"})

    run_ranks(body, 1, backend="fake")


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
        text = inspect.getdoc(getattr(TorchComm, name)) or ""
        for argument in ("async_op", "hints", "timeout", "options"):
            assert argument in text, f"{name}: {argument}"
