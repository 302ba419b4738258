"""Hooks: when they run, their order, and their arguments."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from torch_overlap import InvalidValueError, OpName, ReduceOp, TorchComm, hooks, new_comm, symmetric_empty
from torch_overlap.testing import run_ranks


def exercise(comm: TorchComm) -> None:
    """Runs every operation once, in the order of OpName (without split, windows and finalize)."""
    size, rank, device = comm.get_size(), comm.get_rank(), comm.get_device()
    x = torch.ones(2, device=device)
    rows, flat = [x.clone() for _ in range(size)], x.repeat(size)
    peer = (rank + 1) % size
    if rank % 2 == 0:
        comm.send(x, peer, False).wait()
        comm.recv(x, peer, False).wait()
    else:
        comm.recv(x, peer, False).wait()
        comm.send(x, peer, False).wait()
    comm.broadcast(x, 0, False).wait()
    comm.all_reduce(x, ReduceOp.MAX, True).wait()
    comm.reduce(x, 1, ReduceOp.SUM, False).wait()
    comm.all_gather(rows, x, False).wait()
    comm.all_gather_v(rows, x, False).wait()
    comm.all_gather_single(flat, x, False).wait()
    comm.reduce_scatter(x, rows, ReduceOp.SUM, False).wait()
    comm.reduce_scatter_v(x, rows, ReduceOp.SUM, False).wait()
    comm.reduce_scatter_single(x, flat, ReduceOp.SUM, False).wait()
    comm.all_to_all([row.clone() for row in rows], rows, False).wait()
    comm.all_to_all_single(flat.clone(), flat, False).wait()
    comm.all_to_all_v_single(flat.clone(), flat, [2] * size, [2] * size, False).wait()
    comm.barrier(False).wait()
    comm.scatter(x, rows if rank == 0 else [], 0, False).wait()
    comm.gather(rows if rank == 0 else [], x, 0, False).wait()
    comm.gather_single(flat if rank == 0 else None, x, 0, False).wait()
    batch = comm.batch_op_create()
    batch.send(x, peer)
    batch.recv(x.clone(), peer)
    batch.issue(True).wait()


# Fields of upstream, and the reduction, which upstream does not have.
IN_PLACE, OUT_OF_PLACE = {"tensor", "async_op"}, {"output", "input", "async_op"}
FIELDS: dict[str, set[str]] = {
    "send": IN_PLACE | {"peer"}, "recv": IN_PLACE | {"peer"}, "broadcast": IN_PLACE | {"root"},
    "all_reduce": IN_PLACE | {"op"}, "reduce": IN_PLACE | {"op", "root"}, "all_gather": OUT_OF_PLACE,
    "all_gather_v": OUT_OF_PLACE, "all_gather_single": OUT_OF_PLACE, "reduce_scatter": OUT_OF_PLACE | {"op"},
    "reduce_scatter_v": OUT_OF_PLACE | {"op"}, "reduce_scatter_single": OUT_OF_PLACE | {"op"},
    "all_to_all": OUT_OF_PLACE, "all_to_all_single": OUT_OF_PLACE,
    "all_to_all_v_single": OUT_OF_PLACE | {"output_split_sizes", "input_split_sizes"}, "barrier": {"async_op"},
    "scatter": OUT_OF_PLACE | {"root"}, "gather": OUT_OF_PLACE | {"root"}, "gather_single": OUT_OF_PLACE | {"root"},
    "batch_op_issue": {"num_ops", "ops", "async_op"}, "split": {"ranks", "name"}, "new_window": set(),
}  # fmt: skip


def run_arguments(comm: TorchComm) -> None:
    seen: list[tuple[OpName, int, Any]] = []
    after: list[tuple[int, Any]] = []
    comm.register_pre_hook(lambda name, op_id, args: seen.append((name, op_id, args)))
    comm.register_post_hook(lambda op_id, args: after.append((op_id, args)))
    exercise(comm)
    child = comm.split([0, 1], name="hooked")
    assert child is not None
    child.finalize()
    window = comm.new_window(symmetric_empty(2, torch.float32, comm))
    window.put(torch.ones(1, device=comm.get_device()), comm.get_rank(), 1, False)
    window.signal(comm.get_rank(), False)
    window.wait_signal(comm.get_rank(), False)
    window.tensor_deregister()

    # Without NCCL a norm runs after an all_reduce like any other.
    expected = [name for name in OpName if name not in (OpName.finalize, OpName.all_reduce_rms_norm)]
    names = [name for name, _, _ in seen]
    if comm.get_rank() == 1:
        expected[0], expected[1] = expected[1], expected[0]
    assert names == expected
    ids = [op_id for _, op_id, _ in seen]
    assert ids == sorted(set(ids))
    assert [op_id for op_id, _ in after] == ids
    assert all(args.error is None for _, args in after)

    by_name = {name.name: args for name, _, args in seen}
    every_field = set.union(*FIELDS.values())
    for name, fields in FIELDS.items():
        assert {field for field in every_field if hasattr(by_name[name], field)} == fields, name
    for name, args in by_name.items():
        camel = "".join(part.capitalize() for part in name.split("_"))
        assert type(args).__name__ == f"{camel}PreHookArgs"
    assert by_name["send"].peer == 1 - comm.get_rank()
    assert by_name["broadcast"].root == 0
    assert by_name["all_reduce"].op == ReduceOp.MAX
    assert by_name["all_reduce"].async_op is True
    assert by_name["reduce"].root == 1
    assert len(by_name["all_gather"].output) == comm.get_size()
    assert by_name["all_gather_single"].output.numel() == 2 * comm.get_size()
    assert by_name["all_to_all_v_single"].input_split_sizes == [2] * comm.get_size()
    assert by_name["batch_op_issue"].num_ops == 2
    assert by_name["split"].ranks == [0, 1]
    assert by_name["split"].name == "hooked"
    assert isinstance(after[expected.index(OpName.split)][1], hooks.SplitPostHookArgs)


def test_every_operation_calls_hooks_with_its_arguments(any_backend: str, device: str) -> None:
    run_ranks(run_arguments, 2, backend=any_backend, device=device)


def fake(name: str) -> TorchComm:
    return new_comm("fake", "cpu", name=name, rank=0, size=2)


def test_finalize_calls_hooks_too() -> None:
    comm = fake("finalized")
    names: list[OpName] = []
    posts: list[Any] = []
    comm.register_pre_hook(lambda name, op_id, args: names.append(name))
    comm.register_post_hook(lambda op_id, args: posts.append(args))
    comm.finalize()
    assert names == [OpName.finalize]
    assert [type(args) for args in posts] == [hooks.FinalizePostHookArgs]


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_run_in_order_and_may_be_removed_inside_a_call(kind: str) -> None:
    with fake(f"ordered_{kind}") as comm:
        register = getattr(comm, f"register_{kind}_hook")
        calls: list[str] = []
        register(lambda *_: calls.append("first"))

        def once(*_: object) -> None:
            calls.append("once")
            once_handle.remove()

        def remove_the_next(*_: object) -> None:
            calls.append("remover")
            next_handle.remove()

        once_handle = register(once)
        register(remove_the_next)
        next_handle = register(lambda *_: calls.append("next"))
        register(lambda *_: calls.append("last"))
        comm.barrier(False)
        assert calls == ["first", "once", "remover", "next", "last"]  # a call runs the hooks of its start
        calls.clear()
        comm.barrier(False)
        assert calls == ["first", "remover", "last"]
        once_handle.remove()  # no-op the second time
        comm.barrier(False)
        assert calls == ["first", "remover", "last"] * 2


def test_a_hook_may_register_another_inside_a_call() -> None:
    with fake("grown") as comm:
        calls: list[str] = []

        def grow(*_: object) -> None:
            calls.append("grow")
            comm.register_post_hook(lambda *_: calls.append("grown"))
            handle.remove()

        handle = comm.register_post_hook(grow)
        comm.barrier(False)
        comm.barrier(False)
        assert calls == ["grow", "grown"]


def test_abort_hooks_run_in_order_and_may_be_removed_inside_a_call() -> None:
    comm = fake("aborted_in_order")
    calls: list[str] = []
    comm.register_abort_hook(lambda: calls.append("first"))

    def remove_both() -> None:
        calls.append("remover")
        own_handle.remove()
        next_handle.remove()

    own_handle = comm.register_abort_hook(remove_both)
    next_handle = comm.register_abort_hook(lambda: calls.append("next"))
    comm.register_abort_hook(lambda: calls.append("last"))
    comm.abort()
    assert calls == ["first", "remover", "next", "last"]


def test_a_dropped_handle_leaves_the_hook_in() -> None:
    with fake("dropped") as comm:
        calls: list[int] = []
        comm.register_pre_hook(lambda *_: calls.append(1))
        gc.collect()
        comm.barrier(False)
        assert calls == [1]


def test_an_exception_in_a_pre_hook_stops_the_operation() -> None:
    with fake("stopped") as comm:
        posts: list[Any] = []

        def refuse(*_: object) -> None:
            raise KeyError("not today")

        handle = comm.register_pre_hook(refuse)
        comm.register_post_hook(lambda op_id, args: posts.append(args))
        with pytest.raises(KeyError, match="not today"):
            comm.barrier(False)
        assert posts == []
        handle.remove()
        comm.barrier(False)
        assert len(posts) == 1


def test_a_validation_error_calls_no_hook() -> None:
    with fake("invalid") as comm:
        calls: list[int] = []
        comm.register_pre_hook(lambda *_: calls.append(1))
        with pytest.raises(InvalidValueError):
            comm.broadcast(torch.ones(1), 5, False)
        assert calls == []


def test_the_post_hook_sees_the_error_of_a_split() -> None:
    errors: list[Any] = []

    def run(comm: TorchComm) -> None:
        comm.register_post_hook(lambda op_id, args: errors.append(args.error))
        with pytest.raises(InvalidValueError):
            comm.split([5])

    run_ranks(run, 1, backend="local")
    assert len(errors) >= 1
    assert isinstance(errors[0], InvalidValueError)


def test_abort_runs_the_abort_hooks_once() -> None:
    comm = fake("aborted")
    calls: list[int] = []
    removed = comm.register_abort_hook(lambda: calls.append(1))
    comm.register_abort_hook(lambda: calls.append(2))
    removed.remove()
    comm.abort()
    comm.abort()
    assert calls == [2]
    assert comm.is_aborted()


def test_the_communicator_lets_go_of_a_removed_callback() -> None:
    class Callback:
        def __call__(self, *_: object) -> None:
            pass

    with fake("released") as comm:
        callback = Callback()
        gone = weakref.ref(callback)
        handle = comm.register_post_hook(callback)
        comm.barrier(False)
        handle.remove()
        del callback
        gc.collect()
        assert gone() is None


def operations(comm: TorchComm) -> dict[str, Callable[..., object]]:
    window = comm.new_window(torch.zeros(2))
    x = torch.ones(1)
    return {
        "collective": lambda **given: comm.all_reduce(x, ReduceOp.SUM, False, **given),
        "window": lambda **given: window.put(x, 0, 0, False, **given),
    }


def lose_a_communicator(comm: TorchComm) -> hooks.RemovableHandle:
    """Makes the next operation of `comm` warn in C++, on the thread that calls it."""
    others = [new_comm("fake", "cpu", name="lost", rank=0, size=1)]
    return comm.register_pre_hook(lambda *_: others.clear())


@pytest.mark.parametrize("kind", ["collective", "window"])
@pytest.mark.parametrize("given", [{}, {"timeout": timedelta(seconds=30)}])
def test_warnings_of_an_operation_are_python_warnings(kind: str, given: dict[str, object]) -> None:
    comm = new_comm("local", "cpu", rank=0, size=1, store=torch.distributed.HashStore())
    call = operations(comm)[kind]
    handle = lose_a_communicator(comm)
    with pytest.warns(UserWarning, match="'lost' is destroyed without finalize"):
        call(**given)
    handle.remove()
    handle = lose_a_communicator(comm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="'lost' is destroyed without finalize"):
            call(**given)
    handle.remove()
    comm.finalize()


@pytest.mark.parametrize("given", [{}, {"timeout": timedelta(seconds=30)}])
def test_an_operation_that_throws_prints_its_warnings(given: dict[str, object], capfd: pytest.CaptureFixture) -> None:
    comm = new_comm("fake", "cpu", rank=0, size=2)

    def fail(*_: object) -> None:
        raise KeyError("from the hook")

    lose_a_communicator(comm)
    comm.register_pre_hook(fail)
    with pytest.raises(KeyError, match="from the hook"):
        comm.barrier(False, **given)
    assert "'lost' is destroyed without finalize" in capfd.readouterr().err
    comm.abort()


def test_finalize_takes_no_number() -> None:
    seen: list[tuple[str, int]] = []
    for _ in range(2):
        comm = new_comm("fake", "cpu")
        comm.register_pre_hook(lambda name, op_id, args: seen.append((name.name, op_id)))
        comm.all_reduce(torch.ones(1), ReduceOp.SUM, False)
        comm.finalize()
    first = seen[0][1]
    assert seen == [("all_reduce", first), ("finalize", first + 1), ("all_reduce", first + 1), ("finalize", first + 2)]
