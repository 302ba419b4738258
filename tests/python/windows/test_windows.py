"""put, signal and wait_signal: values and order."""

import copy
import time
from datetime import timedelta

import pytest
import torch

import torch_overlap as to
from torch_overlap import TorchComm
from torch_overlap.testing import run_ranks

COUNT = 1000
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64,
          torch.float8_e4m3fn]  # fmt: skip


def random_like(shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (shape,), generator=generator).to(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def run_ring(comm: TorchComm, seed: int) -> None:
    """Each rank writes to the next, a hundred times, with a signal back before the part is overwritten."""
    rank, size = comm.get_rank(), comm.get_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    buffer = to.symmetric_empty((size, COUNT), torch.float32, comm)
    buffer.fill_(99)
    window = comm.new_window(buffer)
    for step in range(100):
        x = random_like(COUNT, torch.float32, seed + step * size + rank)
        if step > 0:
            window.wait_signal(right, async_op=step % 3 == 0).wait()  # the previous data was read
        window.put(x, right, rank * COUNT, async_op=step % 2 == 0)
        window.signal(right, async_op=step % 2 == 0)
        window.wait_signal(left, async_op=False)
        assert torch.equal(buffer[left], random_like(COUNT, torch.float32, seed + step * size + left))
        untouched = [r for r in range(size) if r != left]
        assert (buffer[untouched] == 99).all()
        window.signal(left, async_op=False)
    window.tensor_deregister()


def test_a_ring(backend: str, size: int, seed: int) -> None:
    run_ranks(run_ring, size, seed, backend=backend)


def run_everyone_to_everyone(comm: TorchComm, seed: int) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    for dtype in DTYPES:
        buffer = to.symmetric_empty((size, COUNT), dtype, comm)
        window = comm.new_window(buffer)
        assert (window.dtype, window.shape, window.device) == (dtype, buffer.shape, torch.device("cpu"))
        assert window.get_size() == buffer.nbytes
        assert window.get_tensor() is buffer
        works = []
        for peer in range(size):
            x = random_like(COUNT, dtype, seed + rank)
            works += [window.put(x, peer, rank * COUNT, True), window.signal(peer, True)]
            del x  # the work keeps it
        waits = [window.wait_signal(peer, True) for peer in range(size)]
        for work in works + waits:
            work.wait()
            assert work.is_completed()
            assert work.status() == to.WorkStatus.COMPLETED
        for peer in range(size):
            assert equal(buffer[peer], random_like(COUNT, dtype, seed + peer))
        window.tensor_deregister()


def test_every_dtype_to_every_rank(backend: str, size: int, seed: int) -> None:
    run_ranks(run_everyone_to_everyone, size, seed, backend=backend)


def run_map(comm: TorchComm, seed: int) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    buffer = to.symmetric_empty(COUNT, torch.float32, comm)
    buffer.copy_(random_like(COUNT, torch.float32, seed + rank))
    window = comm.new_window(buffer)
    comm.barrier(False)
    mapped = [window.map_remote_tensor(peer) for peer in range(size)]
    for peer, tensor in enumerate(mapped):
        assert torch.equal(tensor, random_like(COUNT, torch.float32, seed + peer))
        assert window.get_attr(peer).access_type == to.TorchCommWinAccessType.WIN_ACCESS_TYPE_UNIFIED
    comm.barrier(False)
    mapped[(rank + 1) % size][0] = float(rank)  # written directly
    comm.barrier(False)
    assert buffer[0] == (rank - 1) % size
    window.tensor_deregister()
    del window, buffer
    comm.barrier(False)
    # A mapped tensor keeps the memory alive, also that of a rank that has released it.
    for peer, tensor in enumerate(mapped):
        assert torch.equal(tensor[1:], random_like(COUNT, torch.float32, seed + peer)[1:])


def test_the_memory_of_others_as_tensors(backend: str, size: int, seed: int) -> None:
    run_ranks(run_map, size, seed, backend=backend)


def run_signals_count(comm: TorchComm) -> None:
    """Signals are counted, belong to one window, and a put is not one."""
    rank = comm.get_rank()
    peer = 1 - rank
    one = comm.new_window(to.symmetric_empty(8, torch.float32, comm))
    two = comm.new_window(to.symmetric_empty(8, torch.float32, comm))
    for _ in range(5):
        one.signal(peer, False)
    one.put(torch.ones(8), peer, 0, False)
    waits = [one.wait_signal(peer, True) for _ in range(6)]
    other = two.wait_signal(peer, True)
    for work in waits[:5]:
        work.wait()
    comm.barrier(False)
    time.sleep(0.1)
    assert not waits[5].is_completed()  # neither the put nor the other window's signals count here
    assert not other.is_completed()
    comm.barrier(False)
    two.signal(peer, False)
    other.wait()
    assert not waits[5].is_completed()
    comm.barrier(False)
    one.signal(peer, False)
    waits[5].wait()
    # Surplus signals stay with their window: a new one starts at zero.
    one.signal(peer, False)
    one.tensor_deregister()
    three = comm.new_window(to.symmetric_empty(8, torch.float32, comm))
    wait = three.wait_signal(peer, True)
    comm.barrier(False)
    time.sleep(0.1)
    assert not wait.is_completed()
    comm.barrier(False)
    three.signal(peer, False)
    wait.wait()


def test_signals_count_and_do_not_leak(pair_backend: str) -> None:
    run_ranks(run_signals_count, 2, backend=pair_backend)


def run_put_with_signal(comm: TorchComm, seed: int) -> None:
    """The signal of a put behaves like any other: it follows the data, is counted, and is seen by hooks."""
    rank, size = comm.get_rank(), comm.get_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    window = comm.new_window(to.symmetric_empty(3 * COUNT, torch.float32, comm))
    seen = []
    hook = comm.register_pre_hook(lambda name, op_id, args: seen.append((name, args.peer)))
    for step, async_op in enumerate((False, True, True)):
        x = random_like(COUNT, torch.float32, seed + step * size + rank)
        hints = {"is_high_priority_stream": "true"} if step == 2 else None
        work = window.put(x, right, step * COUNT, async_op, hints, timedelta(seconds=60), signal=True)
        del x
        work.wait()
    hook.remove()
    assert seen == 3 * [(to.OpName.put, right), (to.OpName.signal, right)]
    for step in range(3):
        window.wait_signal(left, False, {"is_high_priority_stream": "false"}, timedelta(seconds=60))
        expected = random_like(COUNT, torch.float32, seed + step * size + left)
        assert torch.equal(window.get_tensor()[step * COUNT :][:COUNT], expected)
    wait = window.wait_signal(left, True)
    comm.barrier(False)
    assert not wait.is_completed()  # one signal per put
    comm.barrier(False)
    with pytest.raises(to.InvalidValueError, match="put: expected elements inside"):
        window.put(torch.ones(1), right, 3 * COUNT, False, signal=True)
    comm.barrier(False)
    assert not wait.is_completed()  # a put that is refused signals no rank
    comm.barrier(False)
    window.signal(right, False)
    wait.wait()
    window.tensor_deregister()


def test_a_put_signals_when_it_is_asked_to(backend: str, size: int, seed: int) -> None:
    run_ranks(run_put_with_signal, size, seed, backend=backend)


def run_waits_hold_up_nobody(comm: TorchComm) -> None:
    """The first wait that is issued is the last to be satisfied; other windows and operations run in the meantime."""
    peer = 1 - comm.get_rank()
    first = comm.new_window(to.symmetric_empty(8, torch.float32, comm))
    second = comm.new_window(to.symmetric_empty(8, torch.float32, comm))
    late = [first.wait_signal(peer, True) for _ in range(3)]
    x = torch.ones(100)
    comm.all_reduce(x, to.ReduceOp.SUM, True).wait()
    assert (x == 2).all()
    second.put(torch.full((8,), 5.0), peer, 0, True)
    second.signal(peer, True)
    second.wait_signal(peer, False)
    assert (second.get_tensor() == 5).all()
    assert not any(work.is_completed() for work in late)
    comm.barrier(False)
    for work in late:
        first.signal(peer, True)
        work.wait()


def test_a_wait_holds_up_nothing(pair_backend: str) -> None:
    run_ranks(run_waits_hold_up_nobody, 2, backend=pair_backend)


def run_views(comm: TorchComm, seed: int) -> None:
    """Windows on parts of one allocation, at another offset on each rank."""
    rank, size = comm.get_rank(), comm.get_size()
    arena = to.symmetric_empty(10 * COUNT, torch.float32, comm)
    arena.fill_(99)
    here = arena[rank * COUNT : (rank + 2) * COUNT].view(2, COUNT)
    window = comm.new_window(here)
    again = comm.new_window(arena)
    x = random_like(COUNT, torch.float32, seed + rank)
    window.put(x, (rank + 1) % size, COUNT, False)
    window.signal((rank + 1) % size, False)
    window.wait_signal((rank - 1) % size, False)
    assert torch.equal(here[1], random_like(COUNT, torch.float32, seed + (rank - 1) % size))
    expected = torch.full_like(arena, 99)
    expected[(rank + 1) * COUNT : (rank + 2) * COUNT] = here[1]
    assert torch.equal(arena, expected)
    assert torch.equal(again.map_remote_tensor(rank), arena)
    again.tensor_deregister()
    window.tensor_deregister()


def test_views_and_several_windows_on_one_allocation(backend: str, size: int, seed: int) -> None:
    run_ranks(run_views, size, seed, backend=backend)


def run_life(comm: TorchComm) -> None:
    peer = (comm.get_rank() + 1) % comm.get_size()
    window = comm.new_window()
    assert "without a tensor" in repr(window)
    buffer = to.symmetric_empty(4, torch.int32, comm)
    window.tensor_register(buffer, owning=False)
    assert window.get_tensor() is buffer
    assert copy.copy(window) is window
    assert copy.deepcopy({"w": window})["w"] is window
    assert to.get_window(window.get_name()) is window
    assert window.get_comm() is comm
    window.put(torch.full((2,), 7, dtype=torch.int32), peer_rank=peer, target_offset_nelems=2, async_op=False)
    window.signal(peer_rank=peer, async_op=False)
    window.wait_signal(peer_rank=(comm.get_rank() - 1) % comm.get_size(), async_op=False)
    assert buffer.tolist() == [0, 0, 7, 7]
    window.put(torch.empty(0, dtype=torch.int32), peer, 4, False)  # no elements, at the very end
    del buffer
    with pytest.raises(to.StateError, match=r"get_tensor: expected a tensor that its owner keeps.*owning=True"):
        window.get_tensor()
    window.tensor_deregister()
    # Again, with another size; and once with only signals.
    window.tensor_register(to.symmetric_empty((3, 5), torch.float32, comm))
    assert window.shape == (3, 5)
    window.tensor_deregister()
    window.tensor_register(to.symmetric_empty(0, torch.float32, comm))
    window.signal(peer, False)
    window.wait_signal((comm.get_rank() - 1) % comm.get_size(), False)
    assert window.get_size() == 0
    assert window.map_remote_tensor(peer).shape == (0,)
    window.tensor_deregister()
    name = window.get_name()
    del window
    with pytest.raises(to.InvalidValueError, match="get_window: expected the name of a live window"):
        to.get_window(name)


def test_the_life_of_a_window(backend: str, size: int) -> None:
    run_ranks(run_life, size, backend=backend)


def run_empty(comm: TorchComm) -> None:
    """A put of no elements moves nothing, and its signal arrives; also past a window's end, or in an empty one."""
    rank, size = comm.get_rank(), comm.get_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (5, 0):
        window = comm.new_window(to.symmetric_empty(count, torch.float32, comm))
        window.get_tensor().fill_(7)
        comm.barrier(False)
        for offset in (0, count):
            window.put(torch.ones(0), right, offset, False, signal=True)
            window.put(torch.ones(0), right, offset, True)
            window.signal(right, True)
        for _ in range(4):
            window.wait_signal(left, True).wait()
        assert (window.get_tensor() == 7).all()
        assert window.map_remote_tensor(right).shape == (count,)
        window.tensor_deregister()


def test_puts_of_nothing(backend: str, size: int) -> None:
    run_ranks(run_empty, size, backend=backend)


def run_any_tensor(comm: TorchComm) -> None:
    """Ranks that are threads share any memory, and keep it alive for each other."""
    rank = comm.get_rank()
    window = comm.new_window(torch.full((4,), float(rank)))
    comm.barrier(False)
    other = window.map_remote_tensor(1 - rank)
    assert other.tolist() == [1.0 - rank] * 4
    del window
    comm.barrier(False)
    assert other.tolist() == [1.0 - rank] * 4


def test_threads_take_any_tensor() -> None:
    run_ranks(run_any_tensor, 2, backend="local")


def run_in_flight(comm: TorchComm) -> None:
    """tensor_deregister waits for operations in flight, on every rank."""
    rank = comm.get_rank()
    window = comm.new_window(to.symmetric_empty(1 << 20, torch.float32, comm))
    buffer = window.get_tensor()
    if rank == 0:
        wait = window.wait_signal(1, True)
    else:
        time.sleep(0.3)
        window.put(torch.ones(1 << 20), 0, 0, True)
        window.signal(0, True)
    window.tensor_deregister()
    if rank == 0:
        assert wait.is_completed()
        assert (buffer == 1).all()


def test_deregistering_waits_for_what_is_under_way(pair_backend: str) -> None:
    run_ranks(run_in_flight, 2, backend=pair_backend)


def run_hooks(comm: TorchComm) -> None:
    seen = []
    comm.register_pre_hook(lambda name, op_id, args: seen.append((name, args)))
    window = comm.new_window(to.symmetric_empty(8, torch.float32, comm))
    x = torch.ones(3)
    window.put(x, 0, 5, False)
    window.signal(0, True).wait()
    if comm.get_rank() == 0:
        for peer in range(comm.get_size()):
            window.wait_signal(peer, False)
    names = [name for name, _ in seen[:3]]
    assert names == [to.OpName.new_window, to.OpName.put, to.OpName.signal]
    put, signal = seen[1][1], seen[2][1]
    assert put.tensor is x
    assert (put.peer, put.offset, put.async_op) == (0, 5, False)
    assert (signal.peer, signal.async_op) == (0, True)
    window.tensor_deregister()


def test_hooks_see_windows(pair_backend: str) -> None:
    run_ranks(run_hooks, 2, backend=pair_backend)


def run_fake(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    buffer = to.symmetric_empty(8, torch.float32, comm)
    window = comm.new_window(buffer)
    for peer in range(size):
        window.put(torch.full((4,), 3.0), peer, 4, True).wait()
        window.signal(peer, False)
        window.wait_signal(peer, False)
        expected = "UNIFIED" if peer == rank else "SEPARATE"
        assert window.get_attr(peer).access_type.name == f"WIN_ACCESS_TYPE_{expected}"
    assert buffer.tolist() == [0.0] * 4 + [3.0] * 4
    assert torch.equal(window.map_remote_tensor(rank), buffer)
    with pytest.raises(to.UnsupportedError, match="map_remote_tensor: expected a rank whose memory") as refused:
        window.map_remote_tensor((rank + 1) % size)
    assert "put()" not in str(refused.value)  # put() is no alternative here
    window.tensor_deregister()


def test_fake_has_windows_without_peers() -> None:
    run_ranks(run_fake, 3, backend="fake")
