"""Windows over NVLink in CUDA graphs: changing inputs, late ranks, eager calls in between, soaks, operators."""

import gc
import random
import time

import pytest
import torch
from window_cases import COUNT, Ring, data

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("count", [COUNT, 2 << 20])
def test_replays_and_eager_calls_mix(comm, ring, async_op, count):
    case = Ring(comm, ring, count)
    one, two = case.capture(async_op), case.capture(async_op)
    turns = [one.replay, two.replay, case.step, one.replay]
    for step in range(1000 if count == COUNT else 100):
        case.fill(step)
        turns[step % len(turns)]()
        case.check(step)
    torch.cuda.synchronize()
    del one, two, turns
    gc.collect()
    case.close()


def test_captured_waits_take_the_signals_in_order(comm, ring):
    """Two pieces, two signals, two waits that are joined late: each reader has its own piece."""
    rank, right, left = ring
    inbox = to.symmetric_empty(2 * COUNT, torch.float32, comm)
    window = comm.new_window(inbox)
    pieces, seen = torch.zeros(2, COUNT, device="cuda"), torch.zeros(2, COUNT, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        waits = [window.wait_signal(left, async_op=True) for _ in range(2)]
        for i in range(2):
            window.put(pieces[i], right, i * COUNT, async_op=True)
            window.signal(right, async_op=True)
        for i in range(2):
            waits[i].wait()
            seen[i].copy_(inbox[i * COUNT : (i + 1) * COUNT])
    for step in range(200):
        for i in range(2):
            pieces[i].copy_(data(COUNT, torch.float32, 16 * step + 8 * i + rank))
        if rank == step % comm.get_size():
            torch.cuda._sleep(200_000)
        graph.replay()
        for i in range(2):
            assert torch.equal(seen[i], data(COUNT, torch.float32, 16 * step + 8 * i + left)), (step, i)
        comm.barrier(async_op=False)
    torch.cuda.synchronize()
    del graph
    window.tensor_deregister()


SOAKED = [(COUNT, torch.float32), (2 << 20, torch.float32), (1, torch.uint8), (COUNT, torch.bfloat16),
          (5 * COUNT, torch.float8_e4m3fn), (COUNT, torch.int64)]  # fmt: skip
SOAKS = pytest.mark.parametrize(("count", "dtype"), SOAKED, ids=str)


@pytest.mark.slow
@SOAKS
def test_ten_thousand_replays(comm, ring, count, dtype):
    case = Ring(comm, ring, count, dtype)
    graph = case.capture_counted()
    for i in range(10_000):
        graph.replay()
        if i % 1000 == 999:
            assert case.wrong.item() == 0, i
    del graph
    case.close()


def test_windows_on_streams_that_nothing_orders(comm, ring, seed):
    """Replays on one stream, of each window on its own, and with a late device; each continues eagerly after them."""
    draw = random.Random(seed)  # the same on all ranks
    cases = [Ring(comm, ring, count, dtype) for count, dtype in SOAKED]
    graphs = [case.capture_counted() for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(100):
        late = draw.randrange(5 * comm.get_size())
        for i in draw.sample(range(len(cases)), len(cases)):
            with torch.cuda.stream(streams[i]):
                if i == 0 and comm.get_rank() == late:
                    torch.cuda._sleep(4_000_000)
                graphs[i].replay()
    torch.cuda.synchronize()
    for case in cases:
        assert case.wrong.item() == 0, case.x.dtype
        case.fill(7)
        case.step()
        case.check(7)
    del graphs
    for case in cases:
        case.close()


@pytest.mark.slow
@SOAKS
def test_two_hundred_replays_with_a_late_rank(comm, ring, seed, count, dtype):
    case = Ring(comm, ring, count, dtype)
    graph = case.capture_counted()
    draw = random.Random(seed)
    for _ in range(200):
        late, delay = draw.randrange(comm.get_size()), draw.uniform(1e-3, 10e-3)
        if comm.get_rank() == late:
            time.sleep(delay)
        graph.replay()
    assert case.wrong.item() == 0
    del graph
    case.close()


def test_replays_with_a_late_device(comm, ring):
    case = Ring(comm, ring)
    graph = case.capture()
    for step in range(100):
        case.fill(step)
        if step % comm.get_size() == comm.get_rank():
            torch.cuda._sleep(2_000_000 * (1 + step % 10))  # one to ten milliseconds
        graph.replay()
        case.check(step)
    torch.cuda.synchronize()
    del graph
    case.close()


def test_a_graph_outlives_its_window(comm, ring):
    """Memory that was captured stays mapped: replays of a dropped window are safe."""
    case = Ring(comm, ring)
    graph = case.capture()
    x, out = case.x, case.out
    case.fill(1)
    graph.replay()
    case.check(1)
    del case
    gc.collect()
    for value in (7, 8):
        x.fill_(value + comm.get_rank())
        out.fill_(99)
        comm.barrier(async_op=True).wait_blocking()
        graph.replay()
        assert (out == value + ring[2]).all()
    comm.barrier(async_op=True).wait_blocking()


def test_memory_is_not_made_in_a_capture(comm):
    buffer = to.symmetric_empty(8, torch.float32, comm)
    window = comm.new_window()
    other = comm.new_window(to.symmetric_empty(8, torch.float32, comm))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(to.StateError, match="symmetric_empty: expected a stream that is not capturing"):
            to.symmetric_empty(8, torch.float32, comm)
        with pytest.raises(to.StateError, match="tensor_register: expected a stream that is not capturing"):
            window.tensor_register(buffer)
        with pytest.raises(to.StateError, match="tensor_deregister: expected a stream that is not capturing"):
            other.tensor_deregister()
        other.signal(comm.get_rank(), async_op=False)  # the state is unchanged
    comm.barrier(async_op=True).wait_blocking()


def test_operators_in_a_graph(comm, ring, seed):
    rank, right, left = ring
    buffer = to.symmetric_empty(COUNT, torch.float32, comm)
    window = comm.new_window(buffer)
    x = torch.zeros(COUNT, device="cuda")
    out = torch.zeros(COUNT, device="cuda")

    def step():
        to.ops.put(buffer, x, window, right)
        to.ops.signal(buffer, window, right)
        to.ops.wait_signal(buffer, window, left)
        out.copy_(buffer)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(50):
        x.copy_(data(COUNT, torch.float32, seed + 8 * turn + rank))
        out.fill_(99)
        graph.replay() if turn % 3 else step()
        assert torch.equal(out, data(COUNT, torch.float32, seed + 8 * turn + left))
        comm.barrier(async_op=True).wait_blocking()
    del graph
    window.tensor_deregister()
