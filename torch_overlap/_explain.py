"""Which algorithm a fused operator would take, and why."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_overlap import _C, ops

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """What `op` would do for the arguments: the algorithm, and why that one."""

    op: str
    algorithm: str
    why: str

    def __str__(self) -> str:
        return f"{self.op}: {self.algorithm} ({self.why})"


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """What `torch_overlap.ops.<op>(*args, **kwargs)` would do: its algorithm, and why that one.

    Local: nothing is computed or sent, and tensors on the meta device will do. Until the first call has tried, ranks
    are taken to reach each other's memory.

    Args:
        op: "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce".

    Raises:
        InvalidValueError: `op` is another one.
        UnsupportedError: the algorithm that the arguments ask for cannot be.
    """
    if op not in _EXPLAINED:
        raise _C.InvalidValueError(f"explain: expected op to be one of {', '.join(_EXPLAINED)}, got {op!r}")
    bound = inspect.signature(getattr(ops, op)).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given["algorithm"] == "bulk":
        return Explanation(op, "sequential", "bulk hides the communication of gradients, and a forward pass has none")
    algorithm, why = _EXPLAINED[op](given)
    return Explanation(op, algorithm, why)


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def _all_gather_matmul(given: dict[str, Any]) -> tuple[str, str]:
    x, comm = given["x"], given["comm"]
    return _C._explain_algorithm(
        "all_gather_matmul", given["algorithm"], comm, x.dtype, _rows(x), x.nbytes * comm.get_size(), 0
    )


def _matmul_reduce_scatter(given: dict[str, Any]) -> tuple[str, str]:
    x, comm = given["x"], given["comm"]
    rows = _rows(x)
    room = 2 * rows * given["weight"].shape[0] * x.element_size()
    return _C._explain_algorithm(
        "matmul_reduce_scatter", given["algorithm"], comm, x.dtype, rows // comm.get_size(), 0, room
    )


def _matmul_all_reduce(given: dict[str, Any]) -> tuple[str, str]:
    return _C._explain_all_reduce(given["algorithm"], given["comm"], _rows(given["x"]))


_EXPLAINED = {
    "all_gather_matmul": _all_gather_matmul,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "matmul_all_reduce": _matmul_all_reduce,
}
