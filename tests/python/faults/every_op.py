"""Every operation of a communicator, issued such that a loop over it always needs the victim: used by the fault
tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch

import torch_overlap as to


class Waitable(Protocol):
    """Methods of a TorchWork that the tests use."""

    def wait(self) -> None: ...
    def wait_blocking(self) -> None: ...


class StreamWork:
    """Work of an operation that blocks the host or is ordered by the current stream: waits for that stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def wait(self) -> None:
        pass

    def wait_blocking(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


Issue = Callable[..., Waitable]

RECONFIGURE_SECONDS = 3.0


def timeout_of(name: str, seconds: float) -> float:
    """Returns the timeout of an operation if the communicator's is `seconds`. reconfigure gets more: it makes
    connections."""
    return max(seconds, RECONFIGURE_SECONDS) if name == "reconfigure" else seconds


def operation(comm: to.TorchComm, name: str, victim: int, numel: int = 4096) -> Issue:
    """Returns a function of (async_op, **options) that issues the operation on this rank.

    Roots are chosen so that ranks wait for `victim`: it is the root of operations that send from a root, and sends
    to the root of those that collect at one. The operations of WITHOUT_OPTIONS block, and use the communicator's
    timeout. reconfigure needs a communicator that was made with enable_reconfigure.
    """
    if name in ONE_SIDED:
        return one_sided(comm, name, victim, numel)
    if name == "reconfigure":
        return reconfigure(comm)
    if name in WITHOUT_OPTIONS:
        return without_options(comm, name, numel)
    rank, size, device = comm.get_rank(), comm.get_size(), comm.get_device()
    others = [r for r in range(size) if r != victim]
    other_root = others[0]

    def one() -> torch.Tensor:
        return torch.ones(numel, device=device)

    def make_tensors() -> list[torch.Tensor]:
        return [one() for _ in range(size)]

    x, flat, parts, outs = one(), torch.ones(numel * size, device=device), make_tensors(), make_tensors()
    out = torch.ones(numel * size, device=device)
    add = to.ReduceOp.SUM

    def batch(async_op: bool, **options: object) -> to.TorchWork:
        ops = comm.batch_op_create()
        for peer in others if rank == victim else [victim]:
            ops.send(x, peer)
            ops.recv(outs[peer], peer)
        return ops.issue(async_op, **options)  # type: ignore[arg-type]

    def with_victim(victim_sends: bool) -> Issue:
        def issue(async_op: bool, **options: object) -> to.TorchWork:
            if rank != victim:
                call = comm.recv if victim_sends else comm.send
                return call(x, victim, async_op, **options)  # type: ignore[arg-type]
            ops = comm.batch_op_create()
            for peer in others:
                ops.send(x, peer) if victim_sends else ops.recv(outs[peer], peer)
            return ops.issue(async_op, **options)  # type: ignore[arg-type]

        return issue

    splits = [numel] * size
    table: dict[str, Issue] = {
        "send": with_victim(False),
        "recv": with_victim(True),
        "broadcast": lambda a, **o: comm.broadcast(x, victim, a, **o),
        "all_reduce": lambda a, **o: comm.all_reduce(x, add, a, **o),
        "reduce": lambda a, **o: comm.reduce(x, other_root, add, a, **o),
        "all_gather": lambda a, **o: comm.all_gather(outs, x, a, **o),
        "all_gather_v": lambda a, **o: comm.all_gather_v(outs, x, a, **o),
        "all_gather_single": lambda a, **o: comm.all_gather_single(out, x, a, **o),
        "reduce_scatter": lambda a, **o: comm.reduce_scatter(x, parts, add, a, **o),
        "reduce_scatter_v": lambda a, **o: comm.reduce_scatter_v(x, parts, add, a, **o),
        "reduce_scatter_single": lambda a, **o: comm.reduce_scatter_single(x, flat, add, a, **o),
        "all_to_all": lambda a, **o: comm.all_to_all(outs, parts, a, **o),
        "all_to_all_single": lambda a, **o: comm.all_to_all_single(out, flat, a, **o),
        "all_to_all_v_single": lambda a, **o: comm.all_to_all_v_single(out, flat, splits, splits, a, **o),
        "barrier": lambda a, **o: comm.barrier(a, **o),
        "scatter": lambda a, **o: comm.scatter(x, parts if rank == victim else [], victim, a, **o),
        "gather": lambda a, **o: comm.gather(outs if rank == other_root else [], x, other_root, a, **o),
        "gather_single": lambda a, **o: comm.gather_single(out if rank == other_root else None, x, other_root, a, **o),
        "batch_op_issue": batch,
    }
    return table[name]


def one_sided(comm: to.TorchComm, name: str, victim: int, numel: int) -> Issue:
    """Every other rank and the victim, in turns: `name` is the first operation of a rank of the others.

    A put and a signal complete even if nobody waits for them, so an answer of the victim is waited for.
    """
    rank, size = comm.get_rank(), comm.get_size()
    buffer = to.symmetric_empty(numel * size, torch.float32, comm)
    window = comm.new_window(buffer)
    x = torch.ones(numel, device=comm.get_device())
    peers = [r for r in range(size) if r != victim] if rank == victim else [victim]

    def tell(peer: int, **options: object) -> None:
        if name == "put":
            window.put(x, peer, numel * rank, True, **options)  # type: ignore[arg-type]
        window.signal(peer, True, **options)  # type: ignore[arg-type]

    def issue(async_op: bool, **options: object) -> Waitable:
        is_first = (rank == victim) == (name == "wait_signal")
        if is_first:
            for peer in peers:
                tell(peer, **options)
        works = [window.wait_signal(peer, async_op, **options) for peer in peers]  # type: ignore[arg-type]
        for work in works:
            work.wait()
        if not is_first:
            for peer in peers:
                tell(peer, **options)
        return works[-1]

    return issue


def without_options(comm: to.TorchComm, name: str, numel: int) -> Issue:
    size, device = comm.get_size(), comm.get_device()
    buffer = to.symmetric_empty(numel, torch.float32, comm) if name == "new_window" else torch.ones(numel)
    x = torch.ones(numel, device=device)
    # GPUs: operands for which there is a fused kernel. CPUs: few elements.
    rows, k, dtype = (128 * size, 512, torch.bfloat16) if device.type == "cuda" else (8 * size, 16, torch.float32)
    left, right, wide = (torch.ones(shape, dtype=dtype, device=device) for shape in ((rows, k), (k, k), (k, k * size)))

    def split() -> None:
        part = comm.split(list(range(size)))
        assert part is not None
        part.abort()  # finalize() would wait once more

    def new_window() -> None:
        comm.new_window(buffer)  # released at once

    def finalize() -> None:
        part = comm.split(list(range(size)))
        assert part is not None
        part.finalize()

    table: dict[str, Callable[[], object]] = {
        "split": split,
        "new_window": new_window,
        "finalize": finalize,
        "ops.all_reduce": lambda: to.ops.all_reduce(x, comm),
        "ops.matmul_reduce_scatter": lambda: to.ops.matmul_reduce_scatter(left, right, comm),
        "ops.all_gather_matmul": lambda: to.ops.all_gather_matmul(left, [right], comm),
        "ops.matmul_all_reduce": lambda: to.ops.matmul_all_reduce(left, right, comm),
        "ops.all_to_all_matmul": lambda: to.ops.all_to_all_matmul(left, wide, comm),
        "ops.matmul_all_to_all": lambda: to.ops.matmul_all_to_all(left, [left], comm),
    }
    call, done = table[name], StreamWork(device)

    def issue(async_op: bool) -> Waitable:
        call()
        return done

    return issue


def reconfigure(comm: to.TorchComm) -> Issue:
    """Reconfigures a child, so that the communicator itself can be formed again without the victim."""
    part = comm.split(list(range(comm.get_size())))
    assert part is not None
    handles: list[str] = [""] * comm.get_size()
    to.objcol.all_gather_object(comm, handles, part.get_init_handle())
    uuids = itertools.count(1)
    done = StreamWork(comm.get_device())

    def issue(async_op: bool) -> Waitable:
        seconds = timeout_of("reconfigure", comm.get_options().timeout.total_seconds())
        part.reconfigure(next(uuids), handles, timeout=timedelta(seconds=seconds))
        return done

    return issue


ONE_SIDED = ("put", "signal", "wait_signal")
WITHOUT_OPTIONS = (
    "split", "new_window", "finalize", "reconfigure", "ops.all_reduce", "ops.matmul_reduce_scatter",
    "ops.all_gather_matmul", "ops.matmul_all_reduce", "ops.all_to_all_matmul", "ops.matmul_all_to_all",
)  # fmt: skip
NAMES = (
    "send", "recv", "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_v", "all_gather_single",
    "reduce_scatter", "reduce_scatter_v", "reduce_scatter_single", "all_to_all", "all_to_all_single",
    "all_to_all_v_single", "barrier", "scatter", "gather", "gather_single", "batch_op_issue",
    *ONE_SIDED, *WITHOUT_OPTIONS,
)  # fmt: skip
