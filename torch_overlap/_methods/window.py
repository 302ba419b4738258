"""Methods of TorchCommWindow."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from torch import Tensor

from torch_overlap._C import InvalidTypeError, TorchComm, TorchCommWindow, TorchCommWindowAttr, TorchWork


def tensor_register(self: TorchCommWindow, tensor: Tensor, owning: bool = True) -> None:
    """Registers `tensor` as this rank's part of the window. Collective; blocks the host.

    Args:
        tensor: contiguous, of the same dtype and size on all ranks; allocated by torch_overlap.symmetric_empty, or
            under a torch.cuda.MemPool over get_mem_allocator(). (Ranks that are threads accept any CPU tensor.)
        owning: if True the window keeps the tensor alive; otherwise the caller must.

    Raises:
        UnsupportedError: on every rank, naming a pair of ranks and the reason, if ranks cannot map each other's memory,
            unless the backend can write to it anyway (NCCL 2.29 or newer: docs/explanation/windows.md).
        InvalidValueError, InvalidTypeError: on every rank, if one rank's tensor does not fit.
        StateError: the window has a tensor, the communicator cannot be used, or a CUDA graph captures the stream.
        OperationTimeoutError: a rank did not call it in time.
    """
    self._tensor_register(tensor, owning)


def tensor_deregister(self: TorchCommWindow) -> None:
    """Reverts tensor_register. Collective; blocks the host. Graphs must not be running.

    Waits for this window's operations, for at most the communicator's timeout, then for all ranks. Afterwards no rank
    writes to the tensor.

    Raises:
        StateError: the window has no tensor.
        OperationTimeoutError: an operation of the window did not end, or a rank did not call it, in time.
    """


def put(
    self: TorchCommWindow,
    tensor: Tensor,
    dst_rank: int | None = None,
    offset: int | None = None,
    async_op: bool = False,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    *,
    peer_rank: int | None = None,
    target_offset_nelems: int | None = None,
    signal: bool = False,
) -> TorchWork:
    """Copies `tensor` into the tensor of rank `dst_rank`, starting at element `offset`. Signals it only if `signal`.

    The work keeps `tensor` alive until the copy has been made, also if the caller drops both.

    Args:
        tensor: contiguous, of the window's dtype, anywhere on the device.
        dst_rank: the rank to write to.
        offset: in elements.
        peer_rank: torchcomms' name of dst_rank.
        target_offset_nelems: torchcomms' name of offset.
        signal: also issues signal(dst_rank); the returned work completes when both have.

    Example:
        window.put(x, dst_rank=1, offset=0, async_op=True, signal=True).wait()
    """
    to = _either("put", "dst_rank", dst_rank, "peer_rank", peer_rank)
    at = _either("put", "offset", offset, "target_offset_nelems", target_offset_nelems)
    return self._put(tensor, to, at, async_op, hints, timeout, signal)


def signal(
    self: TorchCommWindow,
    dst_rank: int | None = None,
    async_op: bool = False,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    *,
    peer_rank: int | None = None,
) -> TorchWork:
    """Increments the count of signals that rank `dst_rank` has received from this rank, after all earlier puts to it.

    Args:
        dst_rank: the rank that gets the signal.
        peer_rank: torchcomms' name of dst_rank.

    Example:
        window.signal(1, async_op=False)
    """
    to = _either("signal", "dst_rank", dst_rank, "peer_rank", peer_rank)
    return self._signal(to, async_op, hints, timeout)


def wait_signal(
    self: TorchCommWindow,
    peer_rank: int,
    async_op: bool = False,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
) -> TorchWork:
    """Waits for a signal of rank `peer_rank` that no wait has consumed, and consumes it.

    Data that the rank put before the signal is then visible. The wait blocks no other operation.

    Args:
        peer_rank: the rank that signals.

    Example:
        window.wait_signal(0, async_op=False)
    """
    return self._wait_signal(peer_rank, async_op, hints, timeout)


def map_remote_tensor(self: TorchCommWindow, rank: int) -> Tensor:
    """Returns the tensor of `rank`, mapped into this process. It keeps the memory alive. Only signals order accesses.

    Args:
        rank: any rank, also this one.

    Raises:
        InvalidValueError: rank is out of range.
        UnsupportedError: the memory of `rank` cannot be mapped: get_attr(rank) is SEPARATE.
        StateError: the window has no tensor, or the communicator was finalized.
    """
    return self._map_remote_tensor(rank)


def get_attr(self: TorchCommWindow, peer_rank: int) -> TorchCommWindowAttr:
    """Returns how this rank accesses the part of `peer_rank`.

    Args:
        peer_rank: any rank.

    Raises:
        InvalidValueError: peer_rank is out of range.
        StateError: the window has no tensor, or the communicator was finalized.
    """
    return self._get_attr(peer_rank)


def get_size(self: TorchCommWindow) -> int:
    """Returns the size in bytes of one rank's part."""


def get_tensor(self: TorchCommWindow) -> Tensor:
    """Returns this rank's tensor."""


def get_name(self: TorchCommWindow) -> str:
    """Returns the name by which operators find the window."""


def get_comm(self: TorchCommWindow) -> TorchComm:
    """Returns the communicator."""


def _either(op: str, name: str, value: int | None, other_name: str, other: int | None) -> int:
    """Returns the argument that was given under one of its two names: ours, or torchcomms'."""
    if value is None and other is not None:
        return other
    if value is None or other is not None:
        got = "it twice" if other is not None else "none"
        raise InvalidTypeError(f"{op}: expected {name} (also called {other_name}) once, got {got}")
    return value
