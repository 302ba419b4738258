"""The hooks of the package: NaN check, log of calls, health."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_overlap as to
from torch_overlap.hooks import HealthCheck, NanCheckHook, clog
from torch_overlap.testing import run_ranks

NAN = float("nan")
SUM = to.ReduceOp.SUM


@pytest.fixture
def comm() -> Iterator[to.TorchComm]:
    with to.new_comm("fake", torch.device("cpu"), name="alone", rank=1, size=2) as comm:
        yield comm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_a_nan_that_would_be_sent_is_named(comm: to.TorchComm, dtype: torch.dtype) -> None:
    NanCheckHook().register_with_comm(comm)
    x = torch.ones(3, 4, dtype=dtype)
    comm.all_reduce(x, SUM, False)
    x[1, :2] = NAN
    with pytest.raises(to.Error, match=r"all_reduce #\d+ on 'alone': expected tensor without NaN, got 2 among 12"):
        comm.all_reduce(x, SUM, False)
    assert torch.equal(x[0], torch.full((4,), 2, dtype=dtype))  # nothing was reduced


def test_each_tensor_of_an_operation_has_a_name(comm: to.TorchComm) -> None:
    hook = NanCheckHook()
    handles = hook.register_with_comm(comm)
    good, bad = torch.ones(2), torch.tensor([1.0, NAN])
    with pytest.raises(to.Error, match=r"reduce_scatter #\d+ .*expected input\[1\] without NaN"):
        comm.reduce_scatter(torch.empty(2), [good, bad], SUM, False)
    with pytest.raises(to.Error, match=r"all_gather_single .*expected input without NaN"):
        comm.all_gather_single(torch.empty(4), bad, False)
    batch = comm.batch_op_create()
    batch.recv(bad.clone(), 0)
    batch.send(bad, 0)
    with pytest.raises(to.Error, match=r"batch_op_issue .*expected ops\[1\].tensor without NaN"):
        batch.issue(False)
    for handle in handles:
        handle.remove()
    comm.all_reduce(bad, SUM, False)


def test_what_is_only_written_may_hold_anything_before(comm: to.TorchComm) -> None:
    NanCheckHook(check_inputs=True, check_outputs=True).register_with_comm(comm)
    poisoned = torch.full((2,), NAN)
    comm.recv(poisoned, 0, False)
    assert torch.equal(poisoned, torch.zeros(2))
    comm.all_gather([torch.full((2,), NAN) for _ in range(2)], torch.ones(2), False)
    comm.all_reduce(torch.full((4,), 3, dtype=torch.int32), SUM, False)
    comm.barrier(False)


def broadcast_nan(comm: to.TorchComm) -> str:
    hook = NanCheckHook(check_inputs=False, check_outputs=True)
    hook.register_with_comm(comm)
    x = torch.full((5,), NAN) if comm.get_rank() == 0 else torch.ones(5)
    work = comm.broadcast(x, 0, True)
    work.wait()
    with pytest.raises(to.Error, match="expected tensor without NaN, got 5") as raised:
        hook.check(wait=True)
    hook.check(wait=True)
    x.fill_(1)
    comm.barrier(False)
    return str(raised.value)


def test_a_nan_that_came_is_named_by_the_next_call() -> None:
    for message in run_ranks(broadcast_nan, 2):
        assert "broadcast #" in message


def test_results_of_synchronous_calls_are_checked_at_once(comm: to.TorchComm) -> None:
    hook = NanCheckHook(check_inputs=False, check_outputs=True)
    hook.register_with_comm(comm)
    with pytest.raises(to.Error, match=r"all_reduce #\d+ on 'alone': expected tensor without NaN"):
        comm.all_reduce(torch.tensor([NAN]), SUM, False)
    hook.check(wait=True)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_has_a_line_an_event(comm: to.TorchComm, tmp_path: Path) -> None:
    log = clog(tmp_path / "log", ["ALL"], verbose=["buffers"])
    handle = log.register_with_comm(comm)
    x = torch.ones(2, 3)
    before = time.time_ns()
    comm.reduce(x, 0, to.ReduceOp.MAX, False, timeout=timedelta(seconds=3))
    batch = comm.batch_op_create()
    batch.send(x, 0)
    batch.issue(True)
    handle.remove()
    comm.barrier(False)
    log.flush()
    lines = lines_of(tmp_path / "log")
    assert [(line["event"], line["op"]) for line in lines] == [
        ("Q", "reduce"),
        ("E", "reduce"),
        ("Q", "batch_op_issue"),
        ("E", "batch_op_issue"),
    ]
    first, last = lines[0], lines[1]
    assert first["id"] == last["id"]
    assert before <= first["time_ns"] <= last["time_ns"] <= time.time_ns()
    expected = {
        "comm": "alone",
        "rank": 1,
        "size": 2,
        "collective_seq": 1,
        "async_op": False,
        "timeout_ms": 3000,
        "input": [2, 3],
        "dtype": "Float",
        "root": 0,
        "reduce_op": "MAX",
        "buffers": [x.data_ptr()],
    }
    assert {key: first[key] for key in expected} == expected
    assert last["state"] == "completed"
    assert lines[2]["messages"] == [{"type": "send", "peer": 0, "sizes": [2, 3], "dtype": "Float"}]


def wait_for(path: Path) -> None:
    """Waits, for a rank that must not leave before another one is done: its end would be an error there."""
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def log_failure(comm: to.TorchComm, path: str) -> None:
    log = clog(f"{path}{comm.get_rank()}", ["S", "E"])
    log.register_with_comm(comm)
    if comm.get_rank() == 0:
        with pytest.raises(to.OperationTimeoutError):
            comm.recv(torch.empty(1), 1, True, timeout=timedelta(seconds=0.2)).wait()
        Path(path + "done").touch()
    wait_for(Path(path + "done"))
    comm.abort()
    log.flush()


def test_the_log_says_how_an_operation_failed(tmp_path: Path) -> None:
    run_ranks(log_failure, 2, str(tmp_path / "log"))
    start, end = lines_of(tmp_path / "log0")
    assert (start["event"], end["event"], end["state"]) == ("S", "E", "failed")
    assert "did not" in end["error"]
    assert end["duration_ms"] >= 100


def test_the_log_names_what_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(to.InvalidValueError, match=r"expected events among .*, got 'W'"):
        clog(tmp_path / "log", ["W"])
    with pytest.raises(
        to.InvalidTypeError, match=r"clog: expected events as a list of strings, got 'ALL'; write \['ALL'\]"
    ):
        clog(tmp_path / "log", "ALL")
    with pytest.raises(to.InvalidValueError, match="expected verbose among 'buffers', got 'all'"):
        clog(tmp_path / "log", ["Q"], verbose=["all"])
    with pytest.raises(to.Error, match="expected a file that can be written"):
        clog(tmp_path / "nowhere" / "log", ["Q"])


def test_lines_of_many_threads_are_whole(comm: to.TorchComm, tmp_path: Path) -> None:
    log = clog(tmp_path / "log")
    log.register_with_comm(comm)
    threads = [threading.Thread(target=lambda: [comm.barrier(False) for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.flush()
    lines = lines_of(tmp_path / "log")
    assert len(lines) == 800
    assert len({line["id"] for line in lines}) == 400


def state_of(name: str) -> dict[str, Any]:
    (found,) = [c for c in to.health()["communicators"] if c["name"] == name]
    return dict(found)


def run_health(comm: to.TorchComm, done: str) -> bool:
    name = comm.get_name()
    assert state_of(name)["state"] == "active"
    assert state_of(name)["oldest_pending"] is None
    if comm.get_rank() == 0:
        work = comm.recv(torch.empty(1), 1, True, timeout=timedelta(seconds=4))
        time.sleep(0.2)
        now = state_of(name)
        assert (now["pending"], now["oldest_pending"]["op"]) == (1, "recv")
        assert 0.1 < now["oldest_pending"]["age_seconds"] < now["oldest_pending"]["timeout_seconds"] == 4
        with pytest.raises(to.OperationTimeoutError):
            work.wait()
        now = state_of(name)
        assert (now["state"], now["pending"]) == ("failed", 0)
        assert "recv" in now["failure"]
        assert not HealthCheck().is_healthy()
        Path(done).touch()
    wait_for(Path(done))
    comm.abort()
    assert state_of(name)["state"] == ("failed" if comm.get_rank() == 0 else "aborted")
    return bool(HealthCheck()()["healthy"])


def test_health_follows_a_communicator(tmp_path: Path) -> None:
    assert run_ranks(run_health, 2, str(tmp_path / "done")) == [False, False]


def test_a_finalized_communicator_is_not_listed() -> None:
    with to.new_comm("fake", torch.device("cpu"), name="short", rank=0, size=2):
        assert state_of("short") == {
            "name": "short",
            "backend": "fake",
            "rank": 0,
            "size": 2,
            "state": "active",
            "pending": 0,
            "oldest_pending": None,
        }
    assert "short" not in [c["name"] for c in to.health()["communicators"]]


def test_torchs_control_plane_serves_health_and_recorder(comm: to.TorchComm) -> None:
    import http.client
    import socket
    import tempfile

    from torch._C._distributed_c10d import _WorkerServer

    folder = tempfile.TemporaryDirectory()  # short: the path of a socket has at most 107 characters
    path = folder.name + "/socket"
    server = _WorkerServer(path)
    try:
        comm.barrier(False)

        def ask(handler: str) -> Any:
            connection = http.client.HTTPConnection("localhost")
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(path)
            connection.request("POST", f"/handler/{handler}")
            response = connection.getresponse()
            assert response.status == 200
            return json.loads(response.read())

        assert ask("torch_overlap_health").keys() == {"healthy", "communicators"}
        assert ask("torch_overlap_flight_recorder")["entries"][-1]["op"] == "barrier"
    finally:
        server.shutdown()
        folder.cleanup()
