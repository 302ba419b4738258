"""Collectives alone: TorchComm's, and the libraries'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_overlap as to
from torch_overlap.bench.cases import FP8, Case
from torch_overlap.bench.libraries import Arena, Libraries, Library
from torch_overlap.bench.problem import DTYPES, Call, Problem, add_torch_all_reduces, having
from torch_overlap.bench.ranks import Ranks

# Which of TorchComm's own kernels a call takes; "off" is NCCL. Other algorithms that are asked for are values of it.
HINT = "direct_collectives"


def collective(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> Problem:
    """all_reduce in place; the others from one tensor into another."""
    problem, comm, tp, op = Problem(case), ranks.comm, ranks.size, case.op
    dtype = torch.uint8 if case.dtype in FP8 else DTYPES[case.dtype]
    count, sets = case.shape[0] // dtype.itemsize, min(case.sets(tp), case.calls(tp))
    inputs = count // tp if op == "all_gather" else count
    outputs = {"all_gather": count, "reduce_scatter": count // tp, "all_to_all": count, "all_reduce": 0}[op]
    fresh = torch.randn(sets, inputs, dtype=torch.float32, device=ranks.device).to(dtype)

    def buffers(memory: Any) -> tuple[Tensor, Tensor, Callable[[], object] | None]:
        x = memory.empty((sets, inputs), dtype).copy_(fresh)
        out = memory.empty((sets, outputs), dtype) if outputs else x
        return x, out, (lambda: x.copy_(fresh)) if op == "all_reduce" else None

    # Ours are measured on plain tensors.
    plain_x, plain_out, before = buffers(libraries.plain)

    def ours(i: int, hints: dict[str, str] | None) -> Tensor:
        x, out = plain_x[i % sets], plain_out[i % sets]
        if op == "all_reduce":
            comm.all_reduce(x, to.ReduceOp.SUM, async_op=False, hints=hints)
        elif op == "all_gather":
            comm.all_gather_single(out, x, async_op=False, hints=hints)
        elif op == "reduce_scatter":
            comm.reduce_scatter_single(out, x, to.ReduceOp.SUM, async_op=False, hints=hints)
        else:
            comm.all_to_all_single(out, x, async_op=False, hints=hints)
        return out

    for name in wanted or ("auto", "plain"):
        hints = None if name == "auto" else {HINT: "off" if name == "plain" else name}
        problem.add(name, "ours", partial(ours, hints=hints), before)

    for library in having(problem, libraries, op):
        x, out, again = (plain_x, plain_out, before) if library is libraries.plain else buffers(library)
        problem.add(library.name, "peer", partial(_library_call, library, op, x, out, sets), again)

    def source(arena: Arena) -> tuple[Call, Callable[[], object] | None]:
        x, _, again = buffers(arena)
        return (lambda i: x[i % sets]), again

    if op == "all_reduce":
        add_torch_all_reduces(problem, libraries, case.shape[0], source)
    return problem


def _library_call(library: Library, op: str, x: Tensor, out: Tensor, sets: int, i: int) -> Tensor:
    source, target = x[i % sets], out[i % sets]
    if op == "all_reduce":
        library.all_reduce(source)
        return source
    getattr(library, op)(target, source)
    return target
