"""Operations of TorchComm."""

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
    tag: int | None = None,
) -> TorchWork:
    """Sends `tensor` to rank `dst`, whose recv must have the same number of bytes. Any dtype."""
    return self._send(tensor, dst, async_op, hints, timeout, options, tag)


def recv(
    self: TorchComm,
    tensor: Tensor,
    src: int,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: RecvOptions | None = None,
    tag: int | None = None,
) -> TorchWork:
    """Receives into `tensor` from rank `src`. Sends and receives between two ranks match in order."""
    return self._recv(tensor, src, async_op, hints, timeout, options, tag)


def broadcast(
    self: TorchComm,
    tensor: Tensor,
    root: int,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: BroadcastOptions | None = None,
) -> TorchWork:
    """Copies the `tensor` of `root` into every rank's `tensor`. In place; any dtype."""
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
    """Reduces `tensor` over all ranks; every rank gets the result. In place.

    A sparse COO tensor (SUM only) becomes the coalesced sum.
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
    """Reduces `tensor` over all ranks into the `tensor` of `root`, in place. The other ranks' tensors are unchanged."""
    return self._reduce(tensor, root, op, async_op, hints, timeout, options)


def barrier(
    self: TorchComm,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: BarrierOptions | None = None,
) -> TorchWork:
    """Blocks until all ranks have entered. CUDA: the stream waits, the host does not."""
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
    """Copies the `tensor` of rank r into tensor_list[r]. All ranks pass the same number of elements.

    Fastest if the list's tensors are contiguous in memory, in order.
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
    """Copies the `input` of rank r into piece r of `output`, which has get_size() equal pieces."""
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
    """Copies the `input_tensor` of rank r into output_tensor_list[r] on rank `root`.

    The list is ignored on other ranks: pass [] or None.
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
    """Copies the `input` of rank r into piece r of the `output` of rank `root`. Other ranks may pass None for
    `output`."""
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
    """Reduces input_list[r] over all ranks into the `output` of rank r."""
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
    """Reduces piece r of `input` over all ranks into the `output` of rank r."""
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
    """Copies input_tensor_list[r] of rank `root` into the `output_tensor` of rank r.

    The list is ignored on other ranks: pass [] or None.
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
    """Copies rank r's input_tensor_list[this rank] into output_tensor_list[r]. Sizes may differ by pair of ranks."""
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
    """Copies the piece of rank r's `input` that belongs to this rank into piece r of `output`."""
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
    """all_to_all_single with pieces of different sizes.

    input_split_sizes[r] slices of dimension 0 go to rank r, output_split_sizes[r] slices are received from it. [] means
    equal pieces.
    """
    return self._all_to_all_v_single(
        output, input, output_split_sizes, input_split_sizes, async_op, hints, timeout, options
    )
