"""torchcomms' hooks: the text of clog, the names in dumps, communicators that a split makes, control-plane queries."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_overlap as to
import torch_overlap.hooks
from torch_overlap.compat import torchcomms

SUM = to.ReduceOp.SUM


@pytest.fixture
def comm() -> Iterator[to.TorchComm]:
    with to.new_comm("fake", torch.device("cpu"), "parent", rank=1, size=2) as comm:
        yield comm


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


# --- clog ----------------------------------------------------------------------------------------------------------


def test_the_text_log_has_a_signature_for_each_kind_of_call(comm: to.TorchComm, tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = torchcomms.hooks.clog(path, ["ALL"])
    assert re.fullmatch(r"V\|1\|base_timestamp=\d+\.\d{3}", lines_of(path)[0])
    log.register_with_comm(comm)
    assert lines_of(path)[1:] == ["new_comm|comm=parent|rank=1|world_size=2"]

    x, pair = torch.ones(6), [torch.ones(3), torch.ones(3)]
    calls = [
        (lambda: comm.all_reduce(x, SUM, False), "all_reduce|in_count=6|out_count=6|dtype=f32|red_op=sum|async_op=f"),
        (lambda: comm.broadcast(x, 0, True), "broadcast|in_count=6|out_count=6|dtype=f32|root=0|async_op=t"),
        (
            lambda: comm.reduce(x.half(), 1, to.ReduceOp.MAX, False),
            "reduce|in_count=6|out_count=6|dtype=f16|red_op=max|root=1|async_op=f",
        ),
        (lambda: comm.send(x, 0, False), "send|in_count=6|out_count=0|dtype=f32|peer=0|async_op=f"),
        (lambda: comm.recv(x, 0, False), "recv|in_count=0|out_count=6|dtype=f32|peer=0|async_op=f"),
        (
            lambda: comm.all_gather(pair, torch.ones(3), False),
            "all_gather|in_count=3|out_counts=3,3|dtype=f32|async_op=f",
        ),
        (
            lambda: comm.reduce_scatter(torch.ones(3), pair, SUM, False),
            "reduce_scatter|in_counts=3,3|out_count=3|dtype=f32|red_op=sum|async_op=f",
        ),
        (
            lambda: comm.all_gather_single(torch.ones(4), torch.ones(2), False),
            "all_gather_single|in_count=2|out_count=4|dtype=f32|async_op=f",
        ),
        (
            lambda: comm.all_to_all_v_single(torch.ones(3, 5), torch.ones(3, 5), [1, 2], [1, 2], False),
            "all_to_all_v_single|in_splits=1,2|out_splits=1,2|dtype=f32|async_op=f",
        ),
        (
            lambda: comm.scatter(torch.ones(3), pair, 1, False),
            "scatter|in_counts=3,3|out_count=3|dtype=f32|root=1|async_op=f",
        ),
        (lambda: comm.barrier(False), "barrier|async_op=f"),
    ]
    for number, (call, signature) in enumerate(calls, start=1):
        before = len(lines_of(path))
        call()
        log.flush()
        sig, queued, ended = lines_of(path)[before:]  # fake notices no start
        assert sig == f"C{number}|sig|{signature}|comm=parent"
        assert re.fullmatch(rf"C{number}\|Q\|work_id={number}\|\+\d+\.\d{{3}}", queued)
        assert re.fullmatch(rf"C{number}\|E\|\+\d+\.\d{{3}}", ended)

    # Equal calls share the signature; the line of a call is in the file when it returns.
    before = len(lines_of(path))
    comm.all_reduce(torch.zeros(6), SUM, False)
    assert lines_of(path)[before].startswith(f"C1|Q|work_id={len(calls) + 1}|")
    batch = comm.batch_op_create()
    batch.send(x, 0)
    batch.recv(x.clone(), 0)
    batch.issue(False)
    assert any(line.endswith("|sig|batch_op_issue|num_ops=2|async_op=f|comm=parent") for line in lines_of(path))


def test_the_text_log_has_buffers_and_follows_splits(comm: to.TorchComm, tmp_path: Path) -> None:
    path = tmp_path / "log"
    handle = torchcomms.hooks.clog(path, ["Q"], ["buffers"]).register_with_comm(comm)
    x = torch.ones(2)
    comm.all_reduce(x, SUM, False)
    assert f"|async_op=f|buf={x.data_ptr():#x}|comm=parent" in lines_of(path)[2]
    child = comm.split([1, 0], "child")
    assert child is not None
    assert lines_of(path)[-1] == "split|parent=parent|child=child|ranks=1,0"
    child.barrier(False)
    assert any(line.endswith("|comm=child") for line in lines_of(path))
    grandchild = child.split([0, 1], "grandchild")
    assert grandchild is not None
    assert lines_of(path)[-1] == "split|parent=child|child=grandchild|ranks=1,0"
    count = len(lines_of(path))
    handle.remove()
    for one in (grandchild, child, comm):
        one.barrier(False)
    assert len(lines_of(path)) == count
    grandchild.finalize()
    child.finalize()


def test_bad_arguments_of_clog_are_named(tmp_path: Path) -> None:
    with pytest.raises(to.InvalidValueError, match=r"clog: expected events among .*, got 'X'"):
        torchcomms.hooks.clog(tmp_path / "log", ["X"])
    with pytest.raises(to.InvalidValueError, match="clog: expected format 'json' or 'text', got 'xml'"):
        to.hooks.clog(tmp_path / "log", format="xml")


def test_the_json_log_follows_splits(comm: to.TorchComm, tmp_path: Path) -> None:
    log = to.hooks.clog(tmp_path / "log", ["Q"])
    log.register_with_comm(comm)
    child = comm.split([1], "child")
    assert child is not None
    child.barrier(False)
    log.flush()
    found = [(entry["comm"], entry["op"]) for entry in map(json.loads, lines_of(tmp_path / "log"))]
    assert found == [("parent", "split"), ("child", "barrier")]
    child.finalize()


# --- The flight recorder -------------------------------------------------------------------------------------------


def test_a_recorder_follows_splits_and_records_them(comm: to.TorchComm) -> None:
    recorder = to.hooks.FlightRecorderHook(max_entries=50, isolated=True)
    handle = recorder.register_with_comm(comm)
    comm.barrier(False)
    assert comm.split([], "other") is None
    child = comm.split([1, 0], "child")
    assert child is not None
    child.all_reduce(torch.ones(3), SUM, False)
    child.barrier(False)
    dump = json.loads(recorder.dump_json())
    found = [(entry["process_group"][0], entry["op"], entry["state"]) for entry in dump["entries"]]
    assert found == [
        ("parent", "barrier", "completed"),
        ("parent", "split", "completed"),
        ("parent", "split", "completed"),
        ("child", "all_reduce", "completed"),
        ("child", "barrier", "completed"),
    ]
    assert dump["pg_status"] == {
        str(number): {"last_enqueued_collective": n, "last_started_collective": n, "last_completed_collective": n}
        for number, n in enumerate((1, 2))
    }
    assert handle is not None
    handle.remove()
    child.barrier(False)
    comm.barrier(False)
    assert recorder.size() == len(found)
    child.finalize()


def test_a_failed_split_is_in_the_dump(comm: to.TorchComm) -> None:
    recorder = to.hooks.FlightRecorderHook(isolated=True)
    recorder.register_with_comm(comm)
    with pytest.raises(to.InvalidValueError):
        comm.split([0], "without me")
    (entry,) = json.loads(recorder.dump_json())["entries"]
    assert (entry["op"], entry["state"]) == ("split", "failed")
    assert "expected a list with the calling rank 1" in entry["error"]


def test_the_post_hook_of_a_split_has_the_communicator(comm: to.TorchComm) -> None:
    seen: list[Any] = []
    comm.register_post_hook(lambda op_id, args: seen.append(args))
    child = comm.split([1], "child")
    assert comm.split([]) is None
    assert [type(args).__name__ for args in seen] == ["SplitPostHookArgs"] * 2
    assert [args.new_comm for args in seen] == [child, None]
    assert child is not None
    child.finalize()


def test_finalize_takes_no_number_of_an_operation() -> None:
    recorder = to.hooks.FlightRecorderHook(isolated=True)
    for _ in range(2):
        with to.new_comm("fake", "cpu", "numbered", rank=0, size=2) as comm:
            recorder.register_with_comm(comm)
            comm.barrier(False)
    numbers = [entry["op_id"] for entry in json.loads(recorder.dump_json())["entries"]]
    assert numbers[1] - numbers[0] == 1


def test_dumps_by_torchcomms_names(comm: to.TorchComm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = torchcomms.hooks.FlightRecorderHook(max_entries=10, isolated=True)
    assert not recorder.is_enabled()
    recorder.register_with_comm(comm)
    assert recorder.is_enabled()
    empty = json.loads(recorder.dump_json())
    assert (empty["version"], empty["entries"], empty["pg_status"]) == ("2.10", [], {})
    assert empty["pg_config"] == {"parent": {"name": "parent", "desc": "fake", "ranks": "[0,1]"}}
    comm.all_reduce(torch.ones(3, 4), SUM, False)
    assert len(recorder) == recorder.size() == 1
    (entry,) = json.loads(recorder.dump_json())["entries"]
    assert (entry["profiling_name"], entry["input_sizes"], entry["retired"]) == ("fake:all_reduce", [[3, 4]], True)
    assert json.loads(recorder.dump_json(include_completed=False))["entries"] == []

    monkeypatch.setenv("TORCHCOMM_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))
    assert recorder.dump_file(7) == str(tmp_path / "trace_7")
    monkeypatch.setenv("TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME", "1")
    assert recorder.dump_file(7, include_completed=False) == str(tmp_path / "trace_")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace_", "trace_7"]
    with open(tmp_path / "trace_7", "rb") as file:
        assert [e["profiling_name"] for e in pickle.load(file)["entries"]] == ["fake:all_reduce"]
    with open(tmp_path / "trace_", "rb") as file:
        assert pickle.load(file)["entries"] == []


# --- The control plane ---------------------------------------------------------------------------------------------


def test_the_control_plane_answers_by_torchcomms_names(comm: to.TorchComm, monkeypatch: pytest.MonkeyPatch) -> None:
    import http.client
    import socket
    import tempfile

    from torch._C._distributed_c10d import _WorkerServer

    folder = tempfile.TemporaryDirectory()  # short: the path of a socket has at most 107 characters
    path = folder.name + "/socket"
    server = _WorkerServer(path)

    def ask(handler: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(path)
        connection.request("POST", f"/handler/{handler}")
        response = connection.getresponse()
        return response.status, response.read().decode()

    try:
        comm.barrier(False)
        assert ask("torchcomms_health_check") in [(200, '{"healthy": true}'), (200, '{"healthy": false}')]
        status, text = ask("torchcomms_fr_trace_json")
        assert (status, json.loads(text)["entries"][-1]["op"]) == (200, "barrier")
        status, text = ask("torchcomms_fr_trace_json?onlyactive=true&includecollectives=true")
        assert status == 200
        assert all(entry["state"] != "completed" for entry in json.loads(text)["entries"])
        assert json.loads(ask("torchcomms_fr_trace_json?includecollectives=false")[1])["entries"] == []
        for bad in ("onlyactive=yes", "other=true"):
            status, text = ask(f"torchcomms_fr_trace_json?{bad}")
            assert status == 400
            assert text.endswith(f"got {bad}")
        assert ask("torchcomms_fr_dump_file") == (200, "Flight recorder dump requested")
    finally:
        server.shutdown()
        folder.cleanup()
