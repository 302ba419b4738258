"""Explains which algorithm a fused operator would select."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_overlap import _C, ops

__all__ = ["Explanation", "explain"]

_BASE_ALGORITHMS = ("auto", "sequential", "pipelined")
# Operators that support only some of the algorithms.
_ALGORITHMS = {
    "scaled_all_gather_matmul": (*_BASE_ALGORITHMS, "p2p", "fused"),
    "scaled_matmul_reduce_scatter": (*_BASE_ALGORITHMS, "p2p", "fused"),
    "scaled_matmul_all_reduce": (*_BASE_ALGORITHMS, "p2p", "fused"),
    "bulk_overlap_matmul": (*_BASE_ALGORITHMS, "bulk"),
    "all_to_all_matmul": (*_BASE_ALGORITHMS, "p2p"),
    "matmul_all_to_all": (*_BASE_ALGORITHMS, "p2p"),
}
# Operators whose choice is that of another operator.
_SAME_CHOICE_AS = {"matmul_all_reduce_rms_norm": "matmul_all_reduce"}


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

    Local: nothing is computed or sent, and tensors on the meta device are accepted. Until the first call has checked
    it, ranks are assumed to have peer access to each other's memory, one GPU each, and the same cache of measured
    algorithms.

    Args:
        op: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_reduce_rms_norm" (explained
            as "matmul_all_reduce"), "bulk_overlap_matmul", "all_to_all_matmul", "matmul_all_to_all",
            "scaled_all_gather_matmul", "scaled_matmul_reduce_scatter" or "scaled_matmul_all_reduce".
        args: positional arguments of the operator.
        kwargs: keyword arguments of the operator.

    Raises:
        InvalidValueError: `op` is not one of these, or does not have the requested algorithm.
        UnsupportedError: the requested algorithm cannot run.
    """
    if op not in _PROBLEM_OF_OP:
        raise _C.InvalidValueError(f"explain: expected op to be one of {', '.join(_PROBLEM_OF_OP)}, got {op!r}")
    bound = inspect.signature(getattr(ops, op)).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    algorithm, known = given["algorithm"], _ALGORITHMS.get(op)
    if known and algorithm not in known:
        raise _C.InvalidValueError(f"{op}: expected algorithm to be one of {' '.join(known)}, got {algorithm!r}")
    if op != "bulk_overlap_matmul" and algorithm == "bulk":
        why = "bulk hides the communication of gradients, and a forward pass has none"
        return Explanation(op, "sequential", why, "caller")
    taken, why, by = _C._explain_algorithm(
        _SAME_CHOICE_AS.get(op, op), algorithm, given["comm"], **_PROBLEM_OF_OP[op](given)
    )
    if op in _SAME_CHOICE_AS and taken == "low_latency" and algorithm == "auto":
        why = "what was measured as the quickest is the sum without the norm, which this has in its kernel"
        return Explanation(op, "sequential", why)
    if op == "bulk_overlap_matmul" and taken == "p2p":
        taken = "bulk"  # the only algorithm that uses symmetric memory
    return Explanation(op, taken, why, by)


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def _local(given: dict[str, Any], features: int, weight: Tensor) -> dict[str, Any]:
    """Returns the shape of this rank's product, for operators with fused kernels."""
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
        "low_latency_bytes": None if "out_dtype" in given else 0,
    } | _local(given, features, given["weights"][0])


def _scatter(given: dict[str, Any]) -> dict[str, Any]:
    x, size = given["x"], given["comm"].get_size()
    dtype, features = given.get("out_dtype", x.dtype), given["weight"].shape[0]
    return {
        "dtype": dtype,
        "shape": (_rows(x), features, x.shape[-1] * size),
        "chunk_rows": _rows(x) // size,
        "scatter_bytes": 2 * _rows(x) * features * dtype.itemsize,
        "low_latency_bytes": None if "out_dtype" in given else _rows(x) * features * dtype.itemsize,
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
    is_reducible = other.dtype in _REDUCIBLE_DTYPES
    if given["algorithm"] == "bulk" and not is_reducible:
        raise _C.UnsupportedError(
            "bulk_overlap_matmul: expected other of dtype float64, float32, float16 or bfloat16 for algorithm 'bulk', "
            f"got {other.dtype}; use 'pipelined'"
        )
    return problem | {"scatter_bytes": other.nbytes, "prefers_channels": is_reducible}


# Dtypes that symmetric memory supports.
_REDUCIBLE_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PROBLEM_OF_OP = {
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
