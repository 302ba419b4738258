"""Refuses the fallback of an overlapped operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_overlap._C import InvalidValueError, TorchComm, UnsupportedError
from torch_overlap._explain import explain
from torch_overlap.ops._arguments import group

_SEQUENTIAL = "sequential"


def expect_algorithm(who: str, algorithm: str, known: Sequence[str]) -> None:
    """Raises InvalidValueError for an unknown name, as the operators do."""
    if algorithm not in known:
        raise InvalidValueError(f"{who}: expected algorithm to be one of {', '.join(known)}, got '{algorithm}'. "
                                "Use one of them.")  # fmt: skip


def require_fused(who: str, op: str, x: Tensor, features: int, comm: TorchComm, algorithm: str) -> None:
    """Raises if `op` of x and weights of `features` rows would run the collective and the product one after the other.

    `op` may be a scaled operator, whose result has the dtype of x. With one rank there is no communication, and it
    never raises.

    Raises:
        UnsupportedError: with the operator, its shapes and the reason.
    """
    if group(comm)[1] == 1:
        return
    shape = tuple(x.shape)
    if algorithm == "bulk" and op.startswith("scaled_"):
        why = "it hides no transfer but those of a column-parallel layer's gradients, under sequence parallelism"
        taken = algorithm if op == "scaled_all_gather_matmul" else _SEQUENTIAL
    else:
        taken, why = _explain_at_trace(op, shape, x.dtype, features, comm, algorithm)
    if taken == _SEQUENTIAL:
        raise UnsupportedError(
            f"{who}: expected an overlapped {op} (require_fused=True), got '{_SEQUENTIAL}' for operands "
            f"{list(shape)}, {[features, shape[-1]]}: {why}; give it more rows, another algorithm, or "
            "require_fused=False"
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _explain_at_trace(
    op: str, shape: Sequence[int], dtype: torch.dtype, features: int, comm: TorchComm, algorithm: str
) -> tuple[str, str]:
    is_scaled = op.startswith("scaled_")
    stored = torch.float8_e4m3fn if is_scaled else dtype
    operands: list[Any] = [torch.empty(size, dtype=stored, device="meta") for size in (shape, (features, shape[-1]))]
    if is_scaled:
        operands = [part for operand in operands for part in (operand, torch.empty(1, device="meta"))]
    if op.endswith("all_gather_matmul"):
        operands = [operand if i < len(operands) // 2 else [operand] for i, operand in enumerate(operands)]
    options = {"out_dtype": dtype} if is_scaled else {}
    found = explain(op, *operands, comm, algorithm=algorithm, **options)
    return found.algorithm, found.why
