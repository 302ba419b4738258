"""Explains which algorithm an overlapped operator would select."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_overlap import _C, ops

__all__ = ["Explanation", "explain"]

_OPS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_all_reduce_rms_norm",
    "bulk_overlap_matmul",
    "all_to_all_matmul",
    "matmul_all_to_all",
    "scaled_all_gather_matmul",
    "scaled_matmul_reduce_scatter",
    "scaled_matmul_all_reduce",
)


@dataclass(frozen=True)
class Explanation:
    """The algorithm that `op` would select for the arguments, and the reason.

    `decided_by`: "caller", "table" (shipped), "cache" (of `python -m torch_overlap tune`), or "rule" if no measurement
    exists.
    """

    op: str
    algorithm: str
    why: str
    decided_by: str = "rule"

    def __str__(self) -> str:
        return f"{self.op}: {self.algorithm} ({self.why})"


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Returns the algorithm that `torch_overlap.ops.<op>(*args, **kwargs)` would select, and the reason.

    The operator itself is asked. Local: nothing is computed or sent, and tensors on the meta device are accepted. Until
    the first call has checked it, ranks are assumed to have peer access to each other's memory, one GPU each, and the
    same cache of measured algorithms.

    Args:
        op: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_reduce_rms_norm",
            "bulk_overlap_matmul", "all_to_all_matmul", "matmul_all_to_all", "scaled_all_gather_matmul",
            "scaled_matmul_reduce_scatter" or "scaled_matmul_all_reduce".
        args: positional arguments of the operator.
        kwargs: keyword arguments of the operator.

    Raises:
        InvalidValueError: `op` is not one of these, or does not have the requested algorithm.
        UnsupportedError: the requested algorithm cannot run.
        Error: what the operator raises for invalid arguments.

    Example:
        >>> to.explain("all_gather_matmul", x, [weight], comm).algorithm  # doctest: +SKIP
        'fused'
    """
    if op not in _OPS:
        raise _C.InvalidValueError(f"explain: expected op to be one of {', '.join(_OPS)}, got {op!r}")
    function = getattr(ops, op)
    inspect.signature(function).bind(*args, **kwargs)  # names the wrong argument
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), (args, kwargs))
    with torch.no_grad():
        return Explanation(op, *_C._explain(lambda: function(*args, **kwargs)))
