"""The last calls of this process over all its communicators: what ran, and what hangs.

It is always on (TORCHCOMM_FR_BUFFER_SIZE calls, 2048 unless set; 0 switches it off), and is written to a file

- when an operation times out or fails, before the process is ended where that was asked for;
- on the signal TORCHCOMM_FR_DUMP_SIGNAL (SIGUSR1, SIGUSR2 or a number), or that of `dump_on_signal`;
- by `dump()`.

Files are named by TORCHCOMM_FR_DUMP_TEMP_FILE, as it is when a communicator is made, and the rank. PyTorch's
analyzer finds who is missing, and who called something else, from the files of all ranks:

    python -m torch.distributed.flight_recorder.fr_trace <folder> --prefix torch_overlap_trace_rank_

TORCHCOMM_FR_PYTHON_STACK=1 and TORCHCOMM_FR_CPP_STACK=1 keep the stack of every call: about a microsecond each.
"""

from __future__ import annotations

import os

from torch_overlap._C import _dump_trace, _dump_trace_on_signal, _FlightRecorder

__all__ = ["dump", "dump_json", "dump_on_signal", "reset"]


def dump(path: str | os.PathLike[str] | None = None) -> list[str]:
    """Writes the recorder to a file, now, and returns the names of the files written.

    Args:
        path: the name of the file; None is TORCHCOMM_FR_DUMP_TEMP_FILE and the rank. A name that ends in ".json"
            gets JSON, any other the pickle that the analyzer reads. Where the ranks are threads (backend "local")
            there is a file for each rank, whose name is `path` and the rank.

    Raises:
        Error: a file cannot be written.
    """
    return _dump_trace(None if path is None else os.fspath(path), "")


def dump_json(include_completed: bool = True) -> str:
    """The recorder as JSON: "entries", the oldest first, and "pg_config", the communicators.

    An entry has all that is known of a call: its operation, sizes, dtype, state and times (nanoseconds of the
    system's clock). A call in a CUDA graph is "captured": nothing is known of its replays.
    """
    return _FlightRecorder.of_process().json(include_completed)


def dump_on_signal(signum: int) -> None:
    """From now on `signum` makes a dump, also while Python is stuck, and then calls the handler that it had before.

    Set a Python handler before, not after: `signal.signal` would replace this one. A signal without a handler no
    longer ends the process.
    """
    _dump_trace_on_signal(int(signum))


def reset() -> None:
    """Forgets all calls so far."""
    _FlightRecorder.of_process().reset()
