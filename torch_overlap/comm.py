"""new_comm, and backends: built in, from other packages, or written in Python."""

from __future__ import annotations

import atexit
import copyreg
import inspect
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import entry_points
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import HashStore, Store

from torch_overlap import _C, _gloo, _tuning
from torch_overlap._C import CommOptions, P2POp, ReduceOp, TorchComm, built_backends
from torch_overlap._methods.arguments import checked_first

__all__ = ["ENTRY_POINT_GROUP", "Timeout", "TorchCommBackend", "is_backend_built", "new_comm", "register_backend"]

# A package with a backend names a function in this entry point group; loading it registers the backend.
ENTRY_POINT_GROUP = "torch_overlap.backends"


class Timeout(timedelta):
    """A timedelta under our own name, accepted by every timeout=."""


@checked_first
def new_comm(
    backend: str,
    device: torch.device | str | int,
    name: str | None = None,
    abort_process_on_timeout_or_error: bool | None = None,
    timeout: timedelta | None = None,
    is_high_priority_stream: bool | None = None,
    store: Store | None = None,
    enable_reconfigure: bool | None = None,
    hints: Mapping[str, str] | None = None,
    *,
    options: CommOptions | None = None,
    rank: int | None = None,
    size: int | None = None,
) -> TorchComm:
    """Makes a communicator. Collective: every rank calls it, with the same backend and name.

    Args:
        backend: "nccl" (also "ncclx"), "gloo", "local" (ranks are threads), "fake" (no peers), or a registered one.
        device: the device of the tensors. A device without an index is that of the local rank, and becomes current.
        name: unique among the live communicators of the process; operators find theirs by it. Generated if None:
            ranks that make their communicators in the same order get the same names.
        abort_process_on_timeout_or_error: if True, a timeout or an asynchronous error ends the process (a hung rank
            cannot raise). Default: False with enable_reconfigure, else TORCHCOMM_ABORT_ON_ERROR, else True.
        timeout: of an operation. Default: TORCHCOMM_TIMEOUT_SECONDS, else 600 s.
        is_high_priority_stream: if True, asynchronous operations run on a CUDA stream of high priority.
        store: for the rendezvous of the ranks. Default: torchrun's, or a TCPStore at MASTER_ADDR:MASTER_PORT.
        enable_reconfigure: if True, TorchComm.reconfigure() may change the members of the communicator. A process that
            joins one makes its own communicator with rank=0, size=1 and the others' name and store.
        hints: strings for the backend, e.g. {"is_high_priority_stream": "true"}. A warning names unknown ones.
        options: all of these in one object. Arguments override it, and it overrides the environment.
        rank, size: given together, override the environment's (required if ranks are threads). A process without a
            launcher is rank 0 of 1 with "fake" and with backends written in Python.

    Raises:
        ModuleNotFoundError: there is no such backend.
        InvalidValueError, InvalidTypeError: an argument is invalid; or, on every rank, the ranks' arguments differ.
        OperationTimeoutError: another rank did not arrive.
        StateError: a CUDA graph captures the current stream.
    """
    where = _device(device)
    if backend.lower() not in built_backends():
        _load_backend(backend)
    merged = options.__copy__() if options is not None else CommOptions()
    if timeout is not None:
        merged.timeout = timeout
    if hints is not None:
        merged.hints = {**merged.hints, **hints}
        if any(key in hints for key in _PRIORITY_HINTS):
            merged.is_high_priority_stream = None  # the hint has the value and overrides the object's field
    if store is not None:
        merged.store = store
    if abort_process_on_timeout_or_error is not None:
        merged.abort_process_on_timeout_or_error = abort_process_on_timeout_or_error
    if is_high_priority_stream is not None:
        merged.is_high_priority_stream = is_high_priority_stream
    if enable_reconfigure is not None:
        merged.enable_reconfigure = enable_reconfigure
    if rank is None and size is None and backend.lower() in _SINGLE_PROCESS_BACKENDS and _C._env.launcher() is None:
        rank, size = 0, 1
        if merged.store is None and _C._env.master_addr() is None:
            merged.store = HashStore()
    _tuning.load_once()
    return _C._new_comm(backend, where, name, merged, rank, size)


# Backends that need no launcher: rank and size default to 0 and 1. Backends written in Python are added.
_SINGLE_PROCESS_BACKENDS = {"fake"}
_PRIORITY_HINTS = ("is_high_priority_stream", "torchcomm::ncclx::high_priority_stream")


def _device(device: torch.device | str | int) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise _C.InvalidValueError(f"new_comm: expected the name of a device for device, got {device!r}") from error


def _refuse_to_pickle(comm: TorchComm) -> NoReturn:
    raise _C.InvalidTypeError(
        f"pickle: expected what another process can have, got the communicator '{comm.get_name()}'; make one there "
        "with new_comm, and save the state_dict() of a module"
    )


copyreg.pickle(TorchComm, _refuse_to_pickle)


def is_backend_built(name: str) -> bool:
    """Returns True if `new_comm` knows the backend now, without searching packages for it.

    Args:
        name: the `backend` of new_comm.
    """
    return name.lower() in built_backends()


def _load_backend(name: str) -> None:
    """Loads the package that provides the backend, by its entry point.

    Raises:
        ModuleNotFoundError: no package provides it.
    """
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        register = entry.load()
        if callable(register):
            register()
        if is_backend_built(name):
            return
        raise ModuleNotFoundError(
            f"failed to find backend {name!r}: {entry.value} was loaded and did not register it; "
            f"it must call torch_overlap.register_backend({name!r}, ...)"
        )
    raise ModuleNotFoundError(
        f"failed to find backend {name!r}: expected one of {built_backends()}, or a package with an entry point "
        f"{name!r} in the group {ENTRY_POINT_GROUP!r}; nccl needs a CUDA build (FORCE_CUDA=1)"
    )


class TorchCommBackend:
    """Base of backends written in Python: `register_backend("mine", Mine)`, then `new_comm("mine", ...)`.

    Each communicator has one object, made without arguments; `rank` and `size` are set before init(). A split makes
    another object.

    Operations are validated before the call, and arguments are positional. Tensors are contiguous, of one dtype and on
    the device of init(); those in lists may be flat views of the caller's. With `async_op` False the result must be
    ready when the method returns, on CUDA for subsequent work on the current stream. With True it need only be ready
    after wait().

    Each operation returns None if it has completed, or an object with wait() (and, optionally, is_completed()). wait()
    may take a timeout (a timedelta): on expiry it raises TimeoutError or returns False. If it takes none,
    TorchWork.wait(timeout) polls is_completed() until the deadline. Exceptions of an operation or of wait() reach the
    user.

    Threads: an operation is called by the thread that issues it, wait() by the one that waits, both with the GIL.
    Several threads may issue; nothing but the GIL orders them.

    An operation that a class does not define raises UnsupportedError with its name. Below, n is `size`.
    """

    rank: int
    size: int

    def init(self, device: torch.device, name: str, options: CommOptions) -> None:
        """Initializes the backend. `options.store` belongs to this communicator only."""

    def finalize(self) -> None:
        """Finalizes the backend. Collective. No operation is in flight."""

    def abort(self) -> None:
        """Ends all operations immediately, on this rank."""

    def get_backend_version(self) -> str:
        """Returns the version for TorchComm.get_backend_version()."""
        return "0"

    def _unsupported(self, op: str) -> Any:
        raise _C.UnsupportedError(
            f"{op}: expected a backend that has it, got {type(self).__name__}; define {type(self).__name__}.{op}"
        )

    def send(self, tensor: torch.Tensor, dst: int, async_op: bool) -> Any:
        """Sends `tensor`, of any shape, to rank `dst`."""
        return self._unsupported("send")

    def recv(self, tensor: torch.Tensor, src: int, async_op: bool) -> Any:
        """Receives `tensor`, of any shape, from rank `src`, which sends the same number of elements and the same
        dtype."""
        return self._unsupported("recv")

    def broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Any:
        """Copies the `tensor` of `root` to all ranks. All have the same number of elements."""
        return self._unsupported("broadcast")

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Any:
        """Reduces `tensor` over all ranks, in place. All have the same number of elements."""
        return self._unsupported("all_reduce")

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp, async_op: bool) -> Any:
        """Reduces `tensor` over all ranks into that of rank `root`, in place. The other ranks' tensors must not
        change."""
        return self._unsupported("reduce")

    def all_gather(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, async_op: bool) -> Any:
        """Copies the `tensor` of rank r into tensor_list[r]. The list has n tensors, each with as many elements as
        `tensor`."""
        return self._unsupported("all_gather")

    def all_gather_v(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, async_op: bool) -> Any:
        """Copies the `tensor` of rank r into tensor_list[r], which has the same number of elements. They may differ by
        rank."""
        return self._unsupported("all_gather_v")

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> Any:
        """Copies the `input` of rank r into piece r of n equal pieces of `output`. output.numel() == n *
        input.numel()."""
        return self._unsupported("all_gather_single")

    def reduce_scatter(self, output: torch.Tensor, input_list: list[torch.Tensor], op: ReduceOp, async_op: bool) -> Any:
        """Reduces all ranks' input_list[rank] into `output`. The list has n tensors, each with as many elements as
        `output`."""
        return self._unsupported("reduce_scatter")

    def reduce_scatter_v(
        self, output: torch.Tensor, input_list: list[torch.Tensor], op: ReduceOp, async_op: bool
    ) -> Any:
        """reduce_scatter with sizes that differ by rank: input_list[r] has the size of rank r's `output`."""
        return self._unsupported("reduce_scatter_v")

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, async_op: bool) -> Any:
        """Reduces piece `rank` of all ranks' `input`, each of n equal pieces, into `output`."""
        return self._unsupported("reduce_scatter_single")

    def all_to_all(self, output_list: list[torch.Tensor], input_list: list[torch.Tensor], async_op: bool) -> Any:
        """Copies the input_list[rank] of rank r into output_list[r]. Both have n tensors, whose sizes may differ by
        pair."""
        return self._unsupported("all_to_all")

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> Any:
        """Copies piece `rank` of rank r's `input` into piece r of n equal pieces of `output`."""
        return self._unsupported("all_to_all_single")

    def all_to_all_v_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        async_op: bool,
    ) -> Any:
        """all_to_all_single with pieces of different sizes, in slices of dimension 0.

        input_split_sizes[r] slices of `input` go to rank r, and output_split_sizes[r] slices of `output` are received
        from it. Both lists have n numbers, whose sum is the size of dimension 0.
        """
        return self._unsupported("all_to_all_v_single")

    def barrier(self, async_op: bool) -> Any:
        """Blocks until all ranks have entered."""
        return self._unsupported("barrier")

    def scatter(self, output: torch.Tensor, input_list: list[torch.Tensor], root: int, async_op: bool) -> Any:
        """Copies input_list[rank] of rank `root` into `output`. The list has n tensors like `output` there, and is
        empty elsewhere."""
        return self._unsupported("scatter")

    def gather(self, output_list: list[torch.Tensor], input: torch.Tensor, root: int, async_op: bool) -> Any:
        """Copies the `input` of rank r into output_list[r] of rank `root`. The list has n tensors like `input` there,
        and is [] elsewhere."""
        return self._unsupported("gather")

    def gather_single(self, output: torch.Tensor | None, input: torch.Tensor, root: int, async_op: bool) -> Any:
        """Copies the `input` of rank r into piece r of n equal pieces of the `output` of rank `root`. `output` is None
        elsewhere."""
        return self._unsupported("gather_single")

    def batch_op_issue(self, ops: list[P2POp], async_op: bool) -> Any:
        """Issues the operations one after the other. This default suffices if the backend's sends do not wait for their
        receives."""
        works = [
            self.send(op.tensor, op.peer, async_op)
            if op.type is _C.P2POpType.SEND
            else self.recv(op.tensor, op.peer, async_op)
            for op in ops
        ]
        pending = [work for work in works if work is not None]
        return _WorkGroup(pending) if pending else None


class _WorkGroup:
    """Several works as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        for work in self._works:
            if deadline is None:
                work.wait()
            else:
                _wait_with_timeout(work, timedelta(seconds=max(0.0, deadline - time.monotonic())))

    def is_completed(self) -> bool:
        return all(hasattr(work, "is_completed") and work.is_completed() for work in self._works)


def _takes_timeout(wait: Any) -> bool:
    try:
        inspect.signature(wait).bind(timedelta())
    except TypeError:
        return False
    except ValueError:  # a function written in C without a signature
        return True
    return True


def _wait_with_timeout(work: Any, timeout: timedelta) -> None:
    """Waits for the work of a Python backend, for at most `timeout`.

    Raises:
        TimeoutError: the operation is still in flight.
        UnsupportedError: the object cannot wait with a timeout.
        Exception: any exception of its wait().
    """
    if _takes_timeout(work.wait):
        timed_out = work.wait(timeout) is False
    elif hasattr(work, "is_completed"):
        deadline = time.monotonic() + timeout.total_seconds()
        pause = 1e-5
        while not (done := work.is_completed()) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, 1e-2)
        timed_out = not done
        if done:
            work.wait()
    else:
        raise _C.UnsupportedError(
            f"wait: expected a work whose wait() takes a timeout, or that has is_completed(), got "
            f"{type(work).__name__}; wait without a timeout"
        )
    if timed_out:
        raise _C.OperationTimeoutError(
            f"wait: expected {type(work).__name__} to end within {timeout.total_seconds():g} s, got no end; "
            "it goes on and may be waited for again"
        )


def register_backend(name: str, backend_class: type[TorchCommBackend]) -> None:
    """Registers a Python class as a backend of `new_comm`. A name in use is replaced for later communicators.

    Args:
        name: the `backend` of new_comm.
        backend_class: a subclass of TorchCommBackend. Each communicator makes an object of it, without arguments.

    Raises:
        InvalidTypeError: the class does not derive from TorchCommBackend.
    """
    if not (isinstance(backend_class, type) and issubclass(backend_class, TorchCommBackend)):
        raise _C.InvalidTypeError(f"register_backend: expected a subclass of TorchCommBackend, got {backend_class!r}")
    _C._register_backend(name, backend_class)
    _SINGLE_PROCESS_BACKENDS.add(name.lower())


@atexit.register
def _abort_live_comms() -> None:
    """Aborts the communicators that are still alive at exit: Python's threads end after this, so none may remain."""
    left = _C._abort_all()
    if left:
        warnings.warn(
            "torch_overlap: expected finalize(), of process groups destroy_process_group(), before the end of the "
            f"process, got live communicators {left}; they were aborted",
            RuntimeWarning,
            stacklevel=2,
        )


_gloo.install()
