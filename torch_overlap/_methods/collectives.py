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
    """Sends `tensor` to rank `dst`.

    Messages between two ranks match in the order of issue, among those of one tag. Ranks that each send before they
    receive need a batch, or async_op=True on the CPU.

    Args:
        tensor: contiguous, on the communicator's device, of any dtype. The receiver's has the same number of bytes.
        dst: another rank.
        tag: separates the messages between two ranks, at least 0; the receiver passes the same. NCCL's messages have no
            tag: there it is 0. None means that of options, otherwise 0.

    Example:
        if comm.get_rank() == 0:
            comm.send(x, 1, async_op=False)
        else:
            comm.recv(x, 0, async_op=False)
    """
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
    """Receives into `tensor` from rank `src`.

    Messages between two ranks match in the order of issue, among those of one tag.

    Args:
        tensor: contiguous, on the communicator's device. The sender's has the same number of bytes.
        src: another rank; -1 for the first message of any rank, on the CPU only.
        tag: that of the sender, at least 0. NCCL's messages have no tag: there it is 0. None means that of options,
            otherwise 0.

    Example:
        comm.recv(x, src=0, async_op=True).wait()
    """
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
    """Copies the `tensor` of rank `root` into every rank's `tensor`, in place.

    Args:
        tensor: contiguous, of any dtype, with the same number of elements on all ranks.
        root: the rank whose values are copied.

    Example:
        comm.broadcast(weights, root=0, async_op=False)
    """
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
    """Reduces `tensor` over all ranks, in place; every rank gets the result.

    Args:
        tensor: contiguous, with the same number of elements on all ranks. A sparse COO tensor (SUM only) becomes the
            coalesced sum.
        op: the reduction, such as ReduceOp.SUM.

    Example:
        work = comm.all_reduce(gradient, ReduceOp.AVG, async_op=True)
        work.wait()
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
    """Reduces `tensor` over all ranks into the `tensor` of rank `root`, in place.

    Args:
        tensor: contiguous, with the same number of elements on all ranks. That of other ranks is unchanged.
        root: the rank that gets the result.
        op: the reduction.

    Example:
        comm.reduce(loss, root=0, op=ReduceOp.SUM, async_op=False)
    """
    return self._reduce(tensor, root, op, async_op, hints, timeout, options)


def barrier(
    self: TorchComm,
    async_op: bool,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    options: BarrierOptions | None = None,
) -> TorchWork:
    """Blocks until all ranks have entered. On CUDA the stream waits, and the host does not.

    Args:
        async_op: if True, the barrier runs in the background, and wait() waits for it.

    Example:
        comm.barrier(async_op=False)
    """
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
    """Copies the `tensor` of rank r into tensor_list[r].

    Args:
        tensor_list: one contiguous tensor for each rank, each with as many elements as `tensor`. It is fastest if they
            follow each other in one memory, as the chunks of a tensor do.
        tensor: contiguous, with the same number of elements on all ranks.

    Example:
        parts = [torch.empty_like(x) for _ in range(comm.get_size())]
        comm.all_gather(parts, x, async_op=False)
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
    """Copies the `tensor` of rank r into tensor_list[r], where sizes differ by rank.

    Args:
        tensor_list: one contiguous tensor for each rank; tensor_list[r] has rank r's number of elements, on every rank.
        tensor: contiguous, with as many elements as this rank's tensor in the list.

    Example:
        parts = [torch.empty(length) for length in lengths]
        comm.all_gather_v(parts, x, async_op=False)
    """
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
    """Copies the `input` of rank r into piece r of `output`, which has get_size() equal pieces.

    Args:
        output: contiguous, with get_size() times as many elements as `input`. `input` may be this rank's piece of it.
        input: contiguous, with the same number of elements on all ranks.

    Example:
        output = x.new_empty(comm.get_size() * len(x), *x.shape[1:])
        comm.all_gather_single(output, x, async_op=False)
    """
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

    Args:
        output_tensor_list: on the root, one contiguous tensor for each rank, like input_tensor. Ignored on other ranks:
            pass [] or None.
        input_tensor: contiguous, with the same number of elements on all ranks.
        root: the rank that gets the tensors.

    Example:
        parts = [torch.empty_like(x) for _ in range(comm.get_size())] if comm.get_rank() == 0 else []
        comm.gather(parts, x, root=0, async_op=False)
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
    """Copies the `input` of rank r into piece r of the `output` of rank `root`.

    Args:
        output: on the root, contiguous, with get_size() times as many elements as `input`. Other ranks may pass None.
        input: contiguous, with the same number of elements on all ranks.
        root: the rank that gets the pieces.

    Example:
        output = x.new_empty(comm.get_size() * len(x)) if comm.get_rank() == 0 else None
        comm.gather_single(output, x, root=0, async_op=False)
    """
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
    """Reduces input_list[r] over all ranks into the `output` of rank r.

    Args:
        output: contiguous, with the same number of elements on all ranks.
        input_list: one contiguous tensor for each rank, like `output`.
        op: the reduction.

    Example:
        comm.reduce_scatter(output, list(x.chunk(comm.get_size())), ReduceOp.SUM, async_op=False)
    """
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
    """Reduces input_list[r] over all ranks into the `output` of rank r, where sizes differ by rank.

    Args:
        output: contiguous, with as many elements as this rank's tensor in the list.
        input_list: one contiguous tensor for each rank; input_list[r] has the number of elements of rank r's `output`,
            on every rank.
        op: the reduction.

    Example:
        comm.reduce_scatter_v(output, list(x.split(lengths)), ReduceOp.SUM, async_op=False)
    """
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
    """Reduces piece r of `input` over all ranks into the `output` of rank r.

    Args:
        output: contiguous, with the same number of elements on all ranks. It may be this rank's piece of `input`.
        input: contiguous, with get_size() times as many elements: one piece for each rank.
        op: the reduction.

    Example:
        comm.reduce_scatter_single(x.new_empty(len(x) // comm.get_size()), x, ReduceOp.SUM, async_op=False)
    """
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

    Args:
        output_tensor: contiguous, with the same number of elements on all ranks.
        input_tensor_list: on the root, one contiguous tensor for each rank, like output_tensor. Ignored on other ranks:
            pass [] or None.
        root: the rank whose tensors are copied.

    Example:
        parts = list(x.chunk(comm.get_size())) if comm.get_rank() == 0 else []
        comm.scatter(output, parts, root=0, async_op=False)
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
    """Copies rank r's input_tensor_list[this rank] into output_tensor_list[r].

    Args:
        output_tensor_list: one contiguous tensor for each rank. Sizes may differ by pair of ranks.
        input_tensor_list: one contiguous tensor for each rank; input_tensor_list[r] has the number of elements of
            output_tensor_list[this rank] of rank r.

    Example:
        outputs = [torch.empty_like(part) for part in parts]
        comm.all_to_all(outputs, parts, async_op=False)
    """
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
    """Copies the piece of rank r's `input` that belongs to this rank into piece r of `output`.

    Args:
        output: contiguous, with as many elements as `input`.
        input: contiguous; its number of elements divides by get_size(), and is equal on all ranks.

    Example:
        comm.all_to_all_single(torch.empty_like(x), x, async_op=False)
    """
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
    """Exchanges pieces of different sizes, in slices of dimension 0.

    Args:
        output: contiguous.
        input: contiguous, with the same dtype and sizes of the other dimensions.
        output_split_sizes: number of slices that are received from each rank; they add up to dimension 0 of `output`.
            [] means equal pieces.
        input_split_sizes: number of slices that go to each rank; they add up to dimension 0 of `input`. [] means equal
            pieces.

    Example:
        sizes = [comm.get_rank() + r for r in range(comm.get_size())]
        comm.all_to_all_v_single(torch.empty_like(x), x, sizes, sizes, async_op=False)
    """
    return self._all_to_all_v_single(
        output, input, output_split_sizes, input_split_sizes, async_op, hints, timeout, options
    )
