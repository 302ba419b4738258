"""Windows over NVLink: values, order, timeouts, memory of every origin, and errors."""

import gc
import time
from datetime import timedelta

import pytest
import torch
from window_cases import COUNT, data, put_around

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)

# Through the kernel in words of every width, and by the copy engine.
SIZES = [1, 7, 1000, 3001, 1 << 16, (1 << 20) + 3, (4 << 20) - 1, 4 << 20, (8 << 20) + 5]


def same(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


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
    put_around(comm.new_window(to.symmetric_empty(COUNT, torch.float32, comm)), ring, seed, 100)


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


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_puts_of_nothing(comm, ring, captured):
    """Empty puts move nothing, and their signals arrive; also past a window's end, or in an empty one."""
    _, right, left = ring
    windows = [comm.new_window(to.symmetric_empty(count, torch.float32, comm)) for count in (5, 0)]
    none = torch.ones(0, device="cuda")

    def step():
        for count, window in zip((5, 0), windows, strict=True):
            for offset in (0, count):
                window.put(none, right, offset, async_op=False, signal=True)
                window.put(none, right, offset, async_op=True).wait()
                window.signal(right, async_op=True).wait()
            for _ in range(4):
                window.wait_signal(left, async_op=True).wait()

    for window in windows:
        window.get_tensor().fill_(7)
    torch.cuda.synchronize()
    comm.barrier(async_op=True).wait_blocking()
    graph, run = torch.cuda.CUDAGraph(), step
    if captured:
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    for _ in range(3):
        run()
    for count, window in zip((5, 0), windows, strict=True):
        assert (window.get_tensor() == 7).all()
        assert window.map_remote_tensor(right).shape == (count,)
    torch.cuda.synchronize()
    del graph, run
    for window in windows:
        window.tensor_deregister()


def test_nothing_is_signalled_after_an_abort(comm, make_comm, ring):
    """The data of an aborted operation is not signalled to a rank whose communicator is intact."""
    rank, right, _ = ring
    broken = make_comm("aborted_before_its_signal", timeout=timedelta(seconds=20))
    window = broken.new_window(to.symmetric_empty(8, torch.float32, broken))
    if rank == 0:
        window.wait_signal(right, async_op=False)  # never arrives
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
    # A wait delays neither collectives, nor other windows, nor puts.
    x = torch.ones(8, device="cuda")
    comm.all_reduce(x, to.ReduceOp.SUM, async_op=True).wait_blocking()
    two.signal(peer, async_op=True)
    two.wait_signal(source, async_op=False)
    torch.cuda.current_stream().synchronize()
    assert not fourth.is_completed()
    comm.barrier(async_op=True).wait_blocking()
    one.signal(peer, async_op=False)
    fourth.wait_blocking()
    # Surplus signals are dropped with their window.
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
        torch.cuda.synchronize()  # the kernel has ended, and the context is intact
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
    window.tensor_deregister()  # not collective
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
