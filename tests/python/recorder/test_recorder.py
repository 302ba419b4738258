"""The Python interface of the flight recorder: its entries, and its cost."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import stat
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_overlap as to
from torch_overlap import flight_recorder
from torch_overlap.hooks import FlightRecorderHook
from torch_overlap.testing import run_ranks


@pytest.fixture
def comm() -> Any:
    flight_recorder.reset()
    with to.new_comm("fake", torch.device("cpu"), name="alone", rank=1, size=4) as comm:
        yield comm


def entries(include_completed: bool = True) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(flight_recorder.dump_json(include_completed))["entries"]
    return found


def test_an_entry_says_all_about_a_call(comm: to.TorchComm) -> None:
    before = time.time_ns()
    comm.reduce(torch.ones(2, 3, dtype=torch.int32), 3, to.ReduceOp.MAX, True, timeout=timedelta(seconds=7))
    after = time.time_ns()
    (entry,) = entries()
    assert before <= entry["time_created_ns"] <= entry["time_discovered_completed_ns"] <= after
    expected = {
        "op": "reduce",
        "profiling_name": "nccl:reduce",
        "process_group": ["alone", "fake"],
        "rank": 1,
        "record_id": 0,
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "input_sizes": [[2, 3]],
        "output_sizes": [[2, 3]],
        "input_dtypes": ["Int"],
        "output_dtypes": ["Int"],
        "reduce_op": "MAX",
        "root": 3,
        "async_op": True,
        "timeout_ms": 7000,
        "state": "completed",
        "retired": True,
        "frames": [],
    }
    assert {key: entry[key] for key in expected} == expected


def test_sequence_numbers_count_collectives_and_messages_apart(comm: to.TorchComm) -> None:
    x = torch.ones(2)
    comm.barrier(False)
    comm.send(x, 0, False)
    comm.all_reduce(x, to.ReduceOp.SUM, False)
    batch = comm.batch_op_create()
    batch.send(x, 2)
    batch.recv(x.clone(), 0)
    batch.issue(False)
    assert [(e["op"], e["collective_seq_id"], e["p2p_seq_id"]) for e in entries()] == [
        ("barrier", 1, 0),
        ("send", 1, 1),
        ("all_reduce", 2, 1),
        ("batch_op_issue", 2, 2),
    ]
    assert entries()[1]["messages"] == [{"type": "send", "peer": 0}]
    assert entries()[3]["messages"] == [{"type": "send", "peer": 2}, {"type": "recv", "peer": 0}]
    assert entries()[3]["input_sizes"] == [[2]]


def test_reset_forgets_and_numbers_anew(comm: to.TorchComm) -> None:
    comm.barrier(False)
    flight_recorder.reset()
    assert entries() == []
    comm.barrier(False)
    (entry,) = entries()
    assert (entry["record_id"], entry["collective_seq_id"]) == (0, 2)


def test_it_keeps_the_last_calls_only(comm: to.TorchComm) -> None:
    x = torch.ones(1)
    for _ in range(2100):
        comm.all_reduce(x, to.ReduceOp.MAX, False)
    kept = entries()
    assert [e["record_id"] for e in kept] == list(range(2100 - 2048, 2100))


def test_a_communicator_is_described_once_and_names_may_be_used_again(comm: to.TorchComm) -> None:
    with to.new_comm("fake", torch.device("cpu"), name="again", rank=0, size=2) as first:
        first.barrier(False)
    with to.new_comm("fake", torch.device("cpu"), name="again", rank=0, size=3) as second:
        second.barrier(False)
        trace = json.loads(flight_recorder.dump_json())
    assert trace["pg_config"]["again#2"]["ranks"] == "[0, 1]"
    assert trace["pg_config"]["again"]["ranks"] == "[0, 1, 2]"
    assert [e["process_group"][0] for e in trace["entries"]] == ["again#2", "again"]


def test_calls_that_are_refused_are_not_in_it(comm: to.TorchComm) -> None:
    def refuse(name: to.OpName, op_id: int, args: object) -> None:
        raise ValueError("no")

    with pytest.raises(to.InvalidValueError):
        comm.broadcast(torch.ones(1), 9, False)
    handle = comm.register_pre_hook(refuse)
    with pytest.raises(ValueError, match="no"):
        comm.barrier(False)
    handle.remove()
    comm.barrier(False)
    assert [(e["op"], e["collective_seq_id"]) for e in entries()] == [("barrier", 1)]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def run_states(comm: to.TorchComm) -> list[tuple[str, str]]:
    dumped = Path(os.environ["TORCHCOMM_FR_DUMP_TEMP_FILE"] + "0")
    if comm.get_rank() == 1:
        comm.send(torch.ones(1), 0, False)
        wait_for(dumped)  # leaving would be another error
        comm.abort()
        return []
    work = comm.recv(torch.empty(1), 1, True)
    work.wait()
    late = comm.recv(torch.empty(1), 1, True, timeout=timedelta(seconds=2))
    states = [(e["op"], e["state"]) for e in entries() if e["process_group"][0] == comm.get_name()]
    with pytest.raises(to.OperationTimeoutError):
        late.wait()
    last = entries()[-1]
    assert "did not" in last["error"]
    pending = [e for e in entries(include_completed=False) if e["process_group"][0] == comm.get_name()]
    assert pending == []
    states.append((last["op"], last["state"]))
    wait_for(dumped)  # the timeout made it, in the background
    comm.abort()
    return states


def test_states_follow_the_operation(tmp_path: Path) -> None:
    env = {"TORCHCOMM_FR_DUMP_TEMP_FILE": str(tmp_path / "trace_")}
    states = run_ranks(run_states, 2, env=env)[0]
    assert states[0] == ("recv", "completed")
    assert states[1] in [("recv", "scheduled"), ("recv", "started")]
    assert states[2] == ("recv", "failed")
    trace = pickle.loads((tmp_path / "trace_0").read_bytes())
    assert "recv" in trace["reason"]
    assert trace["entries"][-2]["profiling_name"] == "nccl:recv 0<-1"


def test_files_appear_whole_and_by_the_users_mask(comm: to.TorchComm, tmp_path: Path) -> None:
    comm.all_reduce(torch.ones(3), to.ReduceOp.SUM, False)
    before = os.umask(0o027)
    try:
        files = flight_recorder.dump(tmp_path / "one")
        assert flight_recorder.dump(tmp_path / "one.json") == [str(tmp_path / "one.json")]
    finally:
        os.umask(before)
    # If other ranks are threads of this process and still alive, all files have their rank's number.
    mine = next(path for path in (tmp_path / "one", tmp_path / f"one{comm.get_rank()}") if str(path) in files)
    assert stat.S_IMODE(mine.stat().st_mode) == 0o640
    assert json.loads((tmp_path / "one.json").read_text())["entries"][0]["op"] == "all_reduce"
    trace = pickle.loads(mine.read_bytes())
    assert trace["entries"][0]["profiling_name"] == "nccl:all_reduce"
    assert {path.name.rstrip("0123456789") for path in tmp_path.iterdir()} == {"one", "one.json"}


def test_the_default_name_is_of_the_environment_now(
    comm: to.TorchComm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHCOMM_FR_DUMP_TEMP_FILE", str(tmp_path / "t_"))
    monkeypatch.delenv("RANK", raising=False)
    assert str(tmp_path / "t_1") in flight_recorder.dump()
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert str(tmp_path / "t_5") in flight_recorder.dump()


def test_a_file_that_cannot_be_written_is_an_error_of_the_caller(comm: to.TorchComm, tmp_path: Path) -> None:
    with pytest.raises(to.Error, match=r"expected to write .*No such file"):
        flight_recorder.dump(tmp_path / "nowhere" / "x")
    _, hard = limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))  # like a disk that becomes full on the way
    try:
        with pytest.raises(to.Error, match=r"expected to write .*File too large"):
            flight_recorder.dump(tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(to.InvalidValueError, match="not empty"):
        flight_recorder.dump("")


def test_recording_from_many_threads_loses_nothing(comm: to.TorchComm) -> None:
    def work() -> None:
        for _ in range(200):
            comm.all_reduce(torch.ones(1), to.ReduceOp.SUM, False)
            flight_recorder.dump_json(include_completed=False)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = entries()
    assert sorted(e["collective_seq_id"] for e in found) == list(range(1, 801))
    assert {e["state"] for e in found} == {"completed"}


def test_a_signal_dumps_and_goes_on_to_the_handler_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHCOMM_FR_DUMP_TEMP_FILE", str(tmp_path / "t_"))
    monkeypatch.delenv("RANK", raising=False)
    comm = to.new_comm("fake", torch.device("cpu"), name="signalled", rank=1, size=4)
    came = threading.Event()
    before = signal.signal(signal.SIGUSR2, lambda *_: came.set())
    try:
        flight_recorder.dump_on_signal(signal.SIGUSR2)
        flight_recorder.dump_on_signal(signal.SIGUSR2)
        comm.barrier(False)
        signal.raise_signal(signal.SIGUSR2)
        assert came.wait(60)
        wait_for(tmp_path / "t_1")
        trace = pickle.loads((tmp_path / "t_1").read_bytes())
        assert trace["reason"] == f"signal {int(signal.SIGUSR2)}"
        assert trace["entries"][-1]["op"] == "barrier"
    finally:
        signal.signal(signal.SIGUSR2, before)
        comm.finalize()


@pytest.mark.parametrize("signum", [0, -1, 9999, signal.SIGKILL])
def test_signals_that_cannot_be_caught_are_refused(signum: int) -> None:
    with pytest.raises(to.InvalidValueError, match="dump_on_signal: expected"):
        flight_recorder.dump_on_signal(signum)


def test_a_hook_may_have_records_of_its_own(
    comm: to.TorchComm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHCOMM_FR_DUMP_TEMP_FILE", str(tmp_path / "t_"))
    hook = FlightRecorderHook(max_entries=3, isolated=True)
    comm.barrier(False)
    handle = hook.register_with_comm(comm)
    assert (hook.is_enabled(), hook.size()) == (True, 0)
    for root in range(4):
        comm.broadcast(torch.ones(1), root, False)
    assert hook.size() == 3
    assert [e["root"] for e in json.loads(hook.dump_json())["entries"]] == [1, 2, 3]
    assert json.loads(hook.dump_json(include_completed=False))["entries"] == []
    assert hook.dump_file(1) == str(tmp_path / "t_1")
    assert len(pickle.loads((tmp_path / "t_1").read_bytes())["entries"]) == 3
    flight_recorder.reset()
    assert hook.size() == 3
    hook.reset()
    assert hook.size() == 0
    assert handle is not None
    handle.remove()
    comm.barrier(False)
    assert hook.size() == 0
    with pytest.raises(to.InvalidValueError, match="max_entries >= 1"):
        FlightRecorderHook(max_entries=0)


def test_a_hook_that_is_not_isolated_shows_the_process(comm: to.TorchComm) -> None:
    hook = FlightRecorderHook()
    assert hook.register_with_comm(comm) is None
    comm.barrier(False)
    assert hook.size() == 1
    assert json.loads(hook.dump_json())["entries"] == entries()
