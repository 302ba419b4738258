"""The operations of TorchComm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch import Tensor

from torch_overlap._C import (
    AllGatherOptions,
    AllGatherSingleOptions,
    AllReduceOptions,
    AllToAllOptions,
    AllToAllSingleOptions,
    AllToAllvSingleOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    GatherSingleOptions,
    RecvOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ReduceScatterSingleOptions,
    ScatterOptions,
    SendOptions,
    TorchComm,
    TorchWork,
)


def send(
    self: TorchComm,
    tensor: Tensor,
    dst: int,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: SendOptions | None = None,
) -> TorchWork:
    """Sends `tensor` to rank `dst`, whose recv has the same number of bytes. Any dtype."""
    return self._send(tensor, dst, async_op, hints, timeout, options)


def recv(
    self: TorchComm,
    tensor: Tensor,
    src: int,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: RecvOptions | None = None,
) -> TorchWork:
    """Receives into `tensor` what rank `src` sends. Sends and receives between two ranks match in order."""
    return self._recv(tensor, src, async_op, hints, timeout, options)


def broadcast(
    self: TorchComm,
    tensor: Tensor,
    root: int,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: BroadcastOptions | None = None,
) -> TorchWork:
    """Every rank's `tensor` becomes that of `root`. In place; any dtype."""
    return self._broadcast(tensor, root, async_op, hints, timeout, options)


def all_reduce(
    self: TorchComm,
    tensor: Tensor,
    op: ReduceOp,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: AllReduceOptions | None = None,
) -> TorchWork:
    """Every rank's `tensor` becomes the reduction of all. In place.

    A sparse COO tensor (SUM) becomes the coalesced sum.
    """
    return self._all_reduce(tensor, op, async_op, hints, timeout, options)


def reduce(
    self: TorchComm,
    tensor: Tensor,
    root: int,
    op: ReduceOp,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: ReduceOptions | None = None,
) -> TorchWork:
    """The `tensor` of `root` becomes the reduction of all. In place there; the other ranks' stay as they are."""
    return self._reduce(tensor, root, op, async_op, hints, timeout, options)


def barrier(
    self: TorchComm,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: BarrierOptions | None = None,
) -> TorchWork:
    """CPU: no rank gets past it before all have come. CUDA: the same on the stream; the host does not wait."""
    return self._barrier(async_op, hints, timeout, options)


def all_gather(
    self: TorchComm,
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: AllGatherOptions | None = None,
) -> TorchWork:
    """tensor_list[r] becomes the `tensor` of rank r, of the same number of elements on every rank.

    Fastest when the list's tensors lie one behind the other in memory.
    """
    return self._all_gather(tensor_list, tensor, async_op, hints, timeout, options)


def all_gather_v(
    self: TorchComm,
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: AllGatherOptions | None = None,
) -> TorchWork:
    """all_gather with sizes that differ by rank: tensor_list[r] has rank r's size, on every rank."""
    return self._all_gather_v(tensor_list, tensor, async_op, hints, timeout, options)


def all_gather_single(
    self: TorchComm,
    output: Tensor,
    input: Tensor,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: AllGatherSingleOptions | None = None,
) -> TorchWork:
    """The r-th of get_size() equal pieces of `output` becomes the `input` of rank r."""
    return self._all_gather_single(output, input, async_op, hints, timeout, options)


def gather(
    self: TorchComm,
    output_tensor_list: Sequence[Tensor] | None,
    input_tensor: Tensor,
    root: int,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: GatherOptions | None = None,
) -> TorchWork:
    """output_tensor_list[r] of rank `root` becomes the `input_tensor` of rank r.

    Elsewhere the list is not looked at: [] or None.
    """
    return self._gather(output_tensor_list, input_tensor, root, async_op, hints, timeout, options)


def gather_single(
    self: TorchComm,
    output: Tensor | None,
    input: Tensor,
    root: int,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: GatherSingleOptions | None = None,
) -> TorchWork:
    """The r-th piece of the `output` of rank `root` becomes the `input` of rank r. Elsewhere `output` may be None."""
    return self._gather_single(output, input, root, async_op, hints, timeout, options)


def reduce_scatter(
    self: TorchComm,
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: ReduceScatterOptions | None = None,
) -> TorchWork:
    """The `output` of rank r becomes the reduction of all ranks' input_list[r]."""
    return self._reduce_scatter(output, input_list, op, async_op, hints, timeout, options)


def reduce_scatter_v(
    self: TorchComm,
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: ReduceScatterOptions | None = None,
) -> TorchWork:
    """reduce_scatter with sizes that differ by rank: input_list[r] has the size of rank r's `output`, on every rank."""
    return self._reduce_scatter_v(output, input_list, op, async_op, hints, timeout, options)


def reduce_scatter_single(
    self: TorchComm,
    output: Tensor,
    input: Tensor,
    op: ReduceOp,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: ReduceScatterSingleOptions | None = None,
) -> TorchWork:
    """The `output` of rank r becomes the reduction of the r-th pieces of all ranks' `input`."""
    return self._reduce_scatter_single(output, input, op, async_op, hints, timeout, options)


def scatter(
    self: TorchComm,
    output_tensor: Tensor,
    input_tensor_list: Sequence[Tensor] | None,
    root: int,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: ScatterOptions | None = None,
) -> TorchWork:
    """The `output_tensor` of rank r becomes input_tensor_list[r] of rank `root`.

    Elsewhere the list is not looked at: [] or None.
    """
    return self._scatter(output_tensor, input_tensor_list, root, async_op, hints, timeout, options)


def all_to_all(
    self: TorchComm,
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: AllToAllOptions | None = None,
) -> TorchWork:
    """output_tensor_list[r] becomes rank r's input_tensor_list of this rank. Sizes may differ by pair."""
    return self._all_to_all(output_tensor_list, input_tensor_list, async_op, hints, timeout, options)


def all_to_all_single(
    self: TorchComm,
    output: Tensor,
    input: Tensor,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: AllToAllSingleOptions | None = None,
) -> TorchWork:
    """The r-th piece of `output` becomes the piece of rank r's `input` that has this rank's number."""
    return self._all_to_all_single(output, input, async_op, hints, timeout, options)


def all_to_all_v_single(
    self: TorchComm,
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: AllToAllvSingleOptions | None = None,
) -> TorchWork:
    """all_to_all_single with pieces that differ.

    input_split_sizes[r] slices of dimension 0 go to rank r, output_split_sizes[r] come from it. [] means equal pieces.
    """
    return self._all_to_all_v_single(
        output, input, output_split_sizes, input_split_sizes, async_op, hints, timeout, options
    )
