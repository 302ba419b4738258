"""Methods of the torch.distributed backend and its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
from torch import Tensor

from torch_overlap._C import BackendOptions, TorchComm, TorchCommWindow, _BackendWrapper


def constructor_of_options(init: Callable[..., None]) -> Callable[..., None]:
    def __init__(
        self: BackendOptions,
        *,
        backends: Mapping[str, str] | None = None,
        hints: Mapping[str, str] | None = None,
        is_high_priority_stream: bool | None = None,
        abort_process_on_timeout_or_error: bool | None = None,
        timeout: timedelta | None = None,
        cuda_hints: Mapping[str, str] | None = None,
    ) -> None:
        init(self, backends, hints, is_high_priority_stream, abort_process_on_timeout_or_error, timeout, cuda_hints)

    return __init__


def constructor_of_wrapper(init: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: _BackendWrapper, comm: TorchComm) -> None:
        init(self, comm)

    return __init__


def get_comm(self: _BackendWrapper, device: torch.device | None = None) -> TorchComm:
    """Returns the communicator for tensors on `device`. Creates it if necessary, which is collective.

    Args:
        device: the device of the tensors. None means that of the only communicator.

    Raises:
        InvalidValueError: device is None and the group has several communicators.
        InvalidTypeError: the group does not serve the device.
        OperationTimeoutError: a rank did not arrive in time.
    """
    return self._get_comm(device)


def new_window(self: _BackendWrapper, tensor: Tensor | None = None) -> TorchCommWindow:
    """Makes a window over the ranks of the group. Collective. See TorchComm.new_window.

    Args:
        tensor: this rank's part, or None.

    Raises:
        InvalidValueError: tensor is None and the group has several communicators.
        UnsupportedError: the backend has no windows, or ranks cannot reach each other's memory.
    """
    return self._get_comm(None if tensor is None else tensor.device).new_window(tensor)
