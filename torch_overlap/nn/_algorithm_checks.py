"""Refuses the fallback of a fused operator."""

from __future__ import annotations

from collections.abc import Sequence

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

    With one rank there is no communication, and it never raises.

    Raises:
        UnsupportedError: with the operator, its shapes and the reason.
    """
    if group(comm)[1] == 1:
        return
    shape = tuple(x.shape)
    _raise_if_sequential(who, op, shape, features, *_explain_at_trace(op, shape, x.dtype, features, comm, algorithm))


def require_fused_float8(who: str, op: str, x: Tensor, features: int, comm: TorchComm, algorithm: str) -> None:
    """Like require_fused, for a scaled operator."""
    if group(comm)[1] == 1:
        return
    shape = tuple(x.shape)
    if algorithm == "bulk":
        hides = op == "scaled_all_gather_matmul"
        why = "it hides no transfer but those of a column-parallel layer's gradients, under sequence parallelism"
        taken = algorithm if hides else _SEQUENTIAL
    else:
        taken, why = _explain_scaled_at_trace(op, shape, x.dtype, features, comm, algorithm)
    _raise_if_sequential(who, op, shape, features, taken, why)


def _raise_if_sequential(who: str, op: str, shape: Sequence[int], features: int, taken: str, why: str) -> None:
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
    x = torch.empty(shape, dtype=dtype, device="meta")
    weight = torch.empty(features, shape[-1], dtype=dtype, device="meta")
    found = explain(op, x, [weight] if op == "all_gather_matmul" else weight, comm, algorithm=algorithm)
    return found.algorithm, found.why


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _explain_scaled_at_trace(
    op: str, shape: Sequence[int], out_dtype: torch.dtype, features: int, comm: TorchComm, algorithm: str
) -> tuple[str, str]:
    x = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
    weight = torch.empty(features, shape[-1], dtype=torch.float8_e4m3fn, device="meta")
    scale = torch.empty(1, device="meta")
    others = ([weight], [scale]) if op == "scaled_all_gather_matmul" else (weight, scale)
    found = explain(op, x, scale, *others, comm, out_dtype=out_dtype, algorithm=algorithm)
    return found.algorithm, found.why
