"""Ready-to-use hooks, each with `register_with_comm(comm)`. See torch_overlap.compat.hooks."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from torch_overlap._C import (
    Error,
    InvalidTypeError,
    InvalidValueError,
    OpName,
    RemovableHandle,
    TorchComm,
    TorchWork,
    UnsupportedError,
    _CallLog,
    _FlightRecorder,
)
from torch_overlap._health import health


class FlightRecorderHook:
    """Flight recorder of chosen communicators.

    Args:
        max_entries: number of calls to keep, if isolated.
        isolated: if True, keeps separate records of the communicators that it is registered with, from registration on,
            and of those that their splits make.
            Otherwise shows the recorder of the process (torch_overlap.flight_recorder), which has the calls of all
            communicators.
    """

    def __init__(self, max_entries: int = 2048, isolated: bool = False) -> None:
        if max_entries < 1:
            raise InvalidValueError(f"FlightRecorderHook: expected max_entries >= 1, got {max_entries}")
        self._isolated = isolated
        self._recorder = _FlightRecorder(max_entries) if isolated else _FlightRecorder.of_process()

    def register_with_comm(self, comm: TorchComm) -> RemovableHandle | None:
        """Records the calls of `comm`. Returns None if not isolated: the process's recorder records them anyway."""
        return self._recorder.attach(comm) if self._isolated else None

    def dump_json(self, include_completed: bool = True) -> str:
        """Returns the records as JSON, like flight_recorder.dump_json()."""
        return self._recorder.json(include_completed)

    def dump_file(self, rank: int, include_completed: bool = True) -> str:
        """Writes a dump for the analyzer to TORCHCOMM_FR_DUMP_TEMP_FILE followed by `rank`, and returns the file
        name."""
        return self._recorder.dump_rank(rank, include_completed)

    def reset(self) -> None:
        """Removes all recorded calls."""
        self._recorder.reset()

    def is_enabled(self) -> bool:
        """Returns False if TORCHCOMM_FR_BUFFER_SIZE is 0 and the hook is not isolated."""
        return self._recorder.capacity > 0

    def size(self) -> int:
        """Returns the number of recorded calls."""
        return self._recorder.size()


class clog:
    """Structured log of calls, appended to a file: one JSON object per line, or torchcomms' text.

    Args:
        output: the file. Several processes may share one: a line is written whole.
        events: any of "Q" (queued: issued, with all its arguments), "S" (started), "E" (ended, with state and
            duration), "ALL", "NONE". Calls that a CUDA graph captures have only a Q.
        verbose: "buffers" adds the addresses of the tensors to Q.
        format: "json", or "text": torchcomms' format, version 1, for tools that read it. It has no W lines (a wait of
            the host) and no lines for replays of CUDA graphs.

    Lines of JSON contain "event", "time_ns", "comm", "rank", "id" (the same in all lines of one call) and "op".

    Raises:
        InvalidValueError: an event, a word of verbose or the format is unknown.
        InvalidTypeError: events or verbose is a string.
        Error: the file cannot be opened.
    """

    def __init__(
        self,
        output: str | os.PathLike[str],
        events: Sequence[str] = ("ALL",),
        verbose: Sequence[str] = (),
        format: str = "json",
    ) -> None:
        for what, given in (("events", events), ("verbose", verbose)):
            if isinstance(given, str):
                raise InvalidTypeError(f"clog: expected {what} as a list of strings, got '{given}'; write ['{given}']")
        if format not in ("json", "text"):
            raise InvalidValueError(f"clog: expected format 'json' or 'text', got '{format}'")
        self._log = _CallLog(os.fspath(output), list(events), list(verbose), format == "text")
        # The interpreter does not destroy objects of modules at exit: lines that are still buffered must be flushed.
        _open_logs.add(self)

    def register_with_comm(self, comm: TorchComm) -> RemovableHandle:
        """Logs the calls of `comm`, and of the communicators that its splits make, from now on."""
        return self._log.attach(comm)

    def flush(self) -> None:
        """Blocks until all lines so far are in the file."""
        self._log.flush()


_open_logs: weakref.WeakSet[clog] = weakref.WeakSet()


@atexit.register
def _flush_logs() -> None:
    for log in list(_open_logs):
        log.flush()


class HealthCheck:
    """Reports if the process can still communicate. See torch_overlap.health."""

    def __call__(self) -> dict[str, Any]:
        return health()

    def is_healthy(self) -> bool:
        """Returns True if all communicators are active and no operation is past its timeout."""
        return bool(health()["healthy"])


class NanCheckHook:
    """Raises if a NaN enters or leaves an operation.

    Args:
        check_inputs: checks the tensors that an operation reads, before it is issued. If one has a NaN nothing is sent,
            so the other ranks wait for this one until their timeout.
        check_outputs: checks the tensors that an operation writes. For a synchronous operation this happens when it is
            issued; for an async one, in the first operation, `check()` or finalize after its completion, so do not
            write to them before.

    The error names the operation, the communicator, the tensor and the number of NaNs. Each check reads the tensor and,
    on a GPU, waits for the device: this is a debugging tool, not for production. Values cannot be read during a CUDA
    graph capture, so it raises UnsupportedError there; remove the hook before the capture.
    """

    def __init__(self, check_inputs: bool = True, check_outputs: bool = False) -> None:
        self._check_inputs = check_inputs
        self._check_outputs = check_outputs
        self._lock = threading.Lock()
        self._issuing = threading.local()  # the operation between its pre-hook and its post-hook
        self._running: list[tuple[TorchWork, str, list[tuple[str, Tensor]]]] = []

    def register_with_comm(self, comm: TorchComm) -> list[RemovableHandle]:
        """Checks the operations of `comm` from now on."""
        name, rank = comm.get_name(), comm.get_rank()

        def before(op: OpName, op_id: int, args: Any) -> None:
            self.check(wait=op is OpName.finalize)
            where = f"{op.name} #{op_id} on '{name}'"
            inputs, outputs = _tensors_of(op, args, rank)
            if self._check_inputs:
                _check(where, inputs)
            if self._check_outputs and outputs:
                self._issuing.operation = (op_id, where, args.async_op, outputs)

        def after(op_id: int, args: Any) -> None:
            issued_ops, where, async_op, outputs = getattr(self._issuing, "operation", (None, "", False, []))
            if issued_ops != op_id:
                return
            del self._issuing.operation
            if args.error is not None:
                return
            if not async_op or args.work.is_completed():
                _check(where, outputs)
                return
            with self._lock:
                self._running.append((args.work, where, outputs))

        handles = [comm.register_pre_hook(before)]
        if self._check_outputs:
            handles.append(comm.register_post_hook(after))
        return handles

    def check(self, wait: bool = False) -> None:
        """Checks the results of the async operations that have completed, or of all of them if `wait` is set."""
        with self._lock:
            running, self._running = self._running, []
        for index, (work, where, outputs) in enumerate(running):
            try:
                if wait:
                    work.wait_blocking()
                if not work.is_completed():
                    with self._lock:
                        self._running.append((work, where, outputs))
                elif work.exception() is None:
                    _check(where, outputs)
            except BaseException:
                with self._lock:
                    self._running.extend(running[index + 1 :])
                raise


def _tensors_of(op: OpName, args: Any, rank: int) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Returns the tensors that an operation reads and those that it writes on this rank, each with its name."""
    if op is OpName.batch_op_issue:
        named = [(f"ops[{i}].tensor", p2p) for i, p2p in enumerate(args.ops)]
        inputs = [(name, p2p.tensor) for name, p2p in named if p2p.type.name == "SEND"]
        outputs = [(name, p2p.tensor) for name, p2p in named if p2p.type.name == "RECV"]
        return inputs, outputs
    every = {field.name: getattr(args, field.name) for field in fields(args)}
    root = every.get("root", rank)
    reads, writes = {"input", "tensor"}, {"output", "tensor"}
    if op is OpName.recv or (op is OpName.broadcast and root != rank):
        reads = set()
    if op is OpName.send or (op is OpName.reduce and root != rank):
        writes = set()
    return list(_named(every, reads)), list(_named(every, writes))


def _named(values: dict[str, Any], names: set[str]) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(names & values.keys()):
        value = values[name]
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, list):
            yield from ((f"{name}[{i}]", tensor) for i, tensor in enumerate(value))


def _check(where: str, tensors: list[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type == "meta":
            continue
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{where}: expected an operation outside a CUDA graph capture for NanCheckHook, got one inside; "
                "remove the hook before the capture"
            )
        values = tensor.float() if tensor.element_size() == 1 else tensor
        count = int(torch.isnan(values).sum())
        if count:
            raise Error(
                f"{where}: expected {name} without NaN, got {count} among {tensor.numel()} elements of shape "
                f"{list(tensor.shape)}; look at what computed it"
            )
