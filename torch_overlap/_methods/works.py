"""Methods of TorchWork, BatchSendRecv and RemovableHandle."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from torch import Tensor

from torch_overlap._C import BatchP2POptions, BatchSendRecv, RemovableHandle, TorchWork, WorkStatus


def wait(self: TorchWork, timeout: timedelta | None = None) -> None:
    """Makes the results visible to subsequent work.

    CUDA: the current stream waits for the operation; the host does not. CPU: the thread blocks. With a `timeout` the
    thread blocks on every device, for at most that long. In a CUDA graph capture it adds the edge from the operation to
    the current stream, and is needed only if the captured work reads the result.

    Args:
        timeout: the longest that the thread blocks. None means the operation's own timeout.

    Raises:
        OperationTimeoutError: the operation did not end in time.
        Error: the operation failed; with its own error.

    Example:
        work = comm.all_reduce(x, ReduceOp.SUM, async_op=True)
        work.wait()
    """
    self._wait(timeout)


def wait_blocking(self: TorchWork, timeout: timedelta | None = None) -> None:
    """Blocks the thread, on every device, until the operation has ended.

    Args:
        timeout: the longest that the thread blocks. None means the operation's own timeout.

    Raises:
        OperationTimeoutError: the operation did not end in time. It goes on and may be waited for again.
        Error: the operation failed; with its own error.
    """
    self._wait_blocking(timeout)


def is_completed(self: TorchWork) -> bool:
    """Returns True once the operation has completed or failed. Queries the device; never blocks.

    False for an operation that was captured in a CUDA graph: it runs at each replay.
    """


def status(self: TorchWork) -> WorkStatus:
    """Returns the current WorkStatus."""


def exception(self: TorchWork) -> BaseException | None:
    """Returns the exception that the operation ended with, or None."""


def send(self: BatchSendRecv, tensor: Tensor, dst: int, tag: int = 0) -> None:
    """Adds a send to rank `dst`. Nothing is sent before issue().

    Args:
        tensor: contiguous, on the communicator's device.
        dst: any rank, also this one.
        tag: at least 0, and 0 on NCCL; the receiver has the same.
    """
    self._send(tensor, dst, tag)


def recv(self: BatchSendRecv, tensor: Tensor, src: int, tag: int = 0) -> None:
    """Adds a receive from rank `src`. Nothing is received before issue().

    Args:
        tensor: contiguous, on the communicator's device.
        src: any rank, also this one.
        tag: that of the sender.
    """
    self._recv(tensor, src, tag)


def issue(
    self: BatchSendRecv,
    async_op: bool,
    options: BatchP2POptions | None = None,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
) -> TorchWork:
    """Issues the added sends and receives as one operation, and empties the batch.

    None of them waits for another. On NCCL a message of a batch matches one of a batch of the other rank.

    Example:
        batch.issue(async_op=True).wait()
    """
    return self._issue(async_op, options, hints, timeout)


def remove(self: RemovableHandle) -> None:
    """Removes the hook. Allowed inside a hook call. No-op the second time."""
