"""Windows over NVLink: values, order, graphs, timeouts, memory of every origin, and errors."""

import gc
import time
from datetime import timedelta

import pytest
import torch

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)

COUNT = 3001
# Through the kernel in words of every width, and by the copy engine.
SIZES = [1, 7, 1000, 3001, 1 << 16, (1 << 20) + 3, (4 << 20) - 1, 4 << 20, (8 << 20) + 5]


def data(count, dtype, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (count,), device="cuda", generator=generator).to(dtype)


def same(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.fixture
def ring(comm):
    rank, size = comm.get_rank(), comm.get_size()
    return rank, (rank + 1) % size, (rank - 1) % size


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.bool,
                                   torch.float8_e4m3fn])  # fmt: skip
def test_values_of_every_size(comm, ring, seed, dtype, async_op):
    rank, right, left = ring
    buffer = to.symmetric_empty(SIZES[-1] + 16, dtype, comm)
    window = comm.new_window(buffer)
    for i, count in enumerate(SIZES):
        for offset in (0, 3):
            buffer.view(torch.uint8).fill_(0x5A)
            torch.cuda.synchronize()
            comm.barrier(async_op=True).wait_blocking()
            x = data(count, dtype, seed + 10 * i + rank)
            window.put(x, right, offset, async_op)
            window.signal(right, async_op)
            del x
            window.wait_signal(left, async_op).wait()
            want = torch.full_like(buffer.view(torch.uint8), 0x5A).view(dtype)
            want[offset : offset + count] = data(count, dtype, seed + 10 * i + left)
            assert same(buffer, want), (count, offset)
            comm.barrier(async_op=True).wait_blocking()
    window.tensor_deregister()


def test_a_ring_a_hundred_times(comm, ring, seed):
    rank, right, left = ring
    buffer = to.symmetric_empty(COUNT, torch.float32, comm)
    window = comm.new_window(buffer)
    kept = []
    for step in range(100):
        if step > 0:
            window.wait_signal(right, async_op=False)  # was read
        window.put(data(COUNT, torch.float32, seed + 64 * step + rank), right, 0, async_op=step % 2 == 0)
        window.signal(right, async_op=step % 2 == 0)
        window.wait_signal(left, async_op=step % 3 == 0).wait()
        kept.append(buffer.clone())
        window.signal(left, async_op=False)
    for step, got in enumerate(kept):
        assert torch.equal(got, data(COUNT, torch.float32, seed + 64 * step + left)), step
    window.wait_signal(right, async_op=False)
    torch.cuda.synchronize()
    window.tensor_deregister()


def test_everyone_writes_to_everyone(comm, seed):
    rank, size = comm.get_rank(), comm.get_size()
    buffer = to.symmetric_empty((size, COUNT), torch.float32, comm)
    window = comm.new_window(buffer)
    for step in range(10):
        x = data(COUNT, torch.float32, seed + 100 * step + rank)
        for peer in range(size):
            window.put(x, peer, rank * COUNT, async_op=True)
            window.signal(peer, async_op=True)
        for work in [window.wait_signal(peer, async_op=True) for peer in range(size)]:
            work.wait()
        for peer in range(size):
            assert torch.equal(buffer[peer], data(COUNT, torch.float32, seed + 100 * step + peer))
        comm.barrier(async_op=False)
    torch.cuda.synchronize()
    window.tensor_deregister()


class Ring:
    """The captured step: out = what the left neighbour's x was, with a signal back. `x` changes between replays."""

    def __init__(self, comm, ring, count=COUNT):
        self.comm, (self.rank, self.right, self.left) = comm, ring
        self.x = torch.zeros(count, device="cuda")
        self.out = torch.zeros(count, device="cuda")
        self.window = comm.new_window(to.symmetric_empty(count, torch.float32, comm))
        self.window.signal(self.left, async_op=False)  # the buffer is free
        self.base = torch.arange(count, device="cuda") % 977

    def of(self, rank, step):
        return (self.base + 3 * rank + 5 * step).float()

    def step(self, async_op=False):
        self.window.wait_signal(self.right, async_op).wait()
        self.window.put(self.x, self.right, 0, async_op)
        self.window.signal(self.right, async_op)
        self.window.wait_signal(self.left, async_op).wait()
        self.out.copy_(self.window.get_tensor())
        self.window.signal(self.left, async_op)

    def capture(self, async_op=False):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(async_op)
        return graph

    def fill(self, step):
        self.x.copy_(self.of(self.rank, step))
        self.out.fill_(99)

    def check(self, step):
        assert torch.equal(self.out, self.of(self.left, step)), step

    def close(self):
        self.window.wait_signal(self.right, async_op=False)
        torch.cuda.synchronize()
        self.window.tensor_deregister()


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


def test_nothing_is_signalled_after_an_abort(comm, make_comm, ring):
    """What an aborted operation should have made is not announced to a rank whose communicator is well."""
    rank, right, _ = ring
    broken = make_comm("aborted_before_its_signal", timeout=timedelta(seconds=20))
    window = broken.new_window(to.symmetric_empty(8, torch.float32, broken))
    if rank == 0:
        window.wait_signal(right, async_op=False)  # never comes
        window.signal(right, async_op=False)
        time.sleep(0.5)
        broken.abort()
        torch.cuda.synchronize()
    comm.barrier(async_op=True).wait_blocking()
    if rank == 1:
        work = window.wait_signal(0, async_op=True, timeout=timedelta(seconds=1))
        with pytest.raises(to.OperationTimeoutError, match=r"expected signal 1 of rank 0 .* got 0"):
            work.wait_blocking()
    if rank != 0:
        broken.abort()
    comm.barrier(async_op=True).wait_blocking()


def test_replays_with_a_late_rank(comm, ring):
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
    """What it was captured with stays mapped: replays of a dropped window do no harm."""
    case = Ring(comm, ring)
    graph = case.capture()
    x, window = case.x, case.window
    case.fill(1)
    graph.replay()
    case.check(1)
    del window, case
    gc.collect()
    x.fill_(7)
    comm.barrier(async_op=True).wait_blocking()
    graph.replay()
    torch.cuda.synchronize()
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
        other.signal(comm.get_rank(), async_op=False)  # all is as it was
    comm.barrier(async_op=True).wait_blocking()


def test_signals_count_and_do_not_leak(comm):
    rank, size = comm.get_rank(), comm.get_size()
    peer, source = (rank + 1) % size, (rank - 1) % size
    one = comm.new_window(to.symmetric_empty(8, torch.float32, comm))
    two = comm.new_window(to.symmetric_empty(8, torch.float32, comm))
    for _ in range(3):
        one.signal(peer, async_op=False)
    one.put(torch.ones(8, device="cuda"), peer, 0, async_op=False)  # no signal
    for _ in range(3):
        one.wait_signal(source, async_op=True).wait_blocking()
    fourth = one.wait_signal(source, async_op=True)
    torch.cuda.current_stream().synchronize()
    comm.barrier(async_op=True).wait_blocking()
    time.sleep(0.2)
    assert not fourth.is_completed()
    comm.barrier(async_op=True).wait_blocking()
    # A wait holds up neither collectives, nor other windows, nor puts.
    x = torch.ones(8, device="cuda")
    comm.all_reduce(x, to.ReduceOp.SUM, async_op=True).wait_blocking()
    two.signal(peer, async_op=True)
    two.wait_signal(source, async_op=False)
    torch.cuda.current_stream().synchronize()
    assert not fourth.is_completed()
    comm.barrier(async_op=True).wait_blocking()
    one.signal(peer, async_op=False)
    fourth.wait_blocking()
    # Surplus signals end with their window.
    one.signal(peer, async_op=False)
    torch.cuda.synchronize()
    one.tensor_deregister()
    three = comm.new_window(to.symmetric_empty(8, torch.float32, comm))
    wait = three.wait_signal(source, async_op=True)
    comm.barrier(async_op=True).wait_blocking()
    time.sleep(0.2)
    assert not wait.is_completed()
    comm.barrier(async_op=True).wait_blocking()
    three.signal(peer, async_op=False)
    wait.wait_blocking()
    two.tensor_deregister()
    three.tensor_deregister()


@pytest.mark.parametrize("how", ["sync", "async", "graph"])
def test_a_signal_that_does_not_come(comm, make_comm, how):
    lonely = make_comm(f"lonely_wait_{how}", timeout=timedelta(seconds=2))
    window = lonely.new_window(to.symmetric_empty(8, torch.float32, lonely))
    if comm.get_rank() == 0:
        begin = time.monotonic()
        message = r"wait_signal: expected signal 1 of rank 1 in window 'lonely_wait_.*/window_0' within 2000 ms, got 0"
        if how == "graph":
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                window.wait_signal(1, async_op=False)
            graph.replay()
        else:
            work = window.wait_signal(1, async_op=how == "async")
            with pytest.raises(to.OperationTimeoutError, match=message):
                work.wait_blocking()
            assert work.status() == to.WorkStatus.TIMEDOUT
        torch.cuda.synchronize()  # the kernel is gone, and the context lives
        while not lonely.is_aborted() and time.monotonic() - begin < 10:
            time.sleep(0.01)
        assert time.monotonic() - begin < 2 + 1
        with pytest.raises(to.OperationTimeoutError, match=message):
            window.signal(1, async_op=False)
        x = torch.ones(8, device="cuda")
        assert (x + 1 == 2).all()
    else:
        time.sleep(4)
        lonely.abort()
    window.tensor_deregister()  # asks nobody
    comm.barrier(async_op=True).wait_blocking()


def test_an_abort_ends_a_wait(comm, make_comm):
    hung = make_comm("hung_wait")
    window = hung.new_window(to.symmetric_empty(8, torch.float32, hung))
    work = window.wait_signal((comm.get_rank() + 1) % comm.get_size(), async_op=False)
    time.sleep(0.2)
    assert not work.is_completed()
    begin = time.monotonic()
    hung.abort()
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 5
    with pytest.raises(to.StateError):
        work.wait()
    comm.barrier(async_op=True).wait_blocking()


def test_deregistering_waits_for_what_is_under_way(comm, ring):
    rank, right, left = ring
    window = comm.new_window(to.symmetric_empty(8 << 20, torch.float32, comm))
    buffer = window.get_tensor()
    x = torch.full((8 << 20,), float(rank), device="cuda")
    torch.cuda._sleep(400_000_000)
    window.put(x, right, 0, async_op=True)
    window.tensor_deregister()
    assert (buffer == left).all()


def test_memory_of_a_pool_at_any_offset(comm, ring, seed):
    rank, right, left = ring
    assert comm.mem_allocator is comm.get_mem_allocator()
    pool = torch.cuda.MemPool(comm.get_mem_allocator())
    with torch.cuda.use_mem_pool(pool):
        padding = torch.zeros(1000 * (rank + 1), device="cuda")  # so that offsets differ by rank
        tensors = [torch.zeros(COUNT + i, device="cuda") for i in range(3)]
    windows = [comm.new_window(tensor) for tensor in tensors]
    part = comm.new_window(tensors[0][100:200])
    for i, (window, tensor) in enumerate(zip(windows, tensors, strict=True)):
        window.put(data(COUNT + i, torch.float32, seed + 10 * i + rank), right, 0, async_op=False)
        window.signal(right, async_op=False)
        window.wait_signal(left, async_op=False)
        assert torch.equal(tensor, data(COUNT + i, torch.float32, seed + 10 * i + left))
    part.put(torch.full((100,), -1.0, device="cuda"), right, 0, async_op=False)
    part.signal(right, async_op=False)
    part.wait_signal(left, async_op=False)
    want = data(COUNT, torch.float32, seed + left)
    want[100:200] = -1
    assert torch.equal(tensors[0], want)
    assert (padding == 0).all()
    for window in [*windows, part]:
        window.tensor_deregister()
    del windows, part, tensors, padding, pool


def test_the_memory_of_others_as_tensors(comm, seed):
    rank, size = comm.get_rank(), comm.get_size()
    buffer = to.symmetric_empty(COUNT, torch.float32, comm)
    buffer.copy_(data(COUNT, torch.float32, seed + rank))
    window = comm.new_window(buffer)
    mapped = [window.map_remote_tensor(peer) for peer in range(size)]
    for peer, tensor in enumerate(mapped):
        assert torch.equal(tensor, data(COUNT, torch.float32, seed + peer))
        assert window.get_attr(peer).access_type == to.TorchCommWinAccessType.WIN_ACCESS_TYPE_UNIFIED
    comm.barrier(async_op=True).wait_blocking()
    window.tensor_deregister()
    del window, buffer
    for peer, tensor in enumerate(mapped):  # they keep the memory
        assert torch.equal(tensor, data(COUNT, torch.float32, seed + peer))
    comm.barrier(async_op=True).wait_blocking()


def test_mistakes(comm):
    rank, size = comm.get_rank(), comm.get_size()
    for tensor, message in [
        (torch.ones(8, device="cuda"), "expected memory that other ranks can map.*symmetric_empty.*MemPool"),
        (torch.ones(8), "expected tensor on cuda"),
        (to.symmetric_empty(8 + rank, torch.float32, comm), "expected memory of the same size on all ranks"),
    ]:
        with pytest.raises(to.Error, match=message):
            comm.new_window(tensor)
    window = comm.new_window(to.symmetric_empty(8, torch.float32, comm))
    x = torch.ones(4, device="cuda")
    for error, message, call in [
        (to.InvalidTypeError, "put: expected a tensor of the window's", lambda: window.put(x.half(), 0, 0, False)),
        (to.InvalidTypeError, "put: expected tensor on cuda", lambda: window.put(x.cpu(), 0, 0, False)),
        (to.InvalidValueError, "put: expected elements inside", lambda: window.put(x, 0, 5, False)),
        (to.InvalidValueError, "put: expected dst_rank in", lambda: window.put(x, size, 0, False)),
        (to.InvalidValueError, "signal: expected dst_rank in", lambda: window.signal(size, False)),
        (to.InvalidValueError, "wait_signal: expected peer_rank in", lambda: window.wait_signal(size, False)),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    window.tensor_deregister()


def test_one_rank_in_error_is_everybodys_error(comm):
    rank = comm.get_rank()
    tensor = torch.ones(8, device="cuda") if rank == 1 else to.symmetric_empty(8, torch.float32, comm)
    expected = (
        "rank 1 could not take part" if rank != 1 else "tensor_register: expected memory that other ranks can map"
    )
    with pytest.raises(to.InvalidValueError, match=expected):
        comm.new_window(tensor)


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


def test_registered_memory(comm):
    x = torch.ones(1 << 20, device="cuda")
    comm.tensor_register(x)
    with pytest.raises(to.StateError, match="expected memory that is not registered"):
        comm.tensor_register(x)
    comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    assert (x == comm.get_size()).all()
    comm.tensor_deregister(x)


def test_windows_give_their_memory_back(comm):
    def use():
        window = comm.new_window(to.symmetric_empty(4 << 20, torch.float32, comm))
        window.tensor_deregister()

    for _ in range(3):
        use()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(30):
        use()
    gc.collect()
    torch.cuda.synchronize()
    comm.barrier(async_op=True).wait_blocking()
    assert before - torch.cuda.mem_get_info()[0] < 64 << 20
