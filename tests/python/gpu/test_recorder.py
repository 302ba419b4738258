"""The flight recorder and the hooks of the package, over NCCL."""

import json
import os
import pickle
import time
from datetime import timedelta

import pytest
import torch

import torch_overlap as to
from torch_overlap.hooks import NanCheckHook, clog

pytestmark = pytest.mark.gpu(1)

SUM = to.ReduceOp.SUM


def entries(comm):
    found = json.loads(to.flight_recorder.dump_json())["entries"]
    return [entry for entry in found if entry["process_group"][0] == comm.get_name()]


def wait_until(condition, seconds=20):
    """Waits, because the watchdog polls."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@pytest.mark.parametrize("async_op", [True, False])
def test_states_follow_the_device(make_comm, async_op):
    comm = make_comm(f"states_{async_op}")
    x = torch.ones(1000, device="cuda")
    comm.all_reduce(x, SUM, async_op)  # connects
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # a second
    comm.all_reduce(x, SUM, async_op)
    assert entries(comm)[-1]["state"] == "scheduled"  # its stream has not reached it yet
    torch.cuda.synchronize()
    wait_until(lambda: entries(comm)[-1]["state"] == "completed")
    last = entries(comm)[-1]
    assert last["time_created_ns"] < last["time_discovered_completed_ns"]
    assert (last["input_sizes"], last["input_dtypes"], last["async_op"]) == ([[1000]], ["Float"], async_op)
    assert last["collective_seq_id"] == 2
    comm.finalize()


def test_calls_in_a_graph_are_recorded_at_capture_only(make_comm):
    comm = make_comm("captured")
    x = torch.ones(8, device="cuda")
    comm.all_reduce(x, SUM, False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_reduce(x, SUM, False)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    wait_until(lambda: entries(comm)[0]["state"] == "completed")
    assert [(e["state"], e.get("captured", False)) for e in entries(comm)] == [
        ("completed", False),
        ("scheduled", True),
    ]
    (health,) = [c for c in to.health()["communicators"] if c["name"] == "captured"]
    assert (health["state"], health["pending"]) == ("active", 0)
    del graph
    comm.finalize()


@pytest.mark.gpu(2)
def test_a_timeout_makes_a_dump_that_names_it(comm, make_comm, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHCOMM_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    late = make_comm("late", timeout=timedelta(seconds=2))
    x = torch.ones(1 << 16, device="cuda")
    late.all_reduce(x, SUM, False)
    torch.cuda.synchronize()
    if comm.get_rank() == 0:
        work = late.all_reduce(x, SUM, True)
        with pytest.raises(to.OperationTimeoutError):
            work.wait_blocking()
        path = tmp_path / f"rank_{os.environ['RANK']}"
        wait_until(path.exists)
        trace = pickle.loads(path.read_bytes())
        assert "all_reduce" in trace["reason"]
        assert trace["pg_config"]["late"]["failure"] == trace["reason"]
        last = [e for e in trace["entries"] if e["process_group"][0] == "late"][-1]
        assert (last["collective_seq_id"], last["state"]) == (2, "started")
        assert [c["state"] for c in to.health()["communicators"] if c["name"] == "late"] == ["failed"]
    else:
        time.sleep(5)
    late.abort()
    comm.barrier(async_op=True).wait_blocking()


def test_a_nan_on_the_device_is_named(comm, make_comm):
    checked = make_comm("checked")
    hook = NanCheckHook(check_inputs=True, check_outputs=True)
    handles = hook.register_with_comm(checked)
    x = torch.ones(100, device="cuda", dtype=torch.bfloat16)
    checked.all_reduce(x, SUM, True).wait()
    hook.check(wait=True)
    bad = x.clone()
    bad[7] = float("nan")
    with pytest.raises(to.Error, match=r"all_reduce #\d+ on 'checked': expected tensor without NaN, got 1 among 100"):
        checked.all_reduce(bad, SUM, False)
    graph = torch.cuda.CUDAGraph()
    refused = []
    with torch.cuda.graph(graph):
        try:
            checked.all_reduce(x, SUM, False)
        except to.UnsupportedError as error:
            refused.append(str(error))
        x.add_(1)  # the capture continues
    assert len(refused) == 1
    assert "remove the hook before the capture" in refused[0]
    for handle in handles:
        handle.remove()
    checked.all_reduce(bad, SUM, True).wait()
    torch.cuda.synchronize()
    checked.finalize()


def test_the_log_follows_the_device(make_comm, tmp_path):
    comm = make_comm("logged")
    x = torch.ones(8, device="cuda")
    log = clog(tmp_path / "log", ["Q", "E"])
    log.register_with_comm(comm)
    for _ in range(3):
        comm.all_reduce(x, SUM, True)
    torch.cuda.synchronize()

    def lines():
        log.flush()
        return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]

    wait_until(lambda: len(lines()) == 6)
    ids = {line["id"] for line in lines() if line["event"] == "E"}  # in the order in which their ends were noticed
    assert ids == {line["id"] for line in lines() if line["event"] == "Q"}
    assert {line["state"] for line in lines() if line["event"] == "E"} == {"completed"}
    comm.finalize()
