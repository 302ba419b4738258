"""CUDA graphs: every operation captured and replayed with changing inputs."""

import gc
import time

import pytest
import torch
from graph_cases import CASES, AllGatherSingle, AllReduce, AllToAllSingle, ReduceScatterSingle, capture, each

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)


def replay(graph, case, step, late=False):
    case.fill(step)
    if late and case.rank == step % case.size:
        torch.cuda._sleep(50_000_000)
    graph.replay()
    case.check(step)


@pytest.mark.parametrize("mode", ["sync", "wait", "leaf"])
@each(CASES)
def test_replays_with_changing_inputs_and_a_late_rank(on, kind, mode):
    case = kind(on)
    graph = capture(case, mode)
    for step in range(6):
        replay(graph, case, step, late=True)


def test_the_first_operation_of_a_communicator_may_be_captured(make_comm):
    fresh = make_comm("captured_first")
    case = AllReduce(fresh)
    graph = capture(case, "leaf")
    for step in range(3):
        replay(graph, case, step)
    del graph
    fresh.finalize()


def test_several_graphs_and_eager_calls_take_turns(comm):
    cases = [kind(comm) for kind in (AllReduce, AllGatherSingle, AllToAllSingle, ReduceScatterSingle)]
    graphs = [capture(case, mode) for case, mode in zip(cases, ["leaf", "wait", "sync", "leaf"], strict=True)]
    eager = AllReduce(comm)
    for step in range(8):
        for case, graph in zip(cases, graphs, strict=True):
            replay(graph, case, step, late=True)
            eager.fill(step)
            eager.issue(async_op=step % 2 == 0).wait()
            eager.check(step)


def test_many_operations_of_one_capture_run_in_order(comm):
    x = torch.zeros(1 << 16, device="cuda")
    size = comm.get_size()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.fill_(1)
        for step in range(8):  # all unjoined, on two streams and the current one
            hints = {"is_high_priority_stream": str(step % 2 == 0).lower()}
            comm.all_reduce(x, to.ReduceOp.SUM, async_op=step % 4 != 3, hints=hints)
    for _ in range(5):
        graph.replay()
        assert (x == float(size) ** 8).all()


def test_waits_inside_a_capture_order_what_reads_the_result(comm):
    x = torch.zeros(1 << 20, device="cuda")
    y = torch.zeros_like(x)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work = comm.all_reduce(x, to.ReduceOp.SUM, async_op=True)
        z = y * 2  # concurrently
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work.wait()
            doubled = x * 2
        torch.cuda.current_stream().wait_stream(side)
        result = doubled + z
    for step in range(5):
        x.fill_(step + comm.get_rank())
        y.fill_(step)
        graph.replay()
        assert (result == 2 * sum(step + r for r in range(comm.get_size())) + 2 * step).all()


def test_memory_of_an_unjoined_operation_is_not_lent_to_the_rest_of_the_graph(comm):
    count, size = 1 << 22, comm.get_size()
    value = torch.zeros((), device="cuda")
    out = torch.zeros(count * size, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = torch.zeros(count, device="cuda") + value
        comm.all_gather_single(out, x, async_op=True)
        del x
        for _ in range(4):
            torch.full((count,), -1.0, device="cuda")
    for step in range(5):
        value.fill_(10 * step + comm.get_rank())
        graph.replay()
        for r, part in enumerate(out.chunk(size)):
            assert (part == 10 * step + r).all()


def test_captures_on_several_streams(comm):
    case = AllReduce(comm)
    graph = torch.cuda.CUDAGraph()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    other = AllGatherSingle(comm)
    with torch.cuda.graph(graph):
        current = torch.cuda.current_stream()
        for stream, one in ((first, case), (second, other)):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                one.issue(async_op=one is other)
        current.wait_stream(first)
        current.wait_stream(second)
    for step in range(5):
        other.fill(step)
        replay(graph, case, step)
        other.check(step)


def test_the_watchdog_does_not_break_a_long_capture(comm):
    case = AllReduce(comm)
    warm = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda._sleep(1_000_000_000)
    pending = comm.all_reduce(warm, to.ReduceOp.SUM, async_op=True)  # a pending work to query
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()  # the strictest mode: any unsafe query of any thread breaks it
        deadline = time.monotonic() + 20
        while not pending.is_completed() and time.monotonic() < deadline:  # a query is allowed during a capture
            time.sleep(0.05)
        status = pending.status()
        case.issue(async_op=True)
        time.sleep(0.3)  # several polls of the watchdog
        graph.capture_end()
    assert status == to.WorkStatus.COMPLETED
    pending.wait()
    assert (warm == comm.get_size()).all()
    for step in range(3):
        replay(graph, case, step, late=True)


def test_waiting_for_eager_work_inside_a_capture_is_an_error_that_leaves_the_capture_whole(comm):
    x = torch.ones(1 << 20, device="cuda")
    y = torch.zeros(8, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)
        eager = comm.all_reduce(x, to.ReduceOp.SUM, async_op=True)
    graph = torch.cuda.CUDAGraph()
    capturing = torch.cuda.Stream()
    with torch.cuda.stream(capturing):
        graph.capture_begin(capture_error_mode="thread_local")
        y.add_(1)
        with pytest.raises(to.StateError, match="before the capture"):
            eager.wait()
        graph.capture_end()
    eager.wait()
    graph.replay()
    torch.cuda.synchronize()
    assert (x == comm.get_size()).all()
    assert (y == 1).all()


def test_finalize_before_the_last_replay(make_comm):
    ending = make_comm("ends_before_its_graph")
    case = AllReduce(ending)
    graph = capture(case, "leaf")
    replay(graph, case, 0)
    torch.cuda.synchronize()
    ending.finalize()
    with pytest.raises(to.StateError):
        case.issue(async_op=True)
    for step in range(1, 5):
        replay(graph, case, step, late=True)
    torch.cuda.synchronize()
    del case, ending
    gc.collect()
    graph.reset()
    time.sleep(1)  # the native communicator is destroyed now, on a thread of its own


def test_the_graph_dies_before_finalize(make_comm):
    ending = make_comm("outlives_its_graph")
    case = AllReduce(ending)
    graph = capture(case, "wait")
    replay(graph, case, 0)
    torch.cuda.synchronize()
    graph.reset()
    del graph
    case.fill(3)
    case.issue(async_op=True).wait()
    case.check(3)
    ending.finalize()


def test_tensors_of_a_graph_go_with_it(comm):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    x = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.broadcast(x, 0, async_op=True)
    del x
    assert torch.cuda.memory_allocated() >= before + (64 << 20)
    graph.replay()
    torch.cuda.synchronize()
    graph.reset()
    deadline = time.monotonic() + 10
    # The random generator of torch keeps two words for captures.
    allowed = before + (1 << 20)
    while torch.cuda.memory_allocated() > allowed and time.monotonic() < deadline:
        time.sleep(0.1)
    assert torch.cuda.memory_allocated() <= allowed
