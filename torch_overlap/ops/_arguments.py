"""What the wrappers do to their arguments."""

from __future__ import annotations

import torch

from torch_overlap._C import ReduceOp, TorchComm

# torch.compile makes constants of both, guarded by their equality: another communicator compiles again.
torch.utils._pytree.register_constant(TorchComm)
torch.utils._pytree.register_constant(ReduceOp)


@torch.compiler.assume_constant_result
def group(comm: TorchComm) -> tuple[str, int]:
    """The name and size that operators take for a communicator. Constants in a compiled graph."""
    return comm.get_name(), comm.get_size()


def reduction(op: ReduceOp | str, factor: float | None = None) -> tuple[str, float | None]:
    """An operator's spelling of a reduction: ReduceOp.PREMUL_SUM(2) is "premul_sum", 2.0."""
    return (op, factor) if isinstance(op, str) else _spelled(op)


@torch.compiler.assume_constant_result
def _spelled(op: ReduceOp) -> tuple[str, float | None]:
    if isinstance(op.factor, torch.Tensor):
        raise TypeError(
            "ReduceOp.PREMUL_SUM: expected a number as the factor of an operator, got a tensor; "
            "use comm.all_reduce, or multiply before a sum"
        )
    return op.type.name.lower(), op.factor
