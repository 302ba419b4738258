"""Calls of every operation of a communicator."""

from __future__ import annotations

from typing import Any

import torch

from torch_overlap import ReduceOp, TorchComm

LARGE = 1 << 16  # elements: more than a transport sends before the peer asks for them


def arguments(comm: TorchComm) -> dict[str, tuple[Any, ...]]:
    """Returns the arguments before async_op of every operation in two ranks. Roots and peers are such that rank 0
    waits for rank 1."""
    x, peer = torch.ones(LARGE, device=comm.get_device()), 1 - comm.get_rank()
    rows, flat = [x.clone() for _ in range(2)], x.repeat(2)
    p2p = [("send", (x, peer)), ("recv", (x.clone(), peer))]
    return {
        **dict(p2p if peer else reversed(p2p)),
        "broadcast": (x, 1), "all_reduce": (x, ReduceOp.SUM), "reduce": (x, 0, ReduceOp.SUM), "barrier": (),
        "all_gather": (rows, x), "all_gather_v": (rows, x), "all_gather_single": (flat, x), "gather": (rows, x, 0),
        "gather_single": (flat, x, 0), "reduce_scatter": (x, rows, ReduceOp.SUM),
        "reduce_scatter_v": (x, rows, ReduceOp.SUM), "reduce_scatter_single": (x, flat, ReduceOp.SUM),
        "scatter": (x, rows, 1), "all_to_all": (rows, [row.clone() for row in rows]),
        "all_to_all_single": (flat, flat.clone()), "all_to_all_v_single": (flat, flat.clone(), [], []),
    }  # fmt: skip
