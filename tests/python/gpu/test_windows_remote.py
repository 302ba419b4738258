"""Windows of ranks that do not map each other's memory: puts and signals go through NCCL's one-sided calls.

The ranks pretend that peers' memory is unreachable. Where the NCCL that is loaded lacks the calls
(2.29), the error is tested, and the rest is skipped.
"""

import gc
import re
import time
from datetime import timedelta

import pytest
import torch
from window_cases import COUNT, data, put_around

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)

STAGING = 16 << 20
APART = "ranks pretend that peers' memory is unreachable"
DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16,
          torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]  # fmt: skip


def new_window(comm, tensor):
    pretence = to._C._PretendUnreachable()
    try:
        return comm.new_window(tensor)
    finally:
        del pretence


def make(comm, count=COUNT, dtype=torch.float32):
    """Returns a window on memory that is filled before any rank continues."""
    buffer = to.symmetric_empty(count, dtype, comm)
    buffer.view(torch.uint8).fill_(0x5A)
    torch.cuda.synchronize()
    return buffer, new_window(comm, buffer)


def meet(comm):
    comm.barrier(async_op=True).wait_blocking()


def same(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def version_of(comm):
    return tuple(int(part) for part in comm.get_backend_version().split(".")[:2])


@pytest.fixture
def remote(comm):
    """Returns the communicator, if NCCL has one-sided calls."""
    if version_of(comm) < (2, 29):
        pytest.skip(f"NCCL {comm.get_backend_version()} has no one-sided calls (2.29)")
    return comm


def test_an_older_nccl_is_named(comm):
    if version_of(comm) >= (2, 29):
        pytest.skip(f"NCCL {comm.get_backend_version()} has one-sided calls")
    message = (
        rf"tensor_register: .* got rank 0, which cannot reach that of rank 1: {APART}; and there is no other way: "
        rf"one-sided operations need NCCL 2\.29\.0 or newer, and {re.escape(comm.get_backend_version())} is loaded"
    )
    with pytest.raises(to.UnsupportedError, match=message):
        make(comm)
    meet(comm)


def test_what_a_rank_is_told(remote):
    rank, size = remote.get_rank(), remote.get_size()
    buffer, window = make(remote)
    kinds = to.TorchCommWinAccessType
    for peer in range(size):
        expected = kinds.WIN_ACCESS_TYPE_UNIFIED if peer == rank else kinds.WIN_ACCESS_TYPE_SEPARATE
        assert window.get_attr(peer).access_type == expected
        if peer != rank:
            with pytest.raises(to.UnsupportedError, match=f"rank {rank} can reach, got {peer}: {APART}"):
                window.map_remote_tensor(peer)
    assert same(window.map_remote_tensor(rank), buffer)
    window.tensor_deregister()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_at_every_offset(remote, ring, seed, dtype, async_op):
    rank, right, left = ring
    buffer, window = make(remote, COUNT + 16, dtype)
    for i, (count, offset) in enumerate([(1, 0), (7, 3), (COUNT, 0), (COUNT, 16), (COUNT - 5, 2), (0, 5)]):
        buffer.view(torch.uint8).fill_(0x5A)
        torch.cuda.synchronize()
        meet(remote)
        x = data(count, dtype, seed + 10 * i + rank)
        window.put(x, right, offset, async_op)
        window.signal(right, async_op)
        del x
        window.wait_signal(left, async_op).wait()
        want = torch.full_like(buffer.view(torch.uint8), 0x5A).view(dtype)
        want[offset : offset + count] = data(count, dtype, seed + 10 * i + left)
        assert same(buffer, want), (count, offset)
        meet(remote)
    window.tensor_deregister()


@pytest.mark.parametrize("bytes_more", [-1, 0, 1, STAGING + 12345])
@pytest.mark.parametrize("async_op", [False, True])
def test_more_than_the_staging_memory(remote, ring, seed, bytes_more, async_op):
    rank, right, left = ring
    count = STAGING + bytes_more
    buffer, window = make(remote, count + 3, torch.uint8)
    for turn in range(3):
        x = data(count, torch.uint8, seed + 10 * turn + rank)
        window.put(x, right, 3, async_op)
        window.signal(right, async_op)
        del x
        window.wait_signal(left, async_op).wait()
        assert torch.equal(buffer[3:], data(count, torch.uint8, seed + 10 * turn + left)), turn
        assert (buffer[:3] == 0x5A).all()
        meet(remote)
    window.tensor_deregister()


def test_from_the_windows_own_memory(remote, ring, seed):
    """The first half is what this rank sends, the second what it receives: nothing is staged, and no other memory
    changes."""
    rank, right, left = ring
    buffer, window = make(remote, 2 * COUNT)
    for turn in range(10):
        buffer[:COUNT] = data(COUNT, torch.float32, seed + 10 * turn + rank)
        for start in range(0, COUNT, 1000):
            part = buffer[start : min(start + 1000, COUNT)]
            window.put(part, right, COUNT + start, async_op=turn % 2 == 0)
        window.signal(right, async_op=turn % 2 == 0)
        window.wait_signal(left, async_op=False)
        assert torch.equal(buffer[COUNT:], data(COUNT, torch.float32, seed + 10 * turn + left)), turn
        assert torch.equal(buffer[:COUNT], data(COUNT, torch.float32, seed + 10 * turn + rank)), turn
        meet(remote)
    window.tensor_deregister()


def test_empty_tensors_have_signals(remote, ring):
    _, right, left = ring
    window = new_window(remote, to.symmetric_empty(0, torch.float32, remote))
    for _ in range(3):
        window.put(torch.ones(0, device="cuda"), right, 0, async_op=False)
        window.signal(right, async_op=False)
        window.wait_signal(left, async_op=True).wait_blocking()
    window.tensor_deregister()


def test_the_own_rank(remote, ring, seed):
    rank, _, _ = ring
    buffer, window = make(remote)
    window.put(data(COUNT, torch.float32, seed + rank), rank, 0, async_op=False)
    window.signal(rank, async_op=False)
    window.wait_signal(rank, async_op=False)
    assert torch.equal(buffer, data(COUNT, torch.float32, seed + rank))
    window.tensor_deregister()


def test_a_ring_two_hundred_times_with_a_late_rank(remote, ring, seed):
    def late(step):
        if step % 20 == 0 and remote.get_rank() == step // 20 % remote.get_size():
            torch.cuda._sleep(20_000_000)

    _, window = make(remote)
    put_around(window, ring, seed, 200, late)


def test_everyone_writes_to_everyone(remote, seed):
    rank, size = remote.get_rank(), remote.get_size()
    buffer, window = make(remote, size * COUNT)
    for step in range(10):
        x = data(COUNT, torch.float32, seed + 100 * step + rank)
        for peer in range(size):
            window.put(x, peer, rank * COUNT, async_op=True)
            window.signal(peer, async_op=True)
        for work in [window.wait_signal(peer, async_op=True) for peer in range(size)]:
            work.wait()
        for peer in range(size):
            want = data(COUNT, torch.float32, seed + 100 * step + peer)
            assert torch.equal(buffer.view(size, COUNT)[peer], want), (step, peer)
        remote.barrier(async_op=False)
    torch.cuda.synchronize()
    window.tensor_deregister()


def test_streams_share_the_staging_memory_in_turn(remote, ring, seed):
    """Runs puts on several streams, the communicator's own among them, each from memory of its own."""
    rank, right, left = ring
    count, streams = 1 << 20, [torch.cuda.Stream() for _ in range(3)]
    turns = 12
    buffer, window = make(remote, turns * count)
    sources = [data(count, torch.float32, seed + 10 * turn + rank) for turn in range(turns)]
    torch.cuda.synchronize()
    for turn, x in enumerate(sources):
        with torch.cuda.stream(streams[turn % 3]):
            if turn % 5 == 0:
                torch.cuda._sleep(10_000_000)
            window.put(x, right, turn * count, async_op=turn % 4 == 3)
    window.signal(right, async_op=True)
    window.wait_signal(left, async_op=False)
    for turn in range(turns):
        want = data(count, torch.float32, seed + 10 * turn + left)
        assert torch.equal(buffer.view(turns, count)[turn], want), turn
    torch.cuda.synchronize()
    window.tensor_deregister()


def test_signals_count_and_do_not_leak(remote, ring):
    """Neither puts nor signals of another window count as signals of this one."""
    _, right, left = ring
    (_, one), (_, two) = make(remote), make(remote)
    for _ in range(3):
        one.signal(right, async_op=False)
    one.put(torch.ones(8, device="cuda"), right, 0, async_op=False)
    two.put(torch.ones(8, device="cuda"), right, 0, async_op=False)
    for _ in range(3):
        one.wait_signal(left, async_op=True).wait_blocking()
    fourth = one.wait_signal(left, async_op=True)
    torch.cuda.current_stream().synchronize()
    meet(remote)
    time.sleep(0.2)
    assert not fourth.is_completed()
    meet(remote)
    two.signal(right, async_op=True)
    two.wait_signal(left, async_op=False)
    torch.cuda.current_stream().synchronize()
    assert not fourth.is_completed()
    meet(remote)
    one.signal(right, async_op=False)
    fourth.wait_blocking()
    one.signal(right, async_op=False)  # left over
    torch.cuda.synchronize()
    one.tensor_deregister()
    two.tensor_deregister()
    _, three = make(remote)
    wait = three.wait_signal(left, async_op=True)
    meet(remote)
    time.sleep(0.2)
    assert not wait.is_completed()
    meet(remote)
    three.signal(right, async_op=False)
    wait.wait_blocking()
    three.tensor_deregister()


def test_a_mapped_window_beside_it(remote, ring, seed):
    rank, right, left = ring
    far, through_nccl = make(remote)
    near = to.symmetric_empty(COUNT, torch.float32, remote)
    mapped = remote.new_window(near)
    for turn in range(20):
        x = data(COUNT, torch.float32, seed + 10 * turn + rank)
        for window in (through_nccl, mapped):
            window.put(x, right, 0, async_op=turn % 2 == 0)
            window.signal(right, async_op=turn % 2 == 0)
        for window, buffer in ((mapped, near), (through_nccl, far)):
            window.wait_signal(left, async_op=False)
            assert torch.equal(buffer, data(COUNT, torch.float32, seed + 10 * turn + left)), turn
        meet(remote)
    through_nccl.tensor_deregister()
    mapped.tensor_deregister()


def test_captures_refuse_what_goes_through_nccl(remote, ring):
    rank, right, left = ring
    _, window = make(remote)
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for async_op in (False, True):
            with pytest.raises(to.StateError, match=f"put: .* rank {right} is written to by NCCL's one-sided calls"):
                window.put(x, right, 0, async_op)
            with pytest.raises(to.StateError, match=f"signal: .* rank {right} is written to by NCCL's"):
                window.signal(right, async_op)
        window.wait_signal(left, async_op=False)
        window.put(x, rank, 0, async_op=False)
    for _ in range(3):
        window.signal(right, async_op=False)
        graph.replay()
    torch.cuda.synchronize()
    assert (window.get_tensor()[:8] == 1).all()
    meet(remote)
    window.tensor_deregister()


def test_a_signal_that_does_not_come(remote, make_comm):
    lonely = make_comm("lonely_remote_wait", timeout=timedelta(seconds=30))
    _, window = make(lonely)
    if remote.get_rank() == 0:
        work = window.wait_signal(1, async_op=False, timeout=timedelta(seconds=2))
        message = (
            r"wait_signal: expected signal 1 of rank 1 in window 'lonely_remote_wait/window_0' within 2000 ms, got 0"
        )
        with pytest.raises(to.OperationTimeoutError, match=message):
            work.wait_blocking()
        torch.cuda.synchronize()
        with pytest.raises(to.OperationTimeoutError, match=message):
            window.signal(1, async_op=False)
    meet(remote)
    lonely.abort()
    window.tensor_deregister()  # not collective
    x = torch.ones(8, device="cuda")
    assert (x + 1 == 2).all()
    meet(remote)


def test_an_abort_with_puts_in_flight(remote, make_comm, ring):
    _, right, _ = ring
    broken = make_comm("aborted_remote")
    _, window = make(broken, 1 << 20)
    x = torch.ones(1 << 20, device="cuda")
    torch.cuda._sleep(100_000_000)
    window.put(x, right, 0, async_op=True)
    begin = time.monotonic()
    broken.abort()
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 30
    with pytest.raises(to.StateError):
        window.put(x, right, 0, async_op=False)
    window.tensor_deregister()
    meet(remote)


def test_deregistering_waits_for_what_is_under_way(remote, ring):
    rank, right, left = ring
    buffer, window = make(remote, 8 << 20)
    x = torch.full((8 << 20,), float(rank), device="cuda")
    torch.cuda._sleep(400_000_000)
    window.put(x, right, 0, async_op=True)
    window.tensor_deregister()
    assert (buffer == left).all()


def test_a_finalized_communicator_takes_its_windows_along(remote, make_comm, ring):
    rank, right, left = ring
    ended = make_comm("finalized_remote")
    buffer, window = make(ended)
    _, unused = make(ended)
    window.put(torch.full((COUNT,), float(rank), device="cuda"), right, 0, async_op=True)
    ended.finalize()
    meet(remote)
    assert (buffer == left).all()
    with pytest.raises(to.StateError):
        window.signal(right, async_op=False)
    window.tensor_deregister()
    unused.tensor_deregister()


def test_parts_of_an_allocation_at_any_place(remote, ring, seed):
    rank, right, left = ring
    arena = to.symmetric_empty(1 << 20, torch.float32, remote)
    start = 1000 * (1 + rank) + 1
    part = arena[start : start + COUNT]
    window = new_window(remote, part)
    for turn in range(4):
        arena.fill_(-1)
        if turn % 2:
            part[:1000] = data(1000, torch.float32, seed + 10 * turn + rank)
        torch.cuda.synchronize()
        meet(remote)
        x = part[:1000] if turn % 2 else data(1000, torch.float32, seed + 10 * turn + rank)
        window.put(x, right, 2000, async_op=False)
        window.signal(right, async_op=False)
        window.wait_signal(left, async_op=False)
        want = torch.full_like(arena, -1)
        if turn % 2:
            want[start : start + 1000] = x
        want[start + 2000 : start + 3000] = data(1000, torch.float32, seed + 10 * turn + left)
        assert torch.equal(arena, want), turn
        meet(remote)
    window.tensor_deregister()


def test_allocations_of_other_sizes_are_refused_on_all_ranks(remote):
    arena = to.symmetric_empty((1 + remote.get_rank()) << 20, torch.float32, remote)
    with pytest.raises(to.InvalidValueError, match="expected tensors in allocations of one size"):
        new_window(remote, arena[:1024])
    meet(remote)


@pytest.mark.timeout(120)
def test_windows_give_their_memory_back(remote, ring):
    _, right, left = ring

    def use():
        _, window = make(remote, 4 << 20)
        window.put(torch.ones(8, device="cuda"), right, 0, async_op=True)
        window.signal(right, async_op=True)
        window.wait_signal(left, async_op=False)
        window.tensor_deregister()

    def free():
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    for _ in range(3):
        use()
    before = free()
    for _ in range(20):  # each one has 16 MiB of staging memory, and a communicator, which is slow to make
        use()
    after = free()
    meet(remote)
    assert before - after < 64 << 20
