"""Backends written in Python: registered, found by entry point, called with positional arguments."""

from __future__ import annotations

import threading
from datetime import timedelta
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

import torch_overlap as to
from torch_overlap import ReduceOp, TorchComm, TorchCommBackend
from torch_overlap import comm as comm_module
from torch_overlap.testing import run_ranks


class Recorder(TorchCommBackend):
    """Records its calls; the last object made is in `made`."""

    made: list[Recorder] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        Recorder.made.append(self)

    def init(self, device: torch.device, name: str, options: to.CommOptions) -> None:
        self.calls.append(("init", device, name, options))

    def finalize(self) -> None:
        self.calls.append(("finalize",))

    def abort(self) -> None:
        self.calls.append(("abort",))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> None:
        self.calls.append(("all_reduce", tensor, op, async_op))
        tensor.mul_(self.size)

    def broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Any:
        return Pending()

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp, async_op: bool) -> Any:
        raise KeyError("reduce is broken")

    def barrier(self, async_op: bool) -> Any:
        return 5

    def all_to_all_v_single(self, *args: Any) -> None:
        self.calls.append(("all_to_all_v_single", *args))

    def all_gather(self, *args: Any) -> None:
        self.calls.append(("all_gather", *args))

    def gather_single(self, *args: Any) -> None:
        self.calls.append(("gather_single", *args))


class Pending:
    def __init__(self) -> None:
        self.waited: list[Any] = []

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waited.append(timeout)


@pytest.fixture
def recorder() -> Any:
    to.register_backend("recorder", Recorder)
    store = torch.distributed.HashStore()
    comm = to.new_comm("recorder", "cpu", "recorded", rank=0, size=1, store=store, hints={"own": "hint"})
    yield comm, Recorder.made[-1]
    if not comm.is_finalized():
        comm.finalize()


def test_it_starts_with_its_place_and_options(recorder: tuple[TorchComm, Recorder]) -> None:
    comm, backend = recorder
    assert comm.get_backend() == "recorder"
    assert comm.get_backend_version() == "0"
    assert (backend.rank, backend.size) == (0, 1)
    name, device, comm_name, options = backend.calls[0]
    assert (name, device, comm_name) == ("init", torch.device("cpu"), "recorded")
    assert dict(options.hints) == {"own": "hint"}
    options.store.set("mine", "x")
    assert options.store.get("mine") == b"x"


def test_operations_come_with_positional_arguments(recorder: tuple[TorchComm, Recorder]) -> None:
    comm, backend = recorder
    x = torch.ones(3)
    work = comm.all_reduce(x, ReduceOp.PREMUL_SUM(2.0), async_op=True)
    assert work.is_completed()
    assert work.status() is to.WorkStatus.COMPLETED
    work.wait()
    assert backend.calls[-1] == ("all_reduce", x, ReduceOp.PREMUL_SUM(2.0), True)
    y = torch.ones(4, 2)
    comm.all_to_all_v_single(y, y.clone(), [4], [4], False)
    assert backend.calls[-1][3:] == ([4], [4], False)
    comm.all_gather([y.clone()], y, False)
    assert [type(arg) for arg in backend.calls[-1][1:]] == [list, torch.Tensor, bool]
    comm.gather_single(y.clone(), y, 0, True)
    assert backend.calls[-1][3:] == (0, True)
    comm.finalize()
    assert backend.calls[-1] == ("finalize",)


def test_arguments_are_checked_before_they_come(recorder: tuple[TorchComm, Recorder]) -> None:
    comm, backend = recorder
    before = len(backend.calls)
    with pytest.raises(to.InvalidValueError, match="expected root in"):
        comm.broadcast(torch.ones(1), 3, False)
    assert len(backend.calls) == before


def test_a_returned_work_is_waited_for(recorder: tuple[TorchComm, Recorder]) -> None:
    comm, _ = recorder
    work = comm.broadcast(torch.ones(1), 0, True)
    assert not work.is_completed()
    assert work.status() is to.WorkStatus.INPROGRESS
    done: list[object] = []
    work._on_completion(done.append)
    assert done == []
    work.wait(timedelta(seconds=3))
    assert work.is_completed()
    assert done == [None]
    work.wait()


class Given(TorchCommBackend):
    """A backend that returns the work that the test gives it."""

    work: Any = None

    def broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Any:
        return Given.work

    def send(self, tensor: torch.Tensor, dst: int, async_op: bool) -> Any:
        return Given.work

    def recv(self, tensor: torch.Tensor, src: int, async_op: bool) -> Any:
        return Given.work


@pytest.fixture
def issue() -> Any:
    """Returns the TorchWork of an operation for which the backend returned `work`."""
    to.register_backend("given", Given)
    comm = to.new_comm("given", "cpu", "given", rank=0, size=1, store=torch.distributed.HashStore())

    def issue_given(work: Any, batch: int = 0) -> to.TorchWork:
        Given.work = work
        if not batch:
            return comm.broadcast(torch.ones(1), 0, True)
        ops = comm.batch_op_create()
        for _ in range(batch // 2):
            ops.send(torch.ones(1), 0)
            ops.recv(torch.ones(1), 0)
        return ops.issue(True)

    yield issue_given
    Given.work = None
    comm.finalize()


class Failed:
    def wait(self) -> None:
        raise KeyError("no such thing")


def test_a_failed_work_raises_at_every_wait(issue: Any) -> None:
    work = issue(Failed())
    seen: list[object] = []
    work._on_completion(seen.append)
    for _ in range(3):
        with pytest.raises(KeyError, match="no such thing"):
            work.wait()
        with pytest.raises(KeyError, match="no such thing"):
            work.wait(timedelta(seconds=1))
    assert work.is_completed()
    assert work.status() is to.WorkStatus.ERROR
    assert isinstance(work.exception(), KeyError)
    work._on_completion(seen.append)
    assert [type(error) for error in seen] == [KeyError, KeyError]


class Polled:
    """A work whose wait() has no timeout."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def wait(self) -> None:
        self.done.wait()

    def is_completed(self) -> bool:
        return self.done.is_set()


class Timed(Polled):
    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.done.wait(timeout.total_seconds() if timeout else None):
            raise TimeoutError("Timed")


class Answering(Polled):
    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        return self.done.wait(timeout.total_seconds() if timeout else None)


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("kind", [Polled, Timed, Answering])
def test_a_timeout_settles_nothing(issue: Any, kind: type[Polled], batch: int) -> None:
    given = kind()
    work = issue(given, batch)
    seen: list[object] = []
    work._on_completion(seen.append)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            work.wait(timedelta(milliseconds=5))
        assert not work.is_completed()
        assert work.status() is to.WorkStatus.INPROGRESS
    assert seen == []
    given.done.set()
    assert work.is_completed()
    work.wait(timedelta(seconds=10))
    assert work.status() is to.WorkStatus.COMPLETED
    assert seen == [None]


def test_a_timeout_needs_something_to_ask(issue: Any) -> None:
    class OnlyWait:
        def wait(self) -> None:
            pass

    work = issue(OnlyWait())
    with pytest.raises(to.UnsupportedError, match=r"wait: expected a work whose wait\(\) takes a timeout"):
        work.wait(timedelta(seconds=1))
    work.wait()
    assert work.is_completed()


def test_exceptions_pass_unchanged(recorder: tuple[TorchComm, Recorder]) -> None:
    comm, _ = recorder
    with pytest.raises(KeyError, match="reduce is broken"):
        comm.reduce(torch.ones(1), 0, ReduceOp.SUM, False)
    with pytest.raises(to.InvalidTypeError, match=r"barrier #\d+ on 'recorded': expected None or an object with wait"):
        comm.barrier(False)
    with pytest.raises(to.UnsupportedError, match="scatter: expected a backend that has it, got Recorder"):
        comm.scatter(torch.ones(1), [torch.ones(1)], 0, False)


def test_a_split_makes_another_object(recorder: tuple[TorchComm, Recorder]) -> None:
    comm, backend = recorder
    child = comm.split([0], "recorded_child")
    assert child is not None
    assert Recorder.made[-1] is not backend
    assert Recorder.made[-1].calls[0][2] == "recorded_child"
    child.abort()
    assert Recorder.made[-1].calls[-1] == ("abort",)


class StoreBackend(TorchCommBackend):
    """A working backend: it exchanges objects through the store."""

    def init(self, device: torch.device, name: str, options: to.CommOptions) -> None:
        self.store: Any = options.store
        self.count = 0

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> None:
        self.count += 1
        self.store.set(f"{self.count}/{self.rank}", str(tensor.item()))
        tensor.fill_(sum(float(self.store.get(f"{self.count}/{rank}")) for rank in range(self.size)))


def run_store_backend(rank: int, size: int, store: Any) -> None:
    to.register_backend("by_store", StoreBackend)
    with to.new_comm("by_store", "cpu", "by_store", rank=rank, size=size, store=store) as comm:
        for turn in range(3):
            x = torch.tensor([float(rank + turn)])
            comm.all_reduce(x, ReduceOp.SUM, False).wait()
            assert x.item() == sum(r + turn for r in range(size))
        half = comm.split([r for r in range(size) if r % 2 == rank % 2])
        assert half is not None
        x = torch.tensor([1.0])
        half.all_reduce(x, ReduceOp.SUM, False).wait()
        assert x.item() == half.get_size()
        half.finalize()


def test_a_python_backend_communicates() -> None:
    run_ranks(run_store_backend, 3, comm=False)


def test_it_may_be_used_from_threads(recorder: tuple[TorchComm, Recorder]) -> None:
    comm, _ = recorder
    errors: list[BaseException] = []

    def many() -> None:
        try:
            for _ in range(50):
                comm.all_reduce(torch.ones(1), ReduceOp.SUM, False).wait()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_only_subclasses_are_backends() -> None:
    with pytest.raises(to.InvalidTypeError, match="expected a subclass of TorchCommBackend"):
        to.register_backend("object", object)  # type: ignore[arg-type]


def test_built_backends_are_those_that_new_comm_knows() -> None:
    assert {"gloo", "local", "fake"} <= set(to.built_backends())
    assert to.is_backend_built("GLOO")
    assert not to.is_backend_built("no_such_backend")


def test_a_missing_backend_is_a_module_not_found_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="failed to find backend 'no_such_backend'"):
        to.new_comm("no_such_backend", "cpu", rank=0, size=1)


def plug_in() -> None:
    to.register_backend("plugged", Recorder)


def broken_plug_in() -> None:
    pass


def test_a_package_brings_a_backend_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Entry:
        def __init__(self, name: str, load: Any) -> None:
            self.name, self.value, self.load = name, f"somewhere:{name}", lambda: load

    def entry_points(group: str, name: str) -> list[EntryPoint]:
        assert group == "torch_overlap.backends"
        asked.append(name)
        found = {"plugged": plug_in, "broken": broken_plug_in}.get(name)
        return [Entry(name, found)] if found else []  # type: ignore[list-item]

    monkeypatch.setattr(comm_module, "entry_points", entry_points)
    store = torch.distributed.HashStore()
    for turn in range(2):
        to.new_comm("plugged", "cpu", f"plugged{turn}", rank=0, size=1, store=store).finalize()
    assert asked == ["plugged"]
    with pytest.raises(ModuleNotFoundError, match="was loaded and did not register it"):
        to.new_comm("broken", "cpu", rank=0, size=1)


class SlowToAbort(Recorder):
    """Its abort ends when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def abort(self) -> None:
        self.let_go.wait(120)
        super().abort()


@pytest.fixture
def slow_to_abort() -> Any:
    to.register_backend("slow_to_abort", SlowToAbort)
    comm = to.new_comm("slow_to_abort", "cpu", "slow", rank=0, size=1, store=torch.distributed.HashStore(),
                       enable_reconfigure=True)  # fmt: skip
    backend = Recorder.made[-1]
    assert isinstance(backend, SlowToAbort)
    yield comm, backend
    for made in Recorder.made:
        if isinstance(made, SlowToAbort):
            made.let_go.set()
    if not comm.is_finalized():
        comm.finalize()


def test_a_slow_abort_does_not_hold_up_a_reconfigure(slow_to_abort: tuple[TorchComm, SlowToAbort]) -> None:
    comm, old = slow_to_abort
    with pytest.warns(UserWarning, match="expected the abort .* within 1000 ms, got no end; it goes on in the back"):
        comm.reconfigure(1, [comm.get_init_handle()], timeout=timedelta(seconds=2))
    assert ("abort",) not in old.calls
    x = torch.ones(2)
    comm.all_reduce(x, ReduceOp.SUM, False)
    assert Recorder.made[-1].calls[-1][0] == "all_reduce"


def test_an_error_of_a_reconfigure_names_a_slow_abort(slow_to_abort: tuple[TorchComm, SlowToAbort]) -> None:
    comm, old = slow_to_abort
    handles = [comm.get_init_handle(), "nobody"]
    named = r"of which the abort of what was under way took 1\d\d\d, got none"
    with pytest.raises(to.OperationTimeoutError, match=named):
        comm.reconfigure(1, handles, timeout=timedelta(seconds=2))
    assert ("abort",) not in old.calls
    assert comm.is_aborted()


class FailsToAbort(Recorder):
    def abort(self) -> None:
        raise KeyError("abort is broken")


def test_an_abort_that_raises_leaves_an_aborted_communicator() -> None:
    to.register_backend("fails_to_abort", FailsToAbort)
    comm = to.new_comm("fails_to_abort", "cpu", "fails", rank=0, size=1, store=torch.distributed.HashStore(),
                       enable_reconfigure=True)  # fmt: skip
    with pytest.raises(KeyError, match="abort is broken"):
        comm.reconfigure(1, [comm.get_init_handle()])
    assert comm.is_aborted()
    comm.finalize()
