"""Collectives of Python objects, serialized to bytes that the communicator sends.

Objects are written by torch.save and read by torch.load. With weights_only=True (the default) only tensors, numbers,
strings and containers of them are read, so a peer cannot run code here; weights_only=False reads any object. With
TORCHCOMMS_SERIALIZATION=pickle every rank uses pickle instead, and weights_only is ignored.

Every function blocks until its objects have arrived. It raises StateError while a CUDA graph captures the current
stream.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from datetime import timedelta
from typing import Any

import torch

from torch_overlap import _C
from torch_overlap._C import InvalidTypeError, InvalidValueError, TorchComm, UnsupportedError

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]


def _uses_pickle() -> bool:
    value = _C._env.serialization()
    if value not in ("torch_save", "pickle"):
        raise InvalidValueError(f"TORCHCOMMS_SERIALIZATION: expected torch_save or pickle, got {value!r}")
    return bool(value == "pickle")


def _to_bytes(obj: Any, device: torch.device) -> torch.Tensor:
    if _uses_pickle():
        data = pickle.dumps(obj)
    else:
        buffer = io.BytesIO()
        torch.save(obj, buffer)
        data = buffer.getvalue()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _from_bytes(tensor: torch.Tensor, weights_only: bool) -> Any:
    if tensor.numel() == 0:  # every object has bytes: none was sent
        raise UnsupportedError(
            "objcol: expected the object of another rank, got nothing; the backend 'fake' has no other ranks"
        )
    host = tensor.cpu()
    data = ctypes.string_at(host.data_ptr(), host.numel())
    if _uses_pickle():
        return pickle.loads(data)
    return torch.load(io.BytesIO(data), weights_only=weights_only)


def _check_root(op: str, comm: TorchComm, root: object) -> None:
    if not isinstance(root, int):
        raise InvalidTypeError(f"{op}: expected a rank as an int, got {root!r} ({type(root).__name__})")
    if not 0 <= root < comm.get_size():
        raise InvalidValueError(f"{op}: expected a rank in [0, {comm.get_size()}), got {root}")


def _check_length(op: str, what: str, got: int, expected: int) -> None:
    if got != expected:
        raise InvalidValueError(f"{op}: expected {expected} objects as {what}, got {got}")


def _sizes(comm: TorchComm, mine: int, timeout: timedelta | None) -> list[int]:
    """Returns the number of bytes of each rank."""
    device = comm.get_device()
    sizes = torch.empty(comm.get_size(), dtype=torch.int64, device=device)
    comm.all_gather_single(sizes, torch.tensor([mine], dtype=torch.int64, device=device), False, timeout=timeout).wait()
    return [int(size) for size in sizes.tolist()]


def all_gather_object(
    comm: TorchComm, object_list: list[Any], obj: Any, timeout: timedelta | None = None, weights_only: bool = True
) -> None:
    """Copies the `obj` of rank r into object_list[r]. The list has one element for each rank."""
    _C._refuse_capture("all_gather_object", comm)
    _check_length("all_gather_object", "object_list", len(object_list), comm.get_size())
    mine = _to_bytes(obj, comm.get_device())
    parts = [mine.new_empty(size) for size in _sizes(comm, mine.numel(), timeout)]
    comm.all_gather_v(parts, mine, False, timeout=timeout).wait()
    object_list[:] = [_from_bytes(part, weights_only) for part in parts]


def gather_object(
    comm: TorchComm,
    obj: Any,
    root: int,
    object_gather_list: list[Any] | None = None,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Copies the `obj` of rank r into object_gather_list[r] of rank `root`. The list is ignored on other ranks."""
    _C._refuse_capture("gather_object", comm)
    _check_root("gather_object", comm, root)
    at_root = comm.get_rank() == root
    if at_root:
        given = -1 if object_gather_list is None else len(object_gather_list)
        _check_length("gather_object", "object_gather_list", given, comm.get_size())
    mine = _to_bytes(obj, comm.get_device())
    sizes = _sizes(comm, mine.numel(), timeout)
    # The pieces of a gather are equal: every rank pads to the longest.
    padded = mine.new_zeros(max(sizes))
    padded[: mine.numel()] = mine
    gathered = mine.new_empty(max(sizes) * comm.get_size()) if at_root else None
    comm.gather_single(gathered, padded, root, False, timeout=timeout).wait()
    if gathered is not None and object_gather_list is not None:
        rows = gathered.view(comm.get_size(), -1)
        object_gather_list[:] = [_from_bytes(row[:size], weights_only) for row, size in zip(rows, sizes, strict=True)]


def send_object_list(comm: TorchComm, object_list: list[Any], dst: int, timeout: timedelta | None = None) -> None:
    """Sends the objects to rank `dst`, whose recv_object_list must have the same length."""
    _C._refuse_capture("send_object_list", comm)
    _check_root("send_object_list", comm, dst)
    parts = [_to_bytes(obj, comm.get_device()) for obj in object_list]
    sizes = torch.tensor([len(parts), *(part.numel() for part in parts)], dtype=torch.int64, device=comm.get_device())
    comm.send(sizes[:1].clone(), dst, False, timeout=timeout).wait()
    if parts:
        comm.send(sizes[1:].clone(), dst, False, timeout=timeout).wait()
        comm.send(torch.cat(parts), dst, False, timeout=timeout).wait()


def recv_object_list(
    comm: TorchComm,
    object_list: list[Any],
    src: int,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Receives the objects of rank `src` into the list, which must have the same length."""
    _C._refuse_capture("recv_object_list", comm)
    _check_root("recv_object_list", comm, src)
    count = torch.empty(1, dtype=torch.int64, device=comm.get_device())
    comm.recv(count, src, False, timeout=timeout).wait()
    received: list[Any] = []
    if int(count) > 0:
        sizes = torch.empty(int(count), dtype=torch.int64, device=comm.get_device())
        comm.recv(sizes, src, False, timeout=timeout).wait()
        data = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=comm.get_device())
        comm.recv(data, src, False, timeout=timeout).wait()
        received = [_from_bytes(part, weights_only) for part in torch.split(data, sizes.tolist())]
    _check_length("recv_object_list", "object_list", len(object_list), len(received))
    object_list[:] = received


def broadcast_object_list(
    comm: TorchComm, object_list: list[Any], root: int, timeout: timedelta | None = None, weights_only: bool = True
) -> None:
    """Copies the objects of `root`'s list into every rank's list. All lists have the same length."""
    _C._refuse_capture("broadcast_object_list", comm)
    _check_root("broadcast_object_list", comm, root)
    device = comm.get_device()
    at_root = comm.get_rank() == root
    parts = [_to_bytes(obj, device) for obj in object_list] if at_root else []
    # All ranks learn all lengths, so that a wrong one raises everywhere.
    lengths = _sizes(comm, len(object_list), timeout)
    for length in lengths:
        _check_length("broadcast_object_list", "object_list on every rank", length, lengths[root])
    if not object_list:
        return
    sizes = torch.tensor([part.numel() for part in parts] or [0] * len(object_list), dtype=torch.int64, device=device)
    comm.broadcast(sizes, root, False, timeout=timeout).wait()
    data = torch.cat(parts) if at_root else torch.empty(int(sizes.sum()), dtype=torch.uint8, device=device)
    comm.broadcast(data, root, False, timeout=timeout).wait()
    if not at_root:
        object_list[:] = [_from_bytes(part, weights_only) for part in torch.split(data, sizes.tolist())]


def scatter_object_list(
    comm: TorchComm,
    root: int,
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Copies element `rank` of rank `root`'s input list into scatter_object_output_list[0] of that rank."""
    _C._refuse_capture("scatter_object_list", comm)
    _check_root("scatter_object_list", comm, root)
    if not scatter_object_output_list:
        raise InvalidValueError(
            "scatter_object_list: expected scatter_object_output_list with a place, got an empty list"
        )
    device = comm.get_device()
    at_root = comm.get_rank() == root
    parts: list[torch.Tensor] = []
    if at_root:
        given = scatter_object_input_list or []
        _check_length("scatter_object_list", "scatter_object_input_list", len(given), comm.get_size())
        parts = [_to_bytes(obj, device) for obj in given]
    sizes = torch.tensor([part.numel() for part in parts] or [0] * comm.get_size(), dtype=torch.int64, device=device)
    comm.broadcast(sizes, root, False, timeout=timeout).wait()
    longest = int(sizes.max())
    mine = torch.empty(longest, dtype=torch.uint8, device=device)
    padded = [torch.cat([part, part.new_zeros(longest - part.numel())]) for part in parts]
    comm.scatter(mine, padded, root, False, timeout=timeout).wait()
    scatter_object_output_list[0] = _from_bytes(mine[: int(sizes[comm.get_rank()])], weights_only)
