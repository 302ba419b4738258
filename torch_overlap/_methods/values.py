"""Constructors of the value classes, and lookup functions for communicators and windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch import Tensor

from torch_overlap import _C
from torch_overlap._C import CommOptions, P2POp, P2POpType, RedOpType, ReduceOp, TorchComm, TorchCommWindow


def constructor_of_p2p(init: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: P2POp, type: P2POpType, tensor: Tensor, peer: int, tag: int = 0) -> None:
        init(self, type, tensor, peer, tag)

    return __init__


def constructor_of_reduce_op(init: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: ReduceOp, opType: RedOpType) -> None:
        init(self, opType)

    return __init__


def constructor_of_options(init: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, hints: Mapping[str, str] | None = None, timeout: timedelta | None = None) -> None:
        init(self, hints, timeout)

    return __init__


def constructor_of_tagged_options(init: Callable[..., None]) -> Callable[..., None]:
    def __init__(
        self: Any, hints: Mapping[str, str] | None = None, timeout: timedelta | None = None, tag: int = 0
    ) -> None:
        init(self, hints, timeout, tag)

    return __init__


def constructor_of_comm_options(init: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: CommOptions) -> None:
        init(self)

    return __init__


def PREMUL_SUM(factor: float | Tensor) -> ReduceOp:
    """Returns a sum reduction of the inputs, each multiplied by `factor`.

    Args:
        factor: a number, or a one-element tensor of the reduced tensor's dtype and device, which is read when the
            operation runs.
    """
    return ReduceOp._premul_sum(factor)


def get_comm(name: str) -> TorchComm:
    """Returns the live communicator of this name in the process.

    Args:
        name: as TorchComm.get_name() returns it.

    Raises:
        StateError: it was finalized.
        InvalidValueError: no such communicator exists, nor is it among the latest 1000 finalized ones.
    """
    return _C._get_comm(name)


def get_window(name: str) -> TorchCommWindow:
    """Returns the live window of this name that this rank made.

    Args:
        name: as TorchCommWindow.get_name() returns it.

    Raises:
        InvalidValueError: there is no such window.
    """
    return _C._get_window(name)
