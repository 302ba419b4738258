"""The methods of TorchCommWindow."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from torch import Tensor

from torch_overlap._C import InvalidTypeError, TorchComm, TorchCommWindow, TorchCommWindowAttr, TorchWork


def tensor_register(self: TorchCommWindow, tensor: Tensor, owning: bool = True) -> None:
    """Makes `tensor` this rank's part of the window. Collective; blocks.

    An error of one rank is raised on every rank; ranks that cannot reach each other's memory get UnsupportedError,
    which names a pair and why, unless the backend writes to it all the same (NCCL 2.29 or newer: docs/windows.md).

    Args:
        tensor: contiguous, of the same dtype and size on all ranks; from torch_overlap.symmetric_empty, or made under a
            torch.cuda.MemPool over get_mem_allocator(). (Ranks that are threads take any CPU tensor.)
        owning: the window keeps the tensor; with False the caller does.
    """
    self._tensor_register(tensor, owning)


def tensor_deregister(self: TorchCommWindow) -> None:
    """Takes back tensor_register. Collective; blocks. Graphs must not be running.

    Waits for this window's operations, for the communicator's timeout at most, then for all ranks: nobody writes to the
    tensor any more.
    """
    self._tensor_deregister()


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
    """Copies `tensor` to the elements from `offset` on of the tensor of rank `dst_rank`. Signals it only if `signal`.

    Args:
        tensor: contiguous, of the window's dtype, anywhere on the device.
        offset: in elements.
        signal: signal(dst_rank) follows, and the work that is returned is done when both are.
        peer_rank, target_offset_nelems: torchcomms' names of dst_rank and offset.
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
    """Adds one to the signals that rank `dst_rank` (also called peer_rank) has of this one."""
    to = _either("signal", "dst_rank", dst_rank, "peer_rank", peer_rank)
    return self._signal(to, async_op, hints, timeout)


def wait_signal(
    self: TorchCommWindow,
    peer_rank: int,
    async_op: bool = False,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
) -> TorchWork:
    """Waits for a signal of rank `peer_rank` that no wait has consumed, and consumes it."""
    return self._wait_signal(peer_rank, async_op, hints, timeout)


def map_remote_tensor(self: TorchCommWindow, rank: int) -> Tensor:
    """The tensor of `rank`, in this process: it keeps the memory. Only signals order what is done with it."""
    return self._map_remote_tensor(rank)


def get_attr(self: TorchCommWindow, peer_rank: int) -> TorchCommWindowAttr:
    """How this rank gets at the part of `peer_rank`."""
    return self._get_attr(peer_rank)


def get_size(self: TorchCommWindow) -> int:
    """Bytes of one rank's part."""
    return self._get_size()


def get_tensor(self: TorchCommWindow) -> Tensor:
    """This rank's tensor."""
    return self._get_tensor()


def get_name(self: TorchCommWindow) -> str:
    """The name by which operators find it."""
    return self._get_name()


def get_comm(self: TorchCommWindow) -> TorchComm:
    """The communicator."""
    return self._get_comm()


def _either(op: str, name: str, value: int | None, other_name: str, other: int | None) -> int:
    """One of two names of an argument: ours, and the one that torchcomms gives it."""
    if value is None and other is not None:
        return other
    if value is None or other is not None:
        got = "it twice" if other is not None else "none"
        raise InvalidTypeError(f"{op}: expected {name} (also called {other_name}) once, got {got}")
    return value
