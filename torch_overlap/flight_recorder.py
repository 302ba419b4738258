"""Records the last calls of this process over all its communicators, to find which ran and which hang.

It is always on (TORCHCOMM_FR_BUFFER_SIZE calls, default 2048; 0 disables it), and is written to a file

- when an operation times out or fails, before the process is ended, if it is;
- on the signal TORCHCOMM_FR_DUMP_SIGNAL (SIGUSR1, SIGUSR2 or a number), or that of `dump_on_signal`;
- by `dump()`.

The name of a file is TORCHCOMM_FR_DUMP_TEMP_FILE, read when a communicator is made, followed by the rank. From the
files of all ranks, PyTorch's analyzer finds missing ranks and mismatched calls:

    python -m torch.distributed.flight_recorder.fr_trace <folder> --prefix torch_overlap_trace_rank_

TORCHCOMM_FR_PYTHON_STACK=1 and TORCHCOMM_FR_CPP_STACK=1 record the stack of every call, which makes calls slower.
"""

from __future__ import annotations

import os

from torch_overlap._C import _dump_trace, _dump_trace_on_signal, _FlightRecorder

__all__ = ["dump", "dump_json", "dump_on_signal", "reset"]


def dump(path: str | os.PathLike[str] | None = None) -> list[str]:
    """Writes the recorder to a file immediately, and returns the names of the files written.

    Args:
        path: the name of the file; None means TORCHCOMM_FR_DUMP_TEMP_FILE followed by the rank. A name that ends in
            ".json" gets JSON, any other name the pickle that the analyzer reads. If the ranks are threads (backend
            "local") there is a file for each rank, whose name is `path` followed by the rank.

    Raises:
        Error: a file cannot be written.
    """
    return _dump_trace(None if path is None else os.fspath(path), "")


def dump_json(include_completed: bool = True) -> str:
    """Returns the recorder as JSON: "entries", oldest first, and "pg_config", the communicators.

    An entry has all that is known of a call: its operation, sizes, dtype, state and times (nanoseconds of the
    system's clock). A call in a CUDA graph is "captured": its replays are not recorded.

    Args:
        include_completed: if False, omits the calls that have completed.
    """
    return _FlightRecorder.of_process().json(include_completed)


def dump_on_signal(signum: int) -> None:
    """Makes `signum` write a dump from now on, even while Python is stuck, and then call the signal's previous handler.

    Set a Python handler before this call: a later `signal.signal` would replace it. A signal without a handler no
    longer ends the process.
    """
    _dump_trace_on_signal(int(signum))


def reset() -> None:
    """Removes all recorded calls."""
    _FlightRecorder.of_process().reset()
