"""Timeouts of operations in replayed graphs: the hint graph_timeouts."""

import time
from datetime import timedelta

import pytest
import torch
from graph_cases import AllGatherSingle, AllReduce, ReduceScatterSingle, capture

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)
TIMEOUT = 2.0


@pytest.fixture
def watched(make_comm):
    count = 0

    def make(name, **hints):
        nonlocal count
        count += 1
        return make_comm(name, timeout=timedelta(seconds=TIMEOUT), hints={"graph_timeouts": "true", **hints})

    return make


def wait_until_aborted(comm):
    begin = time.monotonic()
    while not comm.is_aborted() and time.monotonic() - begin < TIMEOUT + 5:
        time.sleep(0.01)
    return time.monotonic() - begin


@pytest.mark.parametrize("mode", ["sync", "wait", "leaf"])
def test_watched_graphs_replay_as_others_do(watched, mode):
    comm = watched(f"watched_{mode}")
    cases = [kind(comm) for kind in (AllReduce, AllGatherSingle, ReduceScatterSingle)]
    graphs = [capture(case, mode) for case in cases]
    for step in range(200):
        for case, graph in zip(cases, graphs, strict=True):
            case.fill(step)
            if comm.get_rank() == step % comm.get_size() and step % 50 == 0:
                torch.cuda._sleep(50_000_000)
            graph.replay()
            case.check(step)
    torch.cuda.synchronize()
    del graphs, graph
    comm.finalize()


@pytest.mark.parametrize("queued", [1, 5])
def test_a_rank_that_does_not_replay_is_reported(comm, watched, queued):
    """The timeout also ends replays that were enqueued after it, and the device is free again."""
    lonely = watched(f"not_replayed_{queued}")
    first, second = AllReduce(lonely), AllGatherSingle(lonely)
    capture(first, "leaf").replay()  # another graph, already destroyed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.issue(False)
        second.issue(True)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    comm.barrier(async_op=False)
    torch.cuda.synchronize()
    if comm.get_rank() == 0:
        for _ in range(queued):
            graph.replay()
        took = wait_until_aborted(lonely)
        assert TIMEOUT * 0.9 < took < TIMEOUT + 1
        message = r"all_reduce #\d+ on 'not_replayed.*operation 1 of 2 in graph 2 .*replay 4: expected it to end"
        with pytest.raises(to.OperationTimeoutError, match=message):
            first.issue(True)
        begin = time.monotonic()
        torch.cuda.synchronize()  # the kernels have ended
        graph.replay()  # the kernels of a later replay end at once
        torch.cuda.synchronize()
        assert time.monotonic() - begin < 2
    else:
        time.sleep(TIMEOUT + 2)
        lonely.abort()
    graph.reset()
    comm.barrier(async_op=True).wait_blocking()


def test_abort_ends_replays_that_are_queued(comm, make_comm):
    """Without the hint no watchdog covers the replays, but an abort from the host ends all of them."""
    hung = make_comm("hung_in_replays")
    case = AllReduce(hung)
    graph = capture(case, "wait")
    graph.replay()
    torch.cuda.synchronize()
    comm.barrier(async_op=False)
    torch.cuda.synchronize()
    if comm.get_rank() == 0:
        for _ in range(4):
            graph.replay()
        time.sleep(0.3)
        begin = time.monotonic()
        hung.abort()
        torch.cuda.synchronize()
        assert time.monotonic() - begin < 3
    else:
        hung.abort()
    graph.reset()
    comm.barrier(async_op=True).wait_blocking()


def test_an_operation_of_its_own_timeout(comm, make_comm):
    patient = make_comm("one_short_operation", hints={"graph_timeouts": "true"})
    case = AllReduce(patient)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        patient.all_reduce(case.x, to.ReduceOp.SUM, async_op=True, timeout=timedelta(seconds=1))
    graph.replay()
    torch.cuda.synchronize()
    comm.barrier(async_op=False)
    torch.cuda.synchronize()
    if comm.get_rank() == 0:
        graph.replay()
        assert wait_until_aborted(patient) < 2
        with pytest.raises(to.OperationTimeoutError, match="within 1000 ms"):
            case.issue(True)
        torch.cuda.synchronize()
    else:
        time.sleep(2.5)
        patient.abort()
    graph.reset()
    comm.barrier(async_op=True).wait_blocking()
