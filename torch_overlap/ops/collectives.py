"""Collectives as functions: they return their result and leave their input alone (names ending in _ change it).

R and I, the values of `grad`: a result that is the same on all ranks is R (replicated) if each rank's gradient of it
is a part of the whole, and I (invariant) if the ranks' gradients are equal already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_overlap._C import ReduceOp, TorchComm
from torch_overlap.ops._arguments import flat_pairs, group, reduction

_ops = torch.ops.torch_overlap


def all_reduce(
    x: Tensor, comm: TorchComm, op: ReduceOp | str = "sum", *, grad: str = "R", factor: float | None = None
) -> Tensor:
    """The reduction of all ranks' `x`, on every rank.

    Args:
        x: any shape, the same on all ranks; any dtype that `op` takes.
        op: "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum" (with `factor`), or a ReduceOp.
        grad: "R": the gradients are reduced too. "I": they are equal on all ranks, and pass through.
        factor: this rank's factor of a premul_sum.

    Gradient: of sum, avg and premul_sum; of another op it raises when it is asked for.
    """
    name, factor = reduction(op, factor)
    return _ops.all_reduce(x, name, *group(comm), grad, factor)


def all_reduce_async(
    x: Tensor, comm: TorchComm, op: ReduceOp | str = "sum", *, grad: str = "R", factor: float | None = None
) -> Tensor:
    """`all_reduce` in the background: `x` is unchanged until the result has passed through `wait_tensor`."""
    name, factor = reduction(op, factor)
    return _ops.all_reduce_async(x, name, *group(comm), grad, factor)


def all_reduce_(x: Tensor, comm: TorchComm, op: ReduceOp | str = "sum", *, factor: float | None = None) -> Tensor:
    """`all_reduce` in place; returns `x`. Has no gradient: raises for an `x` that requires it."""
    name, factor = reduction(op, factor)
    return _ops.all_reduce_(x, name, group(comm)[0], factor)


def all_gather(x: Tensor, comm: TorchComm, dim: int = 0, *, grad: str = "R") -> Tensor:
    """All ranks' `x` behind each other along `dim`, in rank order, on every rank.

    Args:
        x: the same shape on all ranks; any dtype.
        grad: "R": the gradients are reduce-scattered. "I": each rank keeps its part of its own gradient.

    Returns: the shape of `x`, `dim` times the number of ranks. Without a copy along dimension 0.
    """
    return _ops.all_gather(x, dim, *group(comm), grad)


def all_gather_async(x: Tensor, comm: TorchComm, dim: int = 0, *, grad: str = "R") -> Tensor:
    """`all_gather` in the background: `x` is unchanged until the result has passed through `wait_tensor`.

    The result is contiguous if dim is 0.
    """
    return _ops.all_gather_async(x, dim, *group(comm), grad)


def reduce_scatter(
    x: Tensor, comm: TorchComm, dim: int = 0, op: ReduceOp | str = "sum", *, factor: float | None = None
) -> Tensor:
    """This rank's part, along `dim`, of the reduction of all ranks' `x`.

    Args:
        x: the same shape on all ranks, `dim` divisible by their number.
        op, factor: as for `all_reduce`.

    Gradient: the gathered gradients; of sum, avg and premul_sum only.
    """
    name, factor = reduction(op, factor)
    return _ops.reduce_scatter(x, dim, name, *group(comm), factor)


def reduce_scatter_async(
    x: Tensor, comm: TorchComm, dim: int = 0, op: ReduceOp | str = "sum", *, factor: float | None = None
) -> Tensor:
    """`reduce_scatter` in the background: `x` is unchanged until the result has passed through `wait_tensor`."""
    name, factor = reduction(op, factor)
    return _ops.reduce_scatter_async(x, dim, name, *group(comm), factor)


def all_to_all(x: Tensor, comm: TorchComm, split_dim: int = 0, concat_dim: int = 0) -> Tensor:
    """Part r of `x` along `split_dim` goes to rank r; what comes is put together along `concat_dim`, in rank order.

    Moves a sharding from concat_dim to split_dim. `split_dim` is divisible by the number of ranks. Without a copy
    where both are 0.
    """
    return _ops.all_to_all(x, split_dim, concat_dim, *group(comm))


def all_to_all_async(x: Tensor, comm: TorchComm, split_dim: int = 0, concat_dim: int = 0) -> Tensor:
    """`all_to_all` in the background: `x` is unchanged until the result has passed through `wait_tensor`."""
    return _ops.all_to_all_async(x, split_dim, concat_dim, *group(comm))


def all_to_all_v(x: Tensor, comm: TorchComm, out_splits: Sequence[int], in_splits: Sequence[int]) -> Tensor:
    """The next `in_splits[r]` slices of dimension 0 go to rank r, and `out_splits[r]` come from it.

    Rank a's in_splits[b] is rank b's out_splits[a]; in_splits sum to `x.size(0)`. Zeros are fine.
    """
    return _ops.all_to_all_v(x, out_splits, in_splits, group(comm)[0])


def all_to_all_v_async(x: Tensor, comm: TorchComm, out_splits: Sequence[int], in_splits: Sequence[int]) -> Tensor:
    """`all_to_all_v` in the background: `x` is unchanged until the result has passed through `wait_tensor`."""
    return _ops.all_to_all_v_async(x, out_splits, in_splits, group(comm)[0])


def broadcast(x: Tensor, comm: TorchComm, root: int = 0) -> Tensor:
    """The root's `x`, on every rank. The other ranks' `x` give shape and dtype. Gradients are summed to the root."""
    return _ops.broadcast(x, root, group(comm)[0])


def broadcast_async(x: Tensor, comm: TorchComm, root: int = 0) -> Tensor:
    """`broadcast` in the background: `x` is unchanged until the result has passed through `wait_tensor`."""
    return _ops.broadcast_async(x, root, group(comm)[0])


def permute(x: Tensor, comm: TorchComm, pairs: Iterable[tuple[int, int]]) -> Tensor:
    """For each pair (src, dst): rank src's `x` becomes the result of rank dst. A rank with no source gets zeros.

    A rank is at most once a source and once a target. The gradient goes the other way.
    """
    return _ops.permute(x, flat_pairs("permute", pairs), group(comm)[0])


def permute_async(x: Tensor, comm: TorchComm, pairs: Iterable[tuple[int, int]]) -> Tensor:
    """`permute` in the background: `x` is unchanged until the result has passed through `wait_tensor`."""
    return _ops.permute_async(x, flat_pairs("permute_async", pairs), group(comm)[0])


def send(x: Tensor, comm: TorchComm, dst: int) -> None:
    """Sends `x` to rank `dst`, which calls `recv_`. No gradient: raises for an `x` that requires it."""
    _ops.send(x, dst, group(comm)[0])


def recv_(x: Tensor, comm: TorchComm, src: int) -> Tensor:
    """Overwrites `x` with what rank `src` sends; returns `x`. No gradient: raises for an `x` that requires it."""
    return _ops.recv_(x, src, group(comm)[0])


def wait_tensor(x: Tensor) -> Tensor:
    """Returns `x`, once the background operation that writes it is done; at once if there is none.

    On a GPU the current stream waits, and the host does not. Raises what went wrong in that operation, and StateError
    if its input was changed before the first wait: the result is then of no use.
    """
    return _ops.wait_tensor(x)
