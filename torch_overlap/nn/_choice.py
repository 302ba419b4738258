"""Which way a fused operator takes for given shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch_overlap._C import TorchComm, UnsupportedError
from torch_overlap.ops._arguments import group

SEQUENTIAL = "sequential"
# As in ops/chunking.cpp and ops/matmul_all_reduce.cpp.
_MIN_CHUNK_ROWS = 256
_ALL_REDUCE_CHUNKS = 4


@dataclass(frozen=True)
class Choice:
    """The algorithm that an operator takes, and why."""

    algorithm: str
    reason: str


def explain(op: str, shapes: Sequence[Sequence[int]], comm: TorchComm, *, algorithm: str = "auto") -> Choice:
    """The choice of `op` for operands of `shapes`: that of x, then those of the weights. Sends nothing."""
    if algorithm != "auto":
        return Choice(algorithm, "it was asked for")
    rows, size = math.prod(shapes[0][:-1]), group(comm)[1]
    chunks = {"all_gather_matmul": 1, "matmul_reduce_scatter": size, "matmul_all_reduce": _ALL_REDUCE_CHUNKS}[op]
    if size > 1 and rows // chunks >= _MIN_CHUNK_ROWS:
        return Choice("chunked", f"its chunks have {rows // chunks} rows")
    return Choice(SEQUENTIAL, f"its chunks have {rows // chunks} rows, and overlap pays from {_MIN_CHUNK_ROWS} on")


def require_fused(who: str, op: str, shapes: Sequence[Sequence[int]], comm: TorchComm, algorithm: str) -> None:
    """Raises where `op` would communicate and multiply one after the other. One rank communicates with nobody.

    Raises:
        UnsupportedError: naming the operator, its shapes and the reason.
    """
    choice = explain(op, shapes, comm, algorithm=algorithm)
    if group(comm)[1] > 1 and choice.algorithm == SEQUENTIAL:
        listed = ", ".join(str(list(shape)) for shape in shapes)
        raise UnsupportedError(
            f"{who}: expected an overlapped {op} (require_fused=True), got '{SEQUENTIAL}' for operands {listed}: "
            f"{choice.reason}; give it more rows, another algorithm, or require_fused=False"
        )
