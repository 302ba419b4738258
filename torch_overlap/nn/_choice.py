"""Refusal of a fused operator's fallback."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_overlap._C import TorchComm, UnsupportedError
from torch_overlap._explain import explain
from torch_overlap.ops._arguments import group

_SEQUENTIAL = "sequential"


def require_fused(who: str, op: str, x: Tensor, features: int, comm: TorchComm, algorithm: str) -> None:
    """Raises where `op` of x and weights of `features` rows would communicate and multiply one after the other.

    One rank communicates with nobody.

    Raises:
        UnsupportedError: naming the operator, its shapes and the reason.
    """
    if group(comm)[1] == 1:
        return
    shape = tuple(x.shape)
    taken, why = _explained(op, shape, x.dtype, features, comm, algorithm)
    if taken == _SEQUENTIAL:
        raise UnsupportedError(
            f"{who}: expected an overlapped {op} (require_fused=True), got '{_SEQUENTIAL}' for operands "
            f"{list(shape)}, {[features, shape[-1]]}: {why}; give it more rows, another algorithm, or "
            "require_fused=False"
        )


def refuse_float8(who: str, comm: TorchComm) -> None:
    """Raises UnsupportedError on several ranks: products of 8-bit floats communicate before or after."""
    if group(comm)[1] > 1:
        raise UnsupportedError(
            f"{who}: expected overlapped products (require_fused=True), got '{_SEQUENTIAL}' for 8-bit floats; use "
            "fp8=None or require_fused=False"
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _explained(
    op: str, shape: Sequence[int], dtype: torch.dtype, features: int, comm: TorchComm, algorithm: str
) -> tuple[str, str]:
    x = torch.empty(shape, dtype=dtype, device="meta")
    weight = torch.empty(features, shape[-1], dtype=dtype, device="meta")
    found = explain(op, x, [weight] if op == "all_gather_matmul" else weight, comm, algorithm=algorithm)
    return found.algorithm, found.why
