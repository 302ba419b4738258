"""Methods of TorchComm that are not operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from torch_overlap._C import (
    BatchSendRecv,
    CommOptions,
    OpName,
    RemovableHandle,
    TorchComm,
    TorchCommWindow,
    TorchWork,
)


def get_rank(self: TorchComm) -> int:
    """Returns this process's rank in the communicator.

    Raises:
        StateError: the communicator was finalized.
    """


def get_size(self: TorchComm) -> int:
    """Returns the number of ranks.

    Raises:
        StateError: the communicator was finalized.
    """


def get_name(self: TorchComm) -> str:
    """Returns the name, which is unique among the live communicators of this process."""


def get_device(self: TorchComm) -> torch.device:
    """Returns the device that tensors must be on."""


def get_backend(self: TorchComm) -> str:
    """Returns the backend's name."""


def get_backend_version(self: TorchComm) -> str:
    """Returns the version of the communication library."""


def get_options(self: TorchComm) -> CommOptions:
    """Returns a copy of the effective options, as CommOptions."""


def get_ranks_in_world(self: TorchComm) -> list[int]:
    """Returns the members' ranks in the communicator that new_comm made, in rank order."""


def get_native_handle(self: TorchComm) -> int:
    """Returns the address of the ncclComm_t; 0 for a backend without one.

    Raises:
        StateError: the communicator was finalized or aborted.
    """


def split(
    self: TorchComm,
    ranks: Sequence[int],
    name: str | None = None,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
) -> TorchComm | None:
    """Makes a communicator of some of the ranks. Collective over this communicator; blocks the host.

    Args:
        ranks: the members; the position becomes the rank in the new communicator. Ranks of different groups pass
            different lists in the same call; an empty list returns None.
        name: generated if None.
        hints: override those of this communicator, whose options the new one inherits.
        timeout: overrides that of this communicator.

    Returns:
        The new communicator, or None on a rank with an empty list.

    Raises:
        InvalidValueError: on every rank, if a list lacks the calling rank, has a rank twice or out of range, or differs
            from the lists of its members; or the name is taken.
        StateError: the communicator was finalized, aborted or has failed, or a CUDA graph captures the current stream.
        OperationTimeoutError: a rank did not call it in time.

    Example:
        row = comm.get_rank() // 2
        pair = comm.split([2 * row, 2 * row + 1], name="pair")
    """
    return self._split(ranks, name, hints, timeout)


def finalize(self: TorchComm) -> None:
    """Waits for all operations, for at most the communicator's timeout, and frees the communicator. Collective.

    Blocks the host until the device has run the operations.

    Afterwards every operation raises StateError, and so do calls that would have no effect: a second finalize,
    set_timeout, set_hints, a hook's registration, batch_op_create, a window's map_remote_tensor and get_attr. Queries
    of the communicator, abort, and a window's tensor_deregister still work. The native communicator is kept until the
    last CUDA graph that captured it is destroyed.

    Raises:
        StateError: it was finalized before, an operation had failed, or a CUDA graph captures the current stream.
        OperationTimeoutError: the operations did not end in time.

    Example:
        comm = new_comm("nccl", "cuda")
        comm.finalize()
    """


def abort(self: TorchComm) -> None:
    """Ends all operations immediately, on this rank, and runs the abort hooks. Never ends the process."""


def is_aborted(self: TorchComm) -> bool:
    """Returns True after abort() on this rank; on NCCL, also after an operation has failed.

    Does not query other ranks. Callable from any thread.
    """


def is_abort_supported(self: TorchComm) -> bool:
    """Returns True if abort() ends operations in flight, which it does on every built-in backend."""


def is_finalized(self: TorchComm) -> bool:
    """Returns True after finalize() was called on this rank, also while it still waits. Callable from any thread.

    Does not query other ranks.
    """


def get_init_handle(self: TorchComm) -> str:
    """Returns the text that identifies this rank in reconfigure(). It is constant for the life of the object."""


def get_generation(self: TorchComm) -> int:
    """Returns the number of times that the members were changed."""


def reconfigure(
    self: TorchComm,
    uuid: int,
    init_handles: list[str] | tuple[str, ...] | Set[str],
    timeout: timedelta | None = None,
    hints: Mapping[str, str] | None = None,
) -> TorchWork:
    """Changes the members of the communicator: fewer after a rank was lost, or more. Also after a failure or abort().

    Collective over the ranks whose handles are given. Operations in flight end with an error. Rank and size change; the
    object, its name, hooks and options stay. Blocks until all members have called it; after a timeout the error names
    those that did not, and another call, with another uuid, may follow.

    Needs new_comm(enable_reconfigure=True), and a store that has outlived the lost ranks. A new member creates its
    communicator with new_comm(..., rank=0, size=1), the same name and the same store. Windows, CUDA graphs and process
    groups made before are unusable afterwards.

    Args:
        uuid: identifies the generation. Equal on all members, and never used before for this communicator.
        init_handles: the results of get_init_handle() of the members. In a list the position becomes the rank. In a
            set, previous members keep their order and new ones follow.
        timeout: None means the communicator's.
        hints: as for set_hints().

    Returns:
        A completed work.

    Raises:
        InvalidValueError: a handle is unknown or missing, or the uuid was used before.
        StateError: the communicator was made without enable_reconfigure, or was finalized.
        OperationTimeoutError: a member did not call it in time.

    Example:
        comm.abort()
        comm.reconfigure(uuid=step, init_handles=handles_of_survivors)
    """
    return self._reconfigure(uuid, init_handles, timeout, hints)


def set_timeout(self: TorchComm, timeout: timedelta) -> None:
    """Sets the timeout of an operation, from the next operation on.

    Args:
        timeout: above zero.

    Raises:
        InvalidValueError: the timeout is zero or negative.
        StateError: the communicator was finalized.
    """
    self._set_timeout(timeout)


def set_hints(self: TorchComm, hints: Mapping[str, str]) -> None:
    """Adds hints, overriding those given before.

    Hints that the backend's library reads at communicator creation take effect in later children, and after
    reconfigure(). One warning names the hints that the backend does not know.

    Args:
        hints: strings for the backend.

    Raises:
        InvalidValueError: the backend cannot parse a value. Nothing was changed.
        StateError: the communicator was finalized.
    """
    self._set_hints(hints)


def batch_op_create(self: TorchComm) -> BatchSendRecv:
    """Returns an empty BatchSendRecv, to which sends and receives are added.

    Raises:
        StateError: the communicator was finalized.

    Example:
        batch = comm.batch_op_create()
        batch.send(x, right)
        batch.recv(y, left)
        batch.issue(async_op=True).wait()
    """


def new_window(self: TorchComm, tensor: Tensor | None = None) -> TorchCommWindow:
    """Returns a window of this communicator, with `tensor` registered if one is given.

    Collective: either all ranks pass a tensor, or none does. With a tensor it blocks the host.

    Args:
        tensor: this rank's part; see TorchCommWindow.tensor_register.

    Raises:
        UnsupportedError: the backend has no windows, or ranks cannot reach each other's memory.
        InvalidValueError, InvalidTypeError: a rank's tensor does not fit; on every rank.
        StateError: the communicator was finalized, aborted or has failed, or a CUDA graph captures the current stream.
        OperationTimeoutError: a rank did not call it in time.

    Example:
        window = comm.new_window(symmetric_empty(1024, torch.float32, comm))
    """
    return self._new_window(tensor)


def get_mem_allocator(self: TorchComm) -> Any:
    """Returns torch_overlap.get_mem_allocator of this communicator's backend.

    Raises:
        UnsupportedError: the backend has none.
    """
    from torch_overlap.symmetric import get_mem_allocator

    return get_mem_allocator(self.get_backend())


def tensor_register(self: TorchComm, tensor: Tensor) -> None:
    """Registers memory that many operations will use with NCCL (ncclCommRegister).

    Local; a no-op on other backends. Deregister before the memory is freed.

    Args:
        tensor: contiguous, on the communicator's device.

    Raises:
        InvalidValueError: the memory is registered already.
        InvalidTypeError: tensor is on another device.
        StateError: the communicator was finalized, aborted or has failed, or a CUDA graph captures the current stream.
    """
    self._tensor_register(tensor)


def tensor_deregister(self: TorchComm, tensor: Tensor) -> None:
    """Reverts tensor_register.

    Args:
        tensor: as it was registered.

    Raises:
        InvalidValueError: the memory is not registered.
    """
    self._tensor_deregister(tensor)


def register_pre_hook(self: TorchComm, callback: Callable[[OpName, int, Any], object]) -> RemovableHandle:
    """Calls `callback` before every operation.

    Hooks run in the order of registration. An exception stops the operation before anything is sent.

    Args:
        callback: called as callback(name: OpName, op_id: int, args); `args` has the operation's class in
            torch_overlap.hooks.

    Returns:
        A handle whose remove() removes the hook.

    Raises:
        StateError: the communicator was finalized.
    """
    return self._register_pre_hook(callback)


def register_post_hook(self: TorchComm, callback: Callable[[int, Any], object]) -> RemovableHandle:
    """Calls `callback` after an operation was issued or failed (`args.error`).

    It runs once for each time that the pre-hooks ran.

    Args:
        callback: called as callback(op_id: int, args).

    Returns:
        A handle whose remove() removes the hook.

    Raises:
        StateError: the communicator was finalized.
    """
    return self._register_post_hook(callback)


def register_abort_hook(self: TorchComm, callback: Callable[[], object]) -> RemovableHandle:
    """Calls `callback` on abort(), and, on another thread, before a timeout or an error ends the process.

    Args:
        callback: called without arguments.

    Returns:
        A handle whose remove() removes the hook.

    Raises:
        StateError: the communicator was finalized.
    """
    return self._register_abort_hook(callback)
