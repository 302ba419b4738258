"""Conversions of the wrappers' arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_overlap._C import InvalidTypeError, InvalidValueError, ReduceOp, TorchComm, _name_and_size

# torch.compile treats both as constants, guarded by equality: another communicator compiles again.
torch.utils._pytree.register_constant(TorchComm)
torch.utils._pytree.register_constant(ReduceOp)


@torch.compiler.assume_constant_result
def group(comm: object) -> tuple[str, int]:
    """Returns the name and size of a communicator, as operators take them. Constants in a compiled graph."""
    if not isinstance(comm, TorchComm):
        raise InvalidTypeError(
            f"torch_overlap.ops: expected comm as a TorchComm, got {comm!r} ({type(comm).__name__}); "
            "get_comm(name) finds one by its name"
        )
    return _name_and_size("torch_overlap.ops", comm)


def one_per_weight(op: str, weights: Sequence[Tensor] | Tensor) -> Sequence[Tensor]:
    """Returns the weights of an operator that takes several.

    Raises:
        InvalidTypeError: weights is one tensor, not a list.
    """
    if isinstance(weights, Tensor):
        raise InvalidTypeError(
            f"{op}: expected weights as a list of tensors, got one of shape {list(weights.shape)}; write [weight]"
        )
    return weights


def flat_pairs(op: str, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Returns src0, dst0, src1, dst1, ...

    Raises:
        InvalidTypeError: the items are not pairs.
    """
    try:
        return [rank for src, dst in pairs for rank in (src, dst)]
    except (TypeError, ValueError):
        raise InvalidTypeError(
            f"{op}: expected pairs (src, dst) of ranks, got {pairs!r}; write [(0, 1), (1, 0)]"
        ) from None


def reduction(op: ReduceOp | str, factor: float | None = None) -> tuple[str, float | None]:
    """Returns an operator's spelling of a reduction: ReduceOp.PREMUL_SUM(2) is "premul_sum", 2.0.

    Raises:
        InvalidTypeError: op is not a ReduceOp, or its factor is a tensor.
        InvalidValueError: a separate factor with a ReduceOp, which has its own or takes none.
    """
    if isinstance(op, str):
        return op, factor
    name, own = _spelled(op)
    if factor is not None:
        raise InvalidValueError(
            f'ReduceOp: expected a factor in ReduceOp.PREMUL_SUM(factor) or beside "premul_sum", got {factor} beside '
            f"{op!r}"
        )
    return name, own


@torch.compiler.assume_constant_result
def _spelled(op: object) -> tuple[str, float | None]:
    if op is ReduceOp.PREMUL_SUM:
        raise InvalidTypeError(
            "ReduceOp: expected a ReduceOp, got the function ReduceOp.PREMUL_SUM; write ReduceOp.PREMUL_SUM(factor) "
            "with a number"
        )
    if not isinstance(op, ReduceOp):
        raise InvalidTypeError(f"ReduceOp: expected a ReduceOp or its name, got {op!r} ({type(op).__name__})")
    if isinstance(op.factor, torch.Tensor):
        raise InvalidTypeError(
            "ReduceOp.PREMUL_SUM: expected a number as the factor of an operator, got a tensor; "
            "use comm.all_reduce, or multiply before a sum"
        )
    return op.type.name.lower(), op.factor
