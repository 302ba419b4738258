"""Which algorithm a fused operator would take, and why."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_overlap import _C, ops

__all__ = ["Explanation", "explain"]

_PLAIN = ("auto", "sequential", "chunked")
# Of operators that do not have all.
_ALGORITHMS = {
    "scaled_all_gather_matmul": (*_PLAIN, "ring", "fused"),
    "scaled_matmul_reduce_scatter": (*_PLAIN, "ring", "fused"),
    "scaled_matmul_all_reduce": (*_PLAIN, "ring", "fused"),
    "bulk_overlap_matmul": (*_PLAIN, "bulk"),
    "all_to_all_matmul": (*_PLAIN, "ring"),
    "matmul_all_to_all": (*_PLAIN, "ring"),
}
# Which goes as another one.
_AS = {"matmul_all_reduce_rms_norm": "matmul_all_reduce"}


@dataclass(frozen=True)
class Explanation:
    """What `op` would do for the arguments: the algorithm, and why that one.

    `decided_by`: "caller", "table" (shipped), "cache" (of `python -m torch_overlap tune`), or "rule" where nothing was
    measured.
    """

    op: str
    algorithm: str
    why: str
    decided_by: str = "rule"

    def __str__(self) -> str:
        return f"{self.op}: {self.algorithm} ({self.why})"


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """What `torch_overlap.ops.<op>(*args, **kwargs)` would do: its algorithm, and why that one.

    Local: nothing is computed or sent, and tensors on the meta device will do. Until the first call has tried, ranks
    are taken to reach each other's memory, to have a GPU each, and to have the same cache of measured algorithms.

    Args:
        op: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_reduce_rms_norm" (as
            the one before), "bulk_overlap_matmul", "all_to_all_matmul", "matmul_all_to_all",
            "scaled_all_gather_matmul", "scaled_matmul_reduce_scatter" or "scaled_matmul_all_reduce".

    Raises:
        InvalidValueError: `op` is another one, or does not know the algorithm.
        UnsupportedError: the algorithm that the arguments ask for cannot be.
    """
    if op not in _EXPLAINED:
        raise _C.InvalidValueError(f"explain: expected op to be one of {', '.join(_EXPLAINED)}, got {op!r}")
    bound = inspect.signature(getattr(ops, op)).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    algorithm, known = given["algorithm"], _ALGORITHMS.get(op)
    if known and algorithm not in known:
        raise _C.InvalidValueError(f"{op}: expected algorithm to be one of {' '.join(known)}, got {algorithm!r}")
    if op != "bulk_overlap_matmul" and algorithm == "bulk":
        why = "bulk hides the communication of gradients, and a forward pass has none"
        return Explanation(op, "sequential", why, "caller")
    taken, why, by = _C._explain_algorithm(_AS.get(op, op), algorithm, given["comm"], **_EXPLAINED[op](given))
    if op in _AS and taken == "direct" and algorithm == "auto":
        why = "what was measured as the quickest is the sum without the norm, which this has in its kernel"
        return Explanation(op, "sequential", why)
    if op == "bulk_overlap_matmul" and taken == "ring":
        taken = "bulk"  # its one way over shared memory
    return Explanation(op, taken, why, by)


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def _local(given: dict[str, Any], features: int, weight: Tensor) -> dict[str, Any]:
    """This rank's product, of operators with fused kernels."""
    return {"local_shape": (0, features, given["x"].shape[-1])} | _scaled(given, weight)


def _scaled(given: dict[str, Any], weight: Tensor) -> dict[str, Any]:
    if "out_dtype" not in given:
        return {}
    return {"scaled": (given["x"].dtype, weight.dtype, int(given["scaling_mode"]), given["use_split_accumulator"])}


def _gather(given: dict[str, Any]) -> dict[str, Any]:
    x, size = given["x"], given["comm"].get_size()
    features = sum(weight.shape[0] for weight in given["weights"])
    return {
        "dtype": given.get("out_dtype", x.dtype),
        "shape": (_rows(x) * size, features * size, x.shape[-1]),
        "chunk_rows": _rows(x),
        "gather_bytes": x.nbytes * size,
        "direct_bytes": None if "out_dtype" in given else 0,
    } | _local(given, features, given["weights"][0])


def _scatter(given: dict[str, Any]) -> dict[str, Any]:
    x, size = given["x"], given["comm"].get_size()
    dtype, features = given.get("out_dtype", x.dtype), given["weight"].shape[0]
    return {
        "dtype": dtype,
        "shape": (_rows(x), features, x.shape[-1] * size),
        "chunk_rows": _rows(x) // size,
        "scatter_bytes": 2 * _rows(x) * features * dtype.itemsize,
        "direct_bytes": None if "out_dtype" in given else _rows(x) * features * dtype.itemsize,
    } | _local(given, features, given["weight"])


def _all_reduce(given: dict[str, Any]) -> dict[str, Any]:
    x, weight = given["x"], given["weight"]
    dtype, mode = given.get("out_dtype", x.dtype), given.get("scaling_mode")
    op = "matmul_all_reduce" if mode is None else "scaled_matmul_all_reduce"
    problem = _C._summed_product_problem(
        op, given["comm"], _rows(x), weight.shape[0], x.shape[-1], dtype, None if mode is None else int(mode)
    )
    return problem | _scaled(given, weight)


def _exchange_in(given: dict[str, Any]) -> dict[str, Any]:
    x, weight, size = given["x"], given["weight"], given["comm"].get_size()
    return {
        "dtype": x.dtype,
        "shape": (_rows(x), *weight.shape),
        "chunk_rows": _rows(x) // size // _C._ROW_PIECES,
        "gather_bytes": x.nbytes,
    }


def _exchange_out(given: dict[str, Any]) -> dict[str, Any]:
    x, size = given["x"], given["comm"].get_size()
    features = [weight.shape[0] for weight in given["weights"]]
    return {
        "dtype": x.dtype,
        "shape": (_rows(x) * size, sum(features), x.shape[-1]),
        "chunk_rows": _rows(x),
        "scatter_bytes": _C._column_exchange_bytes([_rows(x) * n * x.dtype.itemsize for n in features]),
    }


def _bulk(given: dict[str, Any]) -> dict[str, Any]:
    x, other, size = given["x"], given["other"], given["comm"].get_size()
    problem = {"dtype": x.dtype, "shape": (0, 0, 0), "chunk_rows": _rows(x)}
    if given["collective"] == "all_gather":
        return problem | {"gather_bytes": other.nbytes * size}
    is_summed = other.dtype in _SUMMED
    if given["algorithm"] == "bulk" and not is_summed:
        raise _C.UnsupportedError(
            "bulk_overlap_matmul: expected other of dtype float64, float32, float16 or bfloat16 for algorithm 'bulk', "
            f"got {other.dtype}; use 'chunked'"
        )
    return problem | {"scatter_bytes": other.nbytes, "prefers_channels": is_summed}


_SUMMED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # over shared memory
_EXPLAINED = {
    "all_gather_matmul": _gather,
    "matmul_reduce_scatter": _scatter,
    "matmul_all_reduce": _all_reduce,
    "matmul_all_reduce_rms_norm": _all_reduce,
    "bulk_overlap_matmul": _bulk,
    "all_to_all_matmul": _exchange_in,
    "matmul_all_to_all": _exchange_out,
    "scaled_all_gather_matmul": _gather,
    "scaled_matmul_reduce_scatter": _scatter,
    "scaled_matmul_all_reduce": _all_reduce,
}
