"""Every operation of a communicator, so that a loop over it always needs the victim: what the fault tests issue."""

from __future__ import annotations

from collections.abc import Callable

import torch

import torch_overlap as to

Issue = Callable[..., to.TorchWork]


def operation(comm: to.TorchComm, name: str, victim: int, numel: int = 4096) -> Issue:
    """A function of (async_op, **options) that issues the operation on this rank.

    Roots are chosen so that ranks wait for `victim`: it is the root of what comes from a root, and owes something to
    the root of what goes to one.
    """
    rank, size, device = comm.get_rank(), comm.get_size(), comm.get_device()
    others = [r for r in range(size) if r != victim]
    away = others[0]

    def one() -> torch.Tensor:
        return torch.ones(numel, device=device)

    def many() -> list[torch.Tensor]:
        return [one() for _ in range(size)]

    x, flat, parts, outs = one(), torch.ones(numel * size, device=device), many(), many()
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
        "reduce": lambda a, **o: comm.reduce(x, away, add, a, **o),
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
        "gather": lambda a, **o: comm.gather(outs if rank == away else [], x, away, a, **o),
        "gather_single": lambda a, **o: comm.gather_single(out if rank == away else None, x, away, a, **o),
        "batch_op_issue": batch,
    }
    return table[name]


NAMES = (
    "send", "recv", "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_v", "all_gather_single",
    "reduce_scatter", "reduce_scatter_v", "reduce_scatter_single", "all_to_all", "all_to_all_single",
    "all_to_all_v_single", "barrier", "scatter", "gather", "gather_single", "batch_op_issue",
)  # fmt: skip
