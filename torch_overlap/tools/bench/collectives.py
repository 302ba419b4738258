"""Collectives without a product: TorchComm's, and other libraries'."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_overlap as to
from torch_overlap.tools.bench.cases import FP8, IN_PLACE, Case
from torch_overlap.tools.bench.libraries import Arena, Libraries, Library
from torch_overlap.tools.bench.problem import DTYPES, Call, Problem, add_torch_all_reduces, libraries_with
from torch_overlap.tools.bench.ranks import Ranks

# Hint that selects TorchComm's custom collectives; "off" means NCCL. --algorithm accepts its other values too.
HINT = "custom_collectives"
# Suffix for variants on symmetric memory that all ranks have mapped and that is registered with the communicator, as
# the peers have it.
REGISTERED = " registered"
ALGORITHMS = ("auto", "plain", "off", "always", "ll", "ll128", "simple", "two_shot", "bulk", "zero_copy")

# Inputs, outputs, and a function that restores the inputs.
_Buffers = tuple[Tensor, Tensor, Callable[[], object] | None]


class Registered:
    """Tensors of `symmetric_empty` in windows of the communicator, also registered with NCCL, until the end of a
    problem."""

    def __init__(self, ranks: Ranks) -> None:
        self._comm = ranks.comm
        self.windows: list[to.TorchCommWindow] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = to.symmetric_empty(shape, dtype, self._comm)
        self.windows.append(self._comm.new_window(tensor))
        self._comm.tensor_register(tensor)
        return tensor

    def close(self) -> None:
        for window in self.windows:
            self._comm.tensor_deregister(window.get_tensor())
            window.tensor_deregister()
        self.windows.clear()


def collective(case: Case, ranks: Ranks, libraries: Libraries, wanted: Sequence[str]) -> Problem:
    """Returns the problem of a collective. all_reduce and broadcast (from the first rank) are in place, the others out
    of place. Ours run on plain tensors and on registered ones; peers that need registered memory have it too."""
    problem, comm, tp, op = Problem(case), ranks.comm, ranks.size, case.op
    dtype = torch.uint8 if case.dtype in FP8 else DTYPES[case.dtype]
    count, sets = case.shape[0] // dtype.itemsize, min(case.sets(tp), case.calls(tp))
    inputs = count // tp if op == "all_gather" else count
    outputs = {"all_gather": count, "reduce_scatter": count // tp, "all_to_all": count}.get(op, 0)
    fresh = torch.randn(sets, inputs, dtype=torch.float32, device=ranks.device).to(dtype)

    def buffers(memory: Any) -> _Buffers:
        x = memory.empty((sets, inputs), dtype).copy_(fresh)
        out = memory.empty((sets, outputs), dtype) if outputs else x
        return x, out, (lambda: x.copy_(fresh)) if op in IN_PLACE else None

    plain = buffers(libraries.plain)

    def ours(i: int, own: _Buffers, hints: dict[str, str] | None) -> Tensor:
        x, out = own[0][i % sets], own[1][i % sets]
        if op == "all_reduce":
            comm.all_reduce(x, to.ReduceOp.SUM, async_op=False, hints=hints)
        elif op == "broadcast":
            comm.broadcast(x, 0, async_op=False, hints=hints)
        elif op == "all_gather":
            comm.all_gather_single(out, x, async_op=False, hints=hints)
        elif op == "reduce_scatter":
            comm.reduce_scatter_single(out, x, to.ReduceOp.SUM, async_op=False, hints=hints)
        else:
            comm.all_to_all_single(out, x, async_op=False, hints=hints)
        return out

    names = list(wanted or ("auto", "plain", "auto" + REGISTERED, "plain" + REGISTERED))
    registered = None
    if any(name.endswith(REGISTERED) for name in names):
        memory = Registered(ranks)
        problem.cleanups.append(memory.close)
        try:
            registered = buffers(memory)
        except to.Error as error:  # on all ranks
            problem.missing |= {name: str(error) for name in names if name.endswith(REGISTERED)}
    for name in names:
        own = registered if name.endswith(REGISTERED) else plain
        hint = name.removesuffix(REGISTERED)
        hints = None if hint == "auto" else {HINT: "off" if hint == "plain" else hint}
        if own is not None:
            tell = last_algorithm if hint == "auto" else None
            problem.add(name, "ours", partial(ours, own=own, hints=hints), own[2], tell=tell)

    for library in libraries_with(problem, libraries, op):
        x, out, reset_inputs = plain if library is libraries.plain else buffers(library)
        problem.add(library.name, "peer", partial(_library_call, library, op, x, out, sets), reset_inputs)

    def source(arena: Arena) -> tuple[Call, Callable[[], object] | None]:
        x, _, reset_inputs = buffers(arena)
        return (lambda i: x[i % sets]), reset_inputs

    if op == "all_reduce":
        add_torch_all_reduces(problem, libraries, case.shape[0], source)
    return problem


def last_algorithm() -> str:
    """Returns the algorithm of the last call from the flight recorder: "nccl", or one of our protocols. Empty if there
    is no choice."""
    entries = json.loads(to.flight_recorder.dump_json())["entries"]
    return str(entries[-1].get("algorithm") or "") if entries else ""


def _library_call(library: Library, op: str, x: Tensor, out: Tensor, sets: int, i: int) -> Tensor:
    source, target = x[i % sets], out[i % sets]
    if op in IN_PLACE:
        getattr(library, op)(source)
        return source
    getattr(library, op)(target, source)
    return target
