"""Invalid window operations raise before anything is written, and on every rank if all must know."""

import os
import time
from datetime import timedelta

import pytest
import torch

import torch_overlap as to
from torch_overlap import TorchComm
from torch_overlap.testing import run_ranks


def run_mistakes(comm: TorchComm) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    window = comm.new_window(to.symmetric_empty(8, torch.float32, comm))
    before = window.get_tensor().clone()
    x = torch.ones(4)
    mistakes = [
        (to.InvalidTypeError, r"put: expected a tensor of the window's dtype torch.float32, got torch.float64",
         lambda: window.put(x.double(), 0, 0, False)),
        (to.InvalidValueError, r"put: expected elements inside the window's 8, got 4 from offset 5 on",
         lambda: window.put(x, 0, 5, False)),
        (to.InvalidValueError, r"put: expected elements inside the window's 8, got 4 from offset -1 on",
         lambda: window.put(x, 0, -1, False)),
        (to.InvalidValueError, r"put: .* offset 9223372036854775807 on", lambda: window.put(x, 0, 2**63 - 1, False)),
        (to.InvalidValueError, rf"put: expected dst_rank in \[0, {size}\), got {size}",
         lambda: window.put(x, size, 0, False)),
        (to.InvalidValueError, r"put: expected dst_rank in \[0, ", lambda: window.put(x, -1, 0, False)),
        (to.InvalidValueError, r"put: expected a contiguous tensor", lambda: window.put(x.repeat(2)[::2], 0, 0, False)),
        (to.InvalidTypeError, r"put: expected tensor on cpu, got meta",
         lambda: window.put(torch.ones(4, device="meta"), 0, 0, False)),
        (to.InvalidTypeError, r"put: expected dst_rank \(also called peer_rank\) once, got none",
         lambda: window.put(x, offset=0, async_op=False)),
        (to.InvalidTypeError, r"put: expected offset \(also called target_offset_nelems\) once, got it twice",
         lambda: window.put(x, 0, 0, False, target_offset_nelems=0)),
        (to.InvalidValueError, r"put: expected a part of the own window that shares no memory",
         lambda: window.put(window.get_tensor()[:4], rank, 2, False)),
        (to.InvalidValueError, rf"signal: expected dst_rank in \[0, {size}\), got {size}",
         lambda: window.signal(size, False)),
        (to.InvalidTypeError, r"signal: expected dst_rank .* once, got none", lambda: window.signal(async_op=False)),
        (to.InvalidValueError, rf"wait_signal: expected peer_rank in \[0, {size}\)",
         lambda: window.wait_signal(size, False)),
        (to.InvalidValueError, "is_high_priority_stream",
         lambda: window.put(x, 0, 0, False, {"is_high_priority_stream": "perhaps"})),
        (to.InvalidValueError, "is_high_priority_stream",
         lambda: window.wait_signal(0, False, {"is_high_priority_stream": "perhaps"})),
        (to.InvalidValueError, "signal: expected a timeout >= 0",
         lambda: window.signal(0, False, timeout=timedelta(seconds=-1))),
        (to.InvalidValueError, rf"map_remote_tensor: expected rank in \[0, {size}\)",
         lambda: window.map_remote_tensor(size)),
        (to.InvalidValueError, rf"get_attr: expected peer_rank in \[0, {size}\)", lambda: window.get_attr(size)),
        (to.InvalidValueError, r"symmetric_empty: expected sizes >= 0", lambda: to.symmetric_empty(-1, None, comm)),
        (to.InvalidValueError, r"symmetric_empty: expected sizes whose bytes can be counted",
         lambda: to.symmetric_empty([2**40, 2**40], None, comm)),
        (to.UnsupportedError, r"get_mem_allocator: .* use torch_overlap.symmetric_empty",
         lambda: comm.get_mem_allocator()),
        (to.UnsupportedError, r"get_mem_allocator: .* use torch_overlap.symmetric_empty",
         lambda: comm.mem_allocator),
    ]  # fmt: skip
    for error, message, call in mistakes:
        with pytest.raises(error, match=message):
            call()
    comm.barrier(False)
    assert torch.equal(window.get_tensor(), before)
    empty = comm.new_window()
    without = [
        ("put", lambda: empty.put(x, 0, 0, False)),
        ("signal", lambda: empty.signal(0, False)),
        ("wait_signal", lambda: empty.wait_signal(0, False)),
        ("map_remote_tensor", lambda: empty.map_remote_tensor(0)),
        ("get_attr", lambda: empty.get_attr(0)),
        ("get_size", empty.get_size),
        ("get_tensor", empty.get_tensor),
        ("dtype", lambda: empty.dtype),
        ("shape", lambda: empty.shape),
        ("tensor_deregister", empty.tensor_deregister),
    ]
    for name, call in without:
        with pytest.raises(to.StateError, match=f"{name}: expected a window with a tensor.*tensor_register"):
            call()
    with pytest.raises(to.StateError, match="tensor_register: expected a window without a tensor"):
        window.tensor_register(before)
    # The window stays usable.
    window.put(x, rank, 0, False)
    assert (window.get_tensor()[:4] == 1).all()
    window.tensor_deregister()


@pytest.mark.parametrize(("which", "ranks"), [("gloo", 2), ("local", 3)])
def test_mistakes(which: str, ranks: int) -> None:
    run_ranks(run_mistakes, ranks, backend=which)


def run_one_rank_is_wrong(comm: TorchComm) -> None:
    """Every rank gets the error of the rank at fault; the communicator stays usable."""
    rank = comm.get_rank()
    good = to.symmetric_empty(8, torch.float32, comm)
    wrong = {
        r"expected a contiguous tensor": good[::2],
        r"expected tensor on cpu, got meta": torch.ones(8, device="meta"),
        r"memory of the same size on all ranks, got 32 bytes on rank 0 and 64 on rank 1":
            to.symmetric_empty(16, torch.float32, comm),
        r"the same on all ranks, got a tensor of torch.float32 on rank 0 and a tensor of torch.int32 on rank 1":
            to.symmetric_empty(8, torch.int32, comm),
    }  # fmt: skip
    for message, tensor in wrong.items():
        with pytest.raises(to.Error, match=f"tensor_register: .*{message}"):
            comm.new_window(tensor if rank == 1 else good)

    def refuse(*_: object) -> None:
        raise RuntimeError("not with me")

    if rank == 1:
        hook = comm.register_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="not with me"):
        comm.new_window(good)
    if rank == 1:
        hook.remove()
    window = comm.new_window(good)
    window.tensor_deregister()


def test_the_error_of_one_rank_is_everybodys(pair_backend: str) -> None:
    run_ranks(run_one_rank_is_wrong, 2, backend=pair_backend)


def run_private_memory(comm: TorchComm) -> None:
    own = torch.ones(8) if comm.get_rank() == 1 else to.symmetric_empty(8, torch.float32, comm)
    message = "rank 0, which cannot reach that of rank 1: the memory of rank 1 is private to its process; make the"
    with pytest.raises(to.UnsupportedError, match=message):
        comm.new_window(own)


def test_private_memory_names_the_rank_and_the_way_out() -> None:
    run_ranks(run_private_memory, 2, backend="gloo")


def run_rank_that_does_not_come(comm: TorchComm) -> None:
    rank = comm.get_rank()
    child = comm.split([0, 1])
    assert child is not None
    if rank == 0:
        child.set_timeout(timedelta(seconds=1))
        begin = time.monotonic()
        with pytest.raises(to.OperationTimeoutError, match=r"window memory #0.* got none of ranks \[1\]"):
            child.new_window(to.symmetric_empty(8, torch.float32, comm))
        assert time.monotonic() - begin < 1 + 30
    comm.barrier(False)
    child.abort()


def test_a_rank_that_does_not_come_is_named(pair_backend: str) -> None:
    run_ranks(run_rank_that_does_not_come, 2, backend=pair_backend)


def run_signal_that_does_not_come(comm: TorchComm, async_op: bool) -> None:
    rank = comm.get_rank()
    child = comm.split([0, 1])
    assert child is not None
    window = child.new_window(to.symmetric_empty(8, torch.float32, comm))
    if rank == 1:
        window.signal(0, False)
    comm.barrier(False)
    if rank == 0:
        window.wait_signal(1, False)
        begin = time.monotonic()
        expected = r"wait_signal #\d+ on .*: expected signal 2 of rank 1 in window '.*/window_0' within 500 ms, got 1;"
        with pytest.raises(to.OperationTimeoutError, match=expected):
            window.wait_signal(1, async_op, timeout=timedelta(seconds=0.5)).wait()
        assert 0.4 < time.monotonic() - begin < 0.5 + 30
        with pytest.raises(to.StateError, match="wait_signal"):
            window.put(torch.ones(1), 0, 0, False)
    comm.barrier(False)  # the parent stays usable
    child.abort()


@pytest.mark.parametrize("async_op", [False, True])
def test_a_signal_that_does_not_come(pair_backend: str, async_op: bool) -> None:
    run_ranks(run_signal_that_does_not_come, 2, async_op, backend=pair_backend)


def run_abort_ends_waits(comm: TorchComm) -> None:
    child = comm.split([0, 1])
    assert child is not None
    window = child.new_window(to.symmetric_empty(8, torch.float32, comm))
    waits = [window.wait_signal(comm.get_rank(), True) for _ in range(3)]  # its own: a departed peer is another error
    child.abort()
    for work in waits:
        with pytest.raises(to.StateError, match=r"wait_signal.*failed or was aborted|wait_signal.*not run"):
            work.wait()
    window.tensor_deregister()  # not collective
    with pytest.raises(to.StateError):
        child.new_window(to.symmetric_empty(8, torch.float32, comm))


def test_an_abort_ends_waits(pair_backend: str) -> None:
    run_ranks(run_abort_ends_waits, 2, backend=pair_backend)


def run_deregister_in_vain(comm: TorchComm) -> None:
    """An operation that does not end within the timeout is an error on every rank."""
    child = comm.split([0, 1])
    assert child is not None
    window = child.new_window(to.symmetric_empty(8, torch.float32, comm))
    comm.barrier(False)
    if comm.get_rank() == 0:
        child.set_timeout(timedelta(seconds=2))
        window.wait_signal(1, True, timeout=timedelta(seconds=100))
    begin = time.monotonic()
    with pytest.raises(to.OperationTimeoutError, match=r"tensor_deregister: .*to end within 2000 ms"):
        window.tensor_deregister()
    assert time.monotonic() - begin < 3 * 2 + 30
    comm.barrier(False)
    child.abort()


def test_deregistering_is_bounded_in_time(pair_backend: str) -> None:
    run_ranks(run_deregister_in_vain, 2, backend=pair_backend)


def run_deregister_when_broken(comm: TorchComm) -> None:
    """A survivor releases its memory at once, and does not wait for ranks that may have died."""
    child = comm.split([0, 1])
    assert child is not None
    window = child.new_window(to.symmetric_empty(8, torch.float32, comm))
    if comm.get_rank() == 0:
        with pytest.raises(to.OperationTimeoutError):
            window.wait_signal(1, False, timeout=timedelta(seconds=0.3))
        begin = time.monotonic()
        window.tensor_deregister()
        assert time.monotonic() - begin < 30  # its timeout is minutes
        assert "without a tensor" in repr(window)
    comm.barrier(False)
    child.abort()


def test_deregistering_asks_nobody_once_the_communicator_is_broken(pair_backend: str) -> None:
    run_ranks(run_deregister_when_broken, 2, backend=pair_backend)


def run_register_memory(comm: TorchComm) -> None:
    x = torch.ones(8)
    comm.tensor_register(x)
    with pytest.raises(to.StateError, match="tensor_register: expected memory that is not registered"):
        comm.tensor_register(x)
    with pytest.raises(to.StateError, match="tensor_deregister: expected a tensor that was registered"):
        comm.tensor_deregister(torch.ones(8))
    comm.tensor_deregister(x)
    with pytest.raises(to.InvalidValueError, match="tensor_register: expected a contiguous tensor"):
        comm.tensor_register(torch.ones(4, 4).t())


def test_registered_memory_is_checked(pair_backend: str) -> None:
    run_ranks(run_register_memory, 2, backend=pair_backend)


def run_unreachable(comm: TorchComm) -> None:
    pretence = to._C._PretendUnreachable()
    message = (
        r"^tensor_register: expected ranks that can reach each other's memory, got rank 0, which cannot reach that of "
        r"rank 1: ranks pretend that peers' memory is unreachable$"
    )
    with pytest.raises(to.UnsupportedError, match=message):
        comm.new_window(to.symmetric_empty(8, torch.float32, comm))
    comm.barrier(False)
    del pretence
    comm.barrier(False)
    comm.new_window(to.symmetric_empty(8, torch.float32, comm)).tensor_deregister()


def test_ranks_that_cannot_reach_each_other(pair_backend: str) -> None:
    run_ranks(run_unreachable, 2, backend=pair_backend)


def run_python_backend(rank: int, size: int, store: object) -> None:
    class Nothing(to.TorchCommBackend):
        pass

    to.register_backend("nothing_with_windows", Nothing)
    comm = to.new_comm("nothing_with_windows", "cpu", "w", store=store, rank=rank, size=size)
    with pytest.raises(to.UnsupportedError, match="new_window: expected a backend with windows for cpu"):
        comm.new_window(torch.ones(8))
    comm.finalize()


def test_python_backends_have_none() -> None:
    run_ranks(run_python_backend, 1, comm=False)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run_leaves_nothing(comm: TorchComm) -> None:
    """Numbers of descriptors, mappings and store keys: the same after a hundred windows as after five."""

    def use() -> None:
        window = comm.new_window(to.symmetric_empty(1000, torch.float32, comm))
        window.signal(1 - comm.get_rank(), True)
        window.wait_signal(1 - comm.get_rank(), True)
        window.tensor_deregister()

    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum("torch_overlap" in line and "memfd" in line for line in maps)

    def settled(most: tuple[int, int], seconds: int) -> tuple[int, int]:
        """Waits, because the thread that ran an operation may hold its memory for a moment after the end."""
        for _ in range(50 * seconds):
            now = open_descriptors(), mappings()
            if now[0] <= most[0] and now[1] <= most[1]:
                break
            time.sleep(0.02)
        return now

    for _ in range(5):
        use()
    comm.barrier(False)
    before = settled((0, 0), 2)
    for _ in range(100):
        use()
    comm.barrier(False)
    after = settled(before, 60)
    assert after[0] <= before[0]
    assert after[1] <= before[1]


def test_windows_leave_nothing_behind() -> None:
    run_ranks(run_leaves_nothing, 2, backend="gloo")


def run_reconfigure(rank: int, size: int, store: object) -> None:
    """A registration belongs to the members of its time; the present ones register again."""
    comm = to.new_comm(
        "gloo", "cpu", "regrouped", store=store, rank=rank, size=size, enable_reconfigure=True,
        abort_process_on_timeout_or_error=False, timeout=timedelta(seconds=60),
    )  # fmt: skip
    window = comm.new_window(to.symmetric_empty(8, torch.float32, comm))
    waiting = window.wait_signal(1 - rank, True)
    handles: list[str] = [""] * size
    to.objcol.all_gather_object(comm, handles, comm.get_init_handle())
    comm.reconfigure(1, handles)
    with pytest.raises(to.Error):
        waiting.wait()
    for call in (lambda: window.signal(1 - rank, False), lambda: window.map_remote_tensor(0)):
        with pytest.raises(to.StateError, match="expected a tensor that the communicator's present members"):
            call()
    window.tensor_deregister()  # not collective
    window.tensor_register(to.symmetric_empty(8, torch.float32, comm))
    window.signal(1 - rank, False)
    window.wait_signal(1 - rank, False)
    window.tensor_deregister()
    comm.finalize()


def test_windows_after_reconfigure() -> None:
    run_ranks(run_reconfigure, 2, comm=False)
