"""Collectives as functions: they return their result and do not change their input (names ending in _ do).

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
    """Reduces all ranks' `x` and returns the result on every rank.

    Args:
        x: any shape, the same on all ranks; any dtype that `op` supports.
        op: "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum" (with `factor`), or a ReduceOp.
        grad: "R": the gradients are reduced too. "I": they are equal on all ranks, and pass through.
        factor: this rank's factor of a premul_sum.

    Gradient: for sum, avg and premul_sum; another op raises if a gradient is requested.
    """
    name, factor = reduction(op, factor)
    return _ops.all_reduce(x, name, *group(comm), grad, factor)


def all_reduce_async(
    x: Tensor, comm: TorchComm, op: ReduceOp | str = "sum", *, grad: str = "R", factor: float | None = None
) -> Tensor:
    """`all_reduce` in the background: `x` must not change until the result has passed through `wait_tensor`."""
    name, factor = reduction(op, factor)
    return _ops.all_reduce_async(x, name, *group(comm), grad, factor)


def all_reduce_(x: Tensor, comm: TorchComm, op: ReduceOp | str = "sum", *, factor: float | None = None) -> Tensor:
    """`all_reduce` in place; returns `x`. No gradient: raises for an `x` that requires it."""
    name, factor = reduction(op, factor)
    return _ops.all_reduce_(x, name, group(comm)[0], factor)


def all_gather(x: Tensor, comm: TorchComm, dim: int = 0, *, grad: str = "R") -> Tensor:
    """Concatenates all ranks' `x` along `dim`, in rank order, on every rank.

    Args:
        x: the same shape on all ranks; any dtype.
        dim: the dimension to concatenate along.
        grad: "R": the gradients are reduce-scattered. "I": each rank keeps its part of its own gradient.

    Returns: the shape of `x`, with `dim` multiplied by the number of ranks. Dimension 0 needs no copy.
    """
    return _ops.all_gather(x, dim, *group(comm), grad)


def all_gather_async(x: Tensor, comm: TorchComm, dim: int = 0, *, grad: str = "R") -> Tensor:
    """`all_gather` in the background: `x` must not change until the result has passed through `wait_tensor`.

    The result is contiguous if dim is 0.
    """
    return _ops.all_gather_async(x, dim, *group(comm), grad)


def reduce_scatter(
    x: Tensor, comm: TorchComm, dim: int = 0, op: ReduceOp | str = "sum", *, factor: float | None = None
) -> Tensor:
    """Returns this rank's part, along `dim`, of the reduction of all ranks' `x`.

    Args:
        x: the same shape on all ranks, `dim` divisible by their number.
        dim: the dimension to scatter along.
        op, factor: as for `all_reduce`.

    Gradient: the gathered gradients; for sum, avg and premul_sum only.
    """
    name, factor = reduction(op, factor)
    return _ops.reduce_scatter(x, dim, name, *group(comm), factor)


def reduce_scatter_async(
    x: Tensor, comm: TorchComm, dim: int = 0, op: ReduceOp | str = "sum", *, factor: float | None = None
) -> Tensor:
    """`reduce_scatter` in the background: `x` must not change until the result has passed through `wait_tensor`."""
    name, factor = reduction(op, factor)
    return _ops.reduce_scatter_async(x, dim, name, *group(comm), factor)


def all_to_all(x: Tensor, comm: TorchComm, split_dim: int = 0, concat_dim: int = 0) -> Tensor:
    """Sends part r of `x` along `split_dim` to rank r, and concatenates the received parts along `concat_dim`, in rank
    order.

    Moves a sharding from concat_dim to split_dim. `split_dim` must be divisible by the number of ranks. Needs no copy
    if both are 0.
    """
    return _ops.all_to_all(x, split_dim, concat_dim, *group(comm))


def all_to_all_async(x: Tensor, comm: TorchComm, split_dim: int = 0, concat_dim: int = 0) -> Tensor:
    """`all_to_all` in the background: `x` must not change until the result has passed through `wait_tensor`."""
    return _ops.all_to_all_async(x, split_dim, concat_dim, *group(comm))


def all_to_all_v(x: Tensor, comm: TorchComm, out_splits: Sequence[int], in_splits: Sequence[int]) -> Tensor:
    """Sends the next `in_splits[r]` slices of dimension 0 to rank r, and receives `out_splits[r]` from it.

    Rank a's in_splits[b] is rank b's out_splits[a]; in_splits sum to `x.size(0)`. Zeros are allowed.
    """
    return _ops.all_to_all_v(x, out_splits, in_splits, group(comm)[0])


def all_to_all_v_async(x: Tensor, comm: TorchComm, out_splits: Sequence[int], in_splits: Sequence[int]) -> Tensor:
    """`all_to_all_v` in the background: `x` must not change until the result has passed through `wait_tensor`."""
    return _ops.all_to_all_v_async(x, out_splits, in_splits, group(comm)[0])


def broadcast(x: Tensor, comm: TorchComm, root: int = 0) -> Tensor:
    """Returns the root's `x` on every rank. The other ranks' `x` give shape and dtype. Gradients are summed to the
    root."""
    return _ops.broadcast(x, root, group(comm)[0])


def broadcast_async(x: Tensor, comm: TorchComm, root: int = 0) -> Tensor:
    """`broadcast` in the background: `x` must not change until the result has passed through `wait_tensor`."""
    return _ops.broadcast_async(x, root, group(comm)[0])


def permute(x: Tensor, comm: TorchComm, pairs: Iterable[tuple[int, int]]) -> Tensor:
    """Returns rank src's `x` on rank dst, for each pair (src, dst). A rank without a source gets zeros.

    A rank is at most once a source and once a target. The gradient is permuted in reverse.
    """
    return _ops.permute(x, flat_pairs("permute", pairs), group(comm)[0])


def permute_async(x: Tensor, comm: TorchComm, pairs: Iterable[tuple[int, int]]) -> Tensor:
    """`permute` in the background: `x` must not change until the result has passed through `wait_tensor`."""
    return _ops.permute_async(x, flat_pairs("permute_async", pairs), group(comm)[0])


def send(x: Tensor, comm: TorchComm, dst: int) -> None:
    """Sends `x` to rank `dst`, which calls `recv_`. No gradient: raises for an `x` that requires it."""
    _ops.send(x, dst, group(comm)[0])


def recv_(x: Tensor, comm: TorchComm, src: int) -> Tensor:
    """Receives from rank `src` into `x`; returns `x`. No gradient: raises for an `x` that requires it."""
    return _ops.recv_(x, src, group(comm)[0])


def wait_tensor(x: Tensor) -> Tensor:
    """Returns `x`, once the background operation that writes it has completed; immediately if there is none.

    On a GPU the current stream waits, and the host does not. Raises the error of that operation, and StateError if its
    input was changed before the first wait: the result is then invalid.
    """
    return _ops.wait_tensor(x)
