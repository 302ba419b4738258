"""Communicators of the devices along a mesh axis."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax
import numpy as np
from jax.experimental import multihost_utils

from torch_overlap.jax._ffi import size_in_shard_map
from torch_overlap.jax._library import call, register_handlers

_ADDRESS_BYTES = 256
_DEFAULT_STORE_TIMEOUT_MS = 600_000


@dataclass(frozen=True)
class Axis:
    """A mesh axis with communicators. Functions take it, or its name."""

    id: int
    name: str
    size: int

    def close(self) -> None:
        """Finalizes the communicators and destroys the buffers. All processes call it; no program may run."""
        if _axes.get(self.name) == self:
            del _axes[self.name]
        _devices.pop(self.id, None)
        call("remove_axis", self.id)


_axes: dict[str, Axis] = {}
_devices: dict[int, Any] = {}  # by the id of the axis


def find_axis(op: str, axis: Axis | str) -> Axis:
    """Returns an axis by its name. Raises ValueError for a name without bootstrap(), and in shard_map over a mesh that
    has another number of devices along the axis."""
    found = axis if isinstance(axis, Axis) else _axes.get(axis) if isinstance(axis, str) else None
    if found is None:
        raise ValueError(
            f"{op}: expected axis to be one of {sorted(_axes)}, got {axis!r}. "
            "Call torch_overlap.jax.bootstrap(mesh, axis) first."
        )
    size = size_in_shard_map(found.name)
    if size not in (None, found.size):
        raise ValueError(
            f"{op}: expected a mesh with {found.size} devices along '{found.name}', as that of bootstrap(), got "
            f"{size}. Call bootstrap() with the mesh of the program."
        )
    return found


def check_mesh(op: str, axis: Axis, mesh: Any) -> None:
    """Raises ValueError unless the devices of `mesh` along the axis are those of bootstrap(), in the same order."""
    if axis.name in mesh.axis_names and np.array_equal(_groups(mesh, axis.name), _devices.get(axis.id)):
        return
    raise ValueError(
        f"{op}: expected the mesh that bootstrap() was called with, got one of {dict(mesh.shape)} with other devices "
        f"along '{axis.name}', or in another order. Call bootstrap() with the mesh of the program."
    )


def _groups(mesh: Any, axis: str) -> Any:
    """Returns the ids of the devices: [sets that differ in their position on the axis alone, position]."""
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    return np.vectorize(lambda device: device.id)(devices.reshape(-1, devices.shape[-1]))


def bootstrap(
    mesh: jax.sharding.Mesh,
    axis: str,
    *,
    backend: str | None = None,
    store: str | None = None,
    timeout: float | None = None,
    command_buffers: bool | None = None,
) -> Axis:
    """Makes a communicator for each set of devices that differ in their position on `axis` alone.

    Every process calls it, outside of jit, before a program that uses the axis is compiled, and in the same order for
    several axes. The devices are either all in this process (CPU only), or one per process.

    Args:
        mesh: the mesh of the programs.
        axis: the name of one of its axes.
        backend: "nccl" on GPUs, "local" for CPU devices in one process and "gloo" for CPU processes, which are the
            defaults. "gloo" imports torch.
        store: where processes meet: "tcp://host" (process 0 serves a free port of that host), "tcp://host:port" (a
            TCPStore that exists) or "file:///path". Default: process 0, which serves jax's coordinator,
            serves it too, under the name of its host.
        timeout: seconds that a rank waits for another one, after the processes have met: until then JAX's own timeouts
            apply to the exchange of the store's address. Default: that of torch_overlap (TORCHCOMM_TIMEOUT_SECONDS).
        command_buffers: if True, XLA may capture collectives and overlapped products in CUDA graphs. One value for a
            process; None: that of the first call, where it is False.

    Raises:
        ValueError: the mesh has no such axis, or no device of this process; the timeout is not positive;
            `command_buffers` differs from the first call's, or is True and XLA_FLAGS lets commands of a command buffer
            run concurrently.
        RuntimeError: process 0 cannot serve the store.
        NotImplementedError: several devices in each of several processes, or several GPUs in one.
    """
    if axis not in mesh.axis_names:
        raise ValueError(
            f"bootstrap: expected axis to be one of {mesh.axis_names}, got {axis!r}. Name an axis of the mesh."
        )
    if command_buffers:
        _check_command_buffers(os.environ.get("XLA_FLAGS", ""))
    register_handlers(command_buffers)
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    size = devices.shape[-1]
    groups = devices.reshape(-1, size)
    me = jax.process_index()
    local = [
        (device, rank, group)
        for group, members in enumerate(groups)
        for rank, device in enumerate(members)
        if device.process_index == me
    ]
    is_one_process = all(device.process_index == me for device in mesh.devices.flat)
    is_cuda = mesh.devices.flat[0].platform != "cpu"
    if backend is None:
        backend = "nccl" if is_cuda else "local" if is_one_process else "gloo"
    if backend == "gloo":
        importlib.import_module("torch_overlap")  # the wheel of torch exports gloo to Python only
    if timeout is not None and not 0 < timeout < float("inf"):
        raise ValueError(f"bootstrap: expected timeout to be a positive number of seconds, got {timeout}. Pass one.")
    timeout_ms = 0 if timeout is None else max(1, round(timeout * 1000))
    handle = 0 if is_one_process else _open_store(store, mesh.devices.size, timeout_ms or _DEFAULT_STORE_TIMEOUT_MS)
    made = call(
        "add_axis",
        f"jax.{axis}.{len(_ids)}".encode(),
        backend.encode(),
        int(is_cuda),
        size,
        len(local),
        _numbers([device.local_hardware_id for device, _, _ in local]),
        _numbers([rank for _, rank, _ in local]),
        _numbers([group for _, _, group in local]),
        handle,
        timeout_ms,
    )
    _ids.append(made)
    _devices[made] = _groups(mesh, axis)
    _axes[axis] = Axis(made, axis, size)
    return _axes[axis]


_ids: list[int] = []


def _check_command_buffers(xla_flags: str) -> None:
    if re.search(r"--xla_gpu_command_buffer_scheduling_mode=CONCURRENT\b", xla_flags):
        raise ValueError(
            "bootstrap: expected XLA to keep the order of calls in command buffers, got "
            "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT in XLA_FLAGS. Remove it, or use LHS or SERIALIZE."
        )


def _numbers(values: Sequence[int]) -> Any:
    return (ctypes.c_int32 * len(values))(*values)


def _open_store(store: str | None, num_ranks: int, timeout_ms: int) -> int:
    """Returns the id of the store in which the processes meet."""
    parts = urlsplit(store or f"tcp://{_own_host()}")
    if parts.scheme == "file":
        folder = Path(parts.path).parent
        if not folder.is_dir():
            raise ValueError(f"bootstrap: expected store to be a file in a folder that exists, got {store!r}. Make it.")
        return call("file_store", parts.path.encode(), num_ranks, timeout_ms)
    if parts.scheme != "tcp" or not parts.hostname:
        raise ValueError(
            f"bootstrap: expected store to be tcp://host, tcp://host:port or file:///path, got {store!r}. "
            "Pass one of them."
        )
    if parts.port is not None:
        return call("tcp_store", parts.hostname.encode(), parts.port, timeout_ms)
    served, address = 0, b""
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            served = call("tcp_store", parts.hostname.encode(), 0, timeout_ms)
            address = f"{parts.hostname}:{call('store_port', served)}".encode()
        except Exception as error:  # the others wait for the address
            failure = error
    shared = np.zeros(_ADDRESS_BYTES, np.uint8)
    shared[: len(address)] = np.frombuffer(address, np.uint8)
    shared = np.asarray(multihost_utils.broadcast_one_to_all(shared)).astype(np.uint8)
    if not bytes(shared).rstrip(b"\0"):
        raise RuntimeError(
            f"bootstrap: expected process 0 to serve a store at '{parts.hostname}', got none: "
            f"{failure or 'its own error says why'}. Pass store='tcp://<a host name of process 0>'."
        ) from failure
    if served:
        return served
    host, _, port = bytes(shared).rstrip(b"\0").rpartition(b":")
    return call("tcp_store", host, int(port), timeout_ms)


def _own_host() -> str:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name
