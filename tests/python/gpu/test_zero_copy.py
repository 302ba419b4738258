"""Collectives on tensors in windows, which the peers read and write in place. See docs/design/kernels.md."""

from datetime import timedelta

import pytest
import torch
from small_cases import (
    FLOATS,
    INTEGERS,
    KI,
    OPS,
    OTHERS,
    algorithm_used,
    algorithms,
    check_reduced,
    draw_all,
    draw_bytes,
)

import torch_overlap as to
from torch_overlap import ReduceOp

pytestmark = pytest.mark.gpu(2)

MIB = 1024 * KI
FILL = 0xA5
ZERO_COPY = {"custom_collectives": "zero_copy"}
# Bytes of one part: a vector, a block's share and one more, several rounds of the staged protocol.
SIZES = [16, 16 * 128, 16 * 129, 48 * KI + 16, 3 * MIB + 48]


class Arena:
    """Tensors in one window, with a frame around each that must stay unchanged."""

    def __init__(self, comm, size=96 * MIB):
        self.comm = comm
        self.bytes = to.symmetric_empty(size, torch.uint8, comm)
        self.window = comm.new_window(self.bytes)
        self.start()

    def start(self):
        """Starts again. The frames of all ranks are intact before any rank continues."""
        self.bytes.fill_(FILL)
        self.used, self.taken = 256, []
        torch.cuda.synchronize()
        self.comm.barrier(async_op=True).wait_blocking()

    def empty(self, count, dtype, shift=0):
        """Returns a tensor `shift` bytes from a vector's address, at another offset on every rank."""
        begin = self.used + 16 * (3 * self.comm.get_rank() + 1) + shift
        end = begin + count * dtype.itemsize
        self.used = -(-end // 256) * 256 + 16 * 3 * self.comm.get_size() + 256
        assert self.used <= self.bytes.numel()
        self.taken.append((begin, end))
        return self.bytes[begin:end].view(dtype) if shift % dtype.itemsize == 0 else None

    def copy(self, x, shift=0):
        return self.empty(x.numel(), x.dtype, shift).copy_(x)

    def check(self):
        at = 0
        for begin, end in [*self.taken, (self.bytes.numel(), 0)]:
            assert (self.bytes[at:begin] == FILL).all()
            at = end


@pytest.fixture(scope="module")
def zero(make_comm):
    return make_comm("zero_copy", hints=ZERO_COPY)


@pytest.fixture(scope="module")
def whole_arena(zero):
    return Arena(zero)


@pytest.fixture
def arena(whole_arena):
    whole_arena.start()
    yield whole_arena
    torch.cuda.synchronize()
    whole_arena.comm.barrier(async_op=True).wait_blocking()
    whole_arena.check()


def elements(size, dtype):
    return size // dtype.itemsize


# --- Values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS, ids=lambda op: str(op).rsplit(".", maxsplit=1)[-1])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_every_reduction(zero, arena, seed, dtype, op):
    if op == ReduceOp.AVG and dtype in INTEGERS:
        pytest.skip("NCCL does it")
    rank, size = zero.get_rank(), zero.get_size()
    for bytes_ in SIZES[:-1] if op != ReduceOp.SUM else SIZES:
        count = elements(bytes_, dtype)
        parts = draw_all(zero, seed + count, dtype, count)
        x = arena.copy(parts[rank])
        zero.all_reduce(x, op, async_op=False)
        check_reduced(x, op, parts)
        whole = draw_all(zero, seed + count + 1, dtype, count * size)
        source = arena.copy(whole[rank])
        for out in (torch.zeros(count, dtype=dtype, device="cuda"), arena.empty(count, dtype)):
            zero.reduce_scatter_single(out, source, op, async_op=False)
            check_reduced(out, op, [part.view(size, count)[rank] for part in whole])
        assert torch.equal(source, whole[rank])
        zero.reduce_scatter_single(source.view(size, count)[rank], source, op, async_op=False)
        check_reduced(source.view(size, count)[rank], op, [part.view(size, count)[rank] for part in whole])
        arena.start()


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *OTHERS], ids=str)
def test_data_movement_of_every_dtype(zero, arena, seed, dtype):
    """Compares random bytes as bytes."""
    rank, size = zero.get_rank(), zero.get_size()
    for bytes_ in SIZES:
        every = draw_bytes(zero, seed + bytes_, dtype, elements(bytes_, dtype) * size)
        parts = every.view(size, size, -1)  # from, to
        out = arena.empty(every[0].numel(), torch.uint8)
        zero.all_gather_single(out.view(dtype), parts[rank][0].view(dtype), async_op=False)
        assert torch.equal(out, parts[:, 0].flatten())
        out.fill_(77).view(size, -1)[rank] = parts[rank][1]
        zero.all_gather_single(out.view(dtype), out.view(size, -1)[rank].view(dtype), async_op=False)  # in place
        assert torch.equal(out, parts[:, 1].flatten())
        zero.all_to_all_single(out.view(dtype), every[rank].view(dtype), async_op=False)
        assert torch.equal(out, parts[:, rank].flatten())
        for root in range(size):
            x = arena.copy(parts[rank][root])
            zero.broadcast(x.view(dtype), root, async_op=False)
            assert torch.equal(x, parts[root][root])
        arena.start()


def test_what_a_rank_overwrites_at_once_its_peers_have_read(zero, arena, seed):
    """The call ends on the device even if its tensors are no longer referenced."""
    rank, size, count = zero.get_rank(), zero.get_size(), 200_000
    x, out = arena.empty(count * size, torch.float32), torch.empty(count, device="cuda")
    gathered = arena.empty(count * size, torch.float32)
    for step in range(20):
        whole = draw_all(zero, seed + step, torch.float32, count * size)
        if step % size == rank:
            torch.cuda._sleep(3_000_000)
        x.copy_(whole[rank])
        zero.reduce_scatter_single(out, x, ReduceOp.SUM, async_op=False)
        x.fill_(float("nan"))
        zero.all_gather_single(gathered, out, async_op=False)
        got = gathered.clone()
        gathered.fill_(float("nan"))
        check_reduced(got, ReduceOp.SUM, whole)


# --- Without a window common to all ranks ------------------------------------------------------------------------


def calls_on(comm, seed, dtype, count, take):
    """Returns every operation, on tensors of take(count), with its check."""
    rank, size = comm.get_rank(), comm.get_size()
    whole = draw_all(comm, seed, dtype, count * size)
    parts = [part.view(size, count) for part in whole]

    def all_reduce():
        x = take(count).copy_(parts[rank][0])
        comm.all_reduce(x, ReduceOp.SUM, async_op=False)
        check_reduced(x, ReduceOp.SUM, [part[0] for part in parts])

    def reduce_scatter():
        out = take(count).fill_(77)
        comm.reduce_scatter_single(out, take(count * size).copy_(whole[rank]), ReduceOp.SUM, async_op=False)
        check_reduced(out, ReduceOp.SUM, [part[rank] for part in parts])

    def all_gather():
        out = take(count * size).fill_(77)
        comm.all_gather_single(out, parts[rank][1], async_op=False)
        assert torch.equal(out, torch.cat([part[1] for part in parts]))

    def all_to_all():
        out = take(count * size).fill_(77)
        comm.all_to_all_single(out, whole[rank], async_op=False)
        assert torch.equal(out, torch.cat([part[rank] for part in parts]))

    def broadcast():
        x = take(count).copy_(parts[rank][0])
        comm.broadcast(x, size - 1, async_op=False)
        assert torch.equal(x, parts[-1][0])

    return [all_reduce, reduce_scatter, all_gather, all_to_all, broadcast]


@pytest.mark.parametrize("bytes_", [16, 48 * KI + 16, 3 * MIB + 48])
@pytest.mark.parametrize("what", ["plain", "unaligned", "other window", "list"])
def test_one_rank_that_has_no_place_in_the_window(zero, arena, seed, bytes_, what):
    """Each rank is the exception in turn: all ranks stage, and all have the right result."""
    second = Arena(zero) if what == "other window" else None
    arenas = [arena, second] if second else [arena]
    count, dtype = elements(bytes_, torch.bfloat16), torch.bfloat16
    for odd in range(zero.get_size() + 1):  # last: no rank is
        is_odd = odd == zero.get_rank()
        plain = lambda n: torch.empty(n, dtype=dtype, device="cuda")  # noqa: E731
        take = {
            "plain": plain,
            "list": plain,
            "unaligned": lambda n: arena.empty(n, dtype, 2),
            "other window": lambda n: second.empty(n, dtype),
        }[what]
        for call in calls_on(zero, seed + odd, dtype, count, take if is_odd else lambda n: arena.empty(n, dtype)):
            call()
            for one in arenas:
                one.start()
        if what == "list":
            rank, size = zero.get_rank(), zero.get_size()
            parts = draw_all(zero, seed, dtype, count)
            out = arena.empty(count * size, dtype)
            if is_odd:
                zero.all_gather([plain(count) for _ in range(size - 1)] + [out[:count]], parts[rank], async_op=False)
                assert torch.equal(out[:count], parts[-1])
            else:
                zero.all_gather_single(out, parts[rank], async_op=False)
                assert torch.equal(out, torch.cat(parts))
            arena.start()
    if second is not None:
        second.check()
        second.window.tensor_deregister()


def test_empty_tensors(zero, arena, seed):
    """Runs them between calls with elements."""
    for count in (8, 0, 8):
        for call in calls_on(zero, seed, torch.bfloat16, count, lambda n: arena.empty(n, torch.bfloat16)):
            call()


def test_the_recorder_names_the_way(make_comm, comm):
    zero, auto = make_comm("zero_named", hints=ZERO_COPY), make_comm("auto_named")
    x = to.symmetric_empty(4 * MIB, torch.uint8, zero)
    out = to.symmetric_empty(4 * MIB * comm.get_size(), torch.uint8, zero)
    floats = x.view(torch.float32)

    def calls():
        for on in (zero, auto):
            on.all_reduce(floats, ReduceOp.SUM, async_op=False)
            on.all_gather_single(out[: 512 * KI * comm.get_size()], x[: 512 * KI], async_op=False)
            on.all_gather_single(out[: 1001 * comm.get_size()], x[:1001], async_op=False)
            on.all_gather_single(out[: 1024 * comm.get_size()], x[:1024], async_op=False)

    small = "ll"
    if comm.get_size() > 4:
        large = medium = "nccl"
    elif torch.cuda.get_device_capability()[0] >= 9:
        large = medium = "ll128"
        small = "ll128" if comm.get_size() == 2 else "ll"
    else:
        large, medium = (algorithm_used(comm),) * 2 if comm.get_size() == 2 else ("two_shot", "simple")
    assert algorithms(calls) == ["nccl"] * 4 + [large, medium, small, small]
    windows = [on.new_window(t) for on in (zero, auto) for t in (x, out)]
    name = "zero_copy"
    found = [name, name, "nccl", name, large, medium, small, small]  # the hint, and "auto" unchanged
    assert algorithms(calls) == found
    for window in windows:
        window.tensor_deregister()
    assert algorithms(calls) == found  # staged


# --- Life of the window ------------------------------------------------------------------------------------------


def test_a_window_that_goes_leaves_calls_right(zero, seed):
    """The window is deregistered, dropped, and made again, with calls in flight."""
    size, rank, count = zero.get_size(), zero.get_rank(), 300_000
    for step in range(6):
        tensor = to.symmetric_empty(count * size, torch.float32, zero)
        window = zero.new_window(tensor)
        parts = draw_all(zero, seed + step, torch.float32, count)
        torch.cuda._sleep(5_000_000 * (rank == step % size))
        works = [zero.all_gather_single(tensor, parts[rank], async_op=True) for _ in range(3)]
        if step % 3 == 0:
            window.tensor_deregister()
        elif step % 3 == 1:
            del window
        for work in works:
            work.wait()
        assert torch.equal(tensor, torch.cat(parts))
        zero.all_reduce(tensor, ReduceOp.MAX, async_op=False)  # in a window or not
        assert torch.equal(tensor, torch.cat(parts))


def test_a_window_that_one_rank_lets_go(zero, seed):
    """The others still have it: all stage."""
    rank, count = zero.get_rank(), 100_000
    tensor = to.symmetric_empty(count, torch.float32, zero)
    window = zero.new_window(tensor)
    for step in range(4):
        if step == 2 and rank == zero.get_size() - 1:
            del window
        parts = draw_all(zero, seed + step, torch.float32, count)
        tensor.copy_(parts[rank])
        zero.all_reduce(tensor, ReduceOp.SUM, async_op=False)
        check_reduced(tensor, ReduceOp.SUM, parts)


def test_collectives_in_a_window_and_elsewhere_have_one_order(zero, arena, seed):
    """Runs on streams that nothing else orders, one of which is late on one rank."""
    rank, size, count = zero.get_rank(), zero.get_size(), 200_000
    streams = [torch.cuda.Stream() for _ in range(2)]
    out = arena.empty(count * size, torch.float32)
    for step in range(20):
        parts = draw_all(zero, seed + step, torch.float32, count)
        mine, plain = parts[rank].clone(), parts[rank].clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            if step % size == rank:
                torch.cuda._sleep(3_000_000)
            zero.all_gather_single(out, mine, async_op=step % 2 == 0).wait()
        with torch.cuda.stream(streams[1]):
            zero.all_reduce(plain, ReduceOp.SUM, async_op=step % 3 == 0, hints={"custom_collectives": "simple"}).wait()
        torch.cuda.synchronize()
        assert torch.equal(out, torch.cat(parts))
        check_reduced(plain, ReduceOp.SUM, parts)


def test_a_put_waits_for_no_collective_of_its_window(zero, seed):
    """Rank 1 enters the collective after it has received the put that rank 0 issues after it. The collective has few
    blocks: if ranks share a GPU, those that wait leave room for the put."""
    rank, count = zero.get_rank(), 5_000
    tensor = to.symmetric_empty(count + 1, torch.float32, zero)
    window = zero.new_window(tensor)
    parts = draw_all(zero, seed, torch.float32, count)
    tensor[:count].copy_(parts[rank])
    torch.cuda.synchronize()
    zero.barrier(async_op=True).wait_blocking()
    if rank == 1:
        window.wait_signal(0, async_op=False)
    work = zero.all_reduce(tensor[:count], ReduceOp.SUM, async_op=True)
    if rank == 0:
        window.put(torch.full((1,), 5.0, device="cuda"), 1, count, async_op=False, signal=True)
    work.wait()
    check_reduced(tensor[:count], ReduceOp.SUM, parts)
    if rank == 1:
        assert tensor[count] == 5
    window.tensor_deregister()


def test_deregistering_waits_for_collectives(zero):
    rank, count = zero.get_rank(), 100_000
    tensor = to.symmetric_empty(count * zero.get_size(), torch.float32, zero)
    window = zero.new_window(tensor)
    x = torch.full((count,), float(rank), device="cuda")
    if rank == 0:
        torch.cuda._sleep(200_000_000)
    work = zero.all_gather_single(tensor, x, async_op=True)
    window.tensor_deregister()
    assert work.is_completed()
    assert torch.equal(tensor.view(-1, count)[:, 0].cpu(), torch.arange(zero.get_size()).float())


def test_deregistering_has_a_timeout(make_comm, comm):
    late = make_comm("late_deregister", hints=ZERO_COPY)
    tensor = to.symmetric_empty(4096, torch.float32, late)
    window = late.new_window(tensor)
    late.all_reduce(tensor, ReduceOp.SUM, async_op=False)
    torch.cuda.synchronize()
    late.set_timeout(timedelta(milliseconds=400))
    comm.barrier(async_op=True).wait_blocking()
    if comm.get_rank() == 0:
        late.all_reduce(tensor, ReduceOp.SUM, async_op=True, timeout=timedelta(seconds=30))
        with pytest.raises(to.OperationTimeoutError, match=r"expected the collectives on .* within 400 ms"):
            window.tensor_deregister()
    comm.barrier(async_op=True).wait_blocking()
    late.abort()
