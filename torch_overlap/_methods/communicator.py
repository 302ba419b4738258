"""The methods of TorchComm that are no operations."""

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
    """The rank of this end."""
    return self._get_rank()


def get_size(self: TorchComm) -> int:
    """The number of ranks."""
    return self._get_size()


def get_name(self: TorchComm) -> str:
    """The name: unique among the live communicators of this process."""
    return self._get_name()


def get_device(self: TorchComm) -> torch.device:
    """The device that tensors must be on."""
    return self._get_device()


def get_backend(self: TorchComm) -> str:
    """The backend's name."""
    return self._get_backend()


def get_backend_version(self: TorchComm) -> str:
    """The version of the library underneath."""
    return self._get_backend_version()


def get_options(self: TorchComm) -> CommOptions:
    """A copy of the options in force, as CommOptions."""
    return self._get_options()


def get_ranks_in_world(self: TorchComm) -> list[int]:
    """The members' ranks in the communicator that new_comm made, by rank."""
    return self._get_ranks_in_world()


def get_native_handle(self: TorchComm) -> int:
    """The address of the ncclComm_t; 0 for a backend without one."""
    return self._get_native_handle()


def split(
    self: TorchComm,
    ranks: Sequence[int],
    name: str | None = None,
    hints: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
) -> TorchComm | None:
    """Makes a communicator of some of the ranks. Collective over this communicator.

    Args:
        ranks: the members; position becomes the rank in the new one. Ranks of different groups pass different lists in
            the same call; an empty list gives None. A list without the calling rank, with a rank twice or out of
            range, or unlike the lists of its members, raises on every rank.
        name: generated if None.
        hints, timeout: over the options, which are this communicator's.
    """
    return self._split(ranks, name, hints, timeout)


def finalize(self: TorchComm) -> None:
    """Waits for all operations, for the communicator's timeout at most, and frees it. Collective.

    Afterwards every operation raises StateError, and so does what would have no effect: a second finalize,
    set_timeout, set_hints, a hook's registration, batch_op_create, a window's map_remote_tensor and get_attr. What
    tells of the communicator, abort, and a window's tensor_deregister still work. The native communicator lives on
    until the last CUDA graph that captured it is gone.
    """
    self._finalize()


def abort(self: TorchComm) -> None:
    """Ends all operations at once, on this rank, and runs the abort hooks. Never ends the process."""
    self._abort()


def is_aborted(self: TorchComm) -> bool:
    """True once abort() has ended this end; on NCCL, also once an operation has failed.

    Asks no other rank; any thread.
    """
    return self._is_aborted()


def is_abort_supported(self: TorchComm) -> bool:
    """True if abort() ends operations that are under way, which it does on every backend here."""
    return self._is_abort_supported()


def is_finalized(self: TorchComm) -> bool:
    """True once finalize() was called here, also while it still waits. Asks no other rank; any thread."""
    return self._is_finalized()


def get_init_handle(self: TorchComm) -> str:
    """The text that names this rank in reconfigure(), the same for the life of the object."""
    return self._get_init_handle()


def get_generation(self: TorchComm) -> int:
    """How often the members were changed."""
    return self._get_generation()


def reconfigure(
    self: TorchComm,
    uuid: int,
    init_handles: list[str] | tuple[str, ...] | Set[str],
    timeout: timedelta | None = None,
    hints: Mapping[str, str] | None = None,
) -> TorchWork:
    """Gives the communicator other members: fewer after a rank was lost, or more. Also after a failure or abort().

    Collective over the ranks whose handles are given. What is under way ends with an error; rank and size change; the
    object, its name, hooks and options stay. Blocks until all have come; the error then names who did not, and another
    call, with another uuid, may follow. Returns a work that is done.

    Needs new_comm(enable_reconfigure=True), and a store that has outlived the lost ranks. A new member makes its own
    end with new_comm(..., rank=0, size=1), the same name and the same store. Windows, CUDA graphs and process groups
    made before are of no use after it.

    Args:
        uuid: names the generation. Equal on all members, and never used before for this communicator.
        init_handles: what get_init_handle() gave on the members. In a list the position becomes the rank; of a set,
            those who were members together keep their order and new ones come after.
        timeout: None is the communicator's.
        hints: as for set_hints().
    """
    return self._reconfigure(uuid, init_handles, timeout, hints)


def set_timeout(self: TorchComm, timeout: timedelta) -> None:
    """Sets how long an operation may take, from the next one on."""
    self._set_timeout(timeout)


def set_hints(self: TorchComm, hints: Mapping[str, str]) -> None:
    """Puts hints over those given before.

    Those that the backend's library takes when it makes a communicator have their effect in later children, and after
    reconfigure(). One warning names those that the backend does not know; a value that it cannot read raises, and
    changes nothing.
    """
    self._set_hints(hints)


def batch_op_create(self: TorchComm) -> BatchSendRecv:
    """An empty BatchSendRecv."""
    return self._batch_op_create()


def new_window(self: TorchComm, tensor: Tensor | None = None) -> TorchCommWindow:
    """A window of this communicator, with `tensor` registered if one is given.

    Collective: all ranks pass one, or none.
    """
    return self._new_window(tensor)


def get_mem_allocator(self: TorchComm) -> Any:
    """torch_overlap.get_mem_allocator of this communicator's backend."""
    from torch_overlap.symmetric import get_mem_allocator

    return get_mem_allocator(self.get_backend())


def tensor_register(self: TorchComm, tensor: Tensor) -> None:
    """Tells NCCL of memory that will be in many operations (ncclCommRegister).

    Local; without effect on other backends. Deregister before the memory goes.
    """
    self._tensor_register(tensor)


def tensor_deregister(self: TorchComm, tensor: Tensor) -> None:
    """Takes back tensor_register."""
    self._tensor_deregister(tensor)


def register_pre_hook(self: TorchComm, callback: Callable[[OpName, int, Any], object]) -> RemovableHandle:
    """Calls callback(name: OpName, op_id: int, args) before every operation.

    `args` is of the operation's class in torch_overlap.hooks. Hooks run in the order of registration. An exception
    stops the operation before anything is sent.
    """
    return self._register_pre_hook(callback)


def register_post_hook(self: TorchComm, callback: Callable[[int, Any], object]) -> RemovableHandle:
    """Calls callback(op_id: int, args) when an operation was issued or failed (`args.error`).

    Once for each time that the pre-hooks ran.
    """
    return self._register_post_hook(callback)


def register_abort_hook(self: TorchComm, callback: Callable[[], object]) -> RemovableHandle:
    """Calls callback() on abort(), and before a timeout or an error ends the process, then on another thread."""
    return self._register_abort_hook(callback)
