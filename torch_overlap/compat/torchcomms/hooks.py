"""torchcomms' hooks: `clog` writes its text, and the dumps of `FlightRecorderHook` have its names.

The classes of hook arguments and `NanCheckHook` are those of torch_overlap.hooks.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from typing import Any

from torch_overlap._C import RemovableHandle, TorchComm
from torch_overlap.compat import hooks as _core
from torch_overlap.compat.hooks import *  # noqa: F403

__all__ = _core.__all__


class clog(_core.clog):  # type: ignore[no-redef]
    """Log of calls in torchcomms' text format, version 1. See torch_overlap.hooks.clog.

    The line of a call is in the file when the call returns.

    Args:
        output: the file, which is appended to.
        events: "ALL" or "LIFECYCLE" for queued, started and ended; or any of "Q", "S", "E", "NONE".
        verbose: "buffers" adds the addresses of the tensors.

    Raises:
        InvalidValueError: an event or a word of verbose is unknown.
        InvalidTypeError: events or verbose is a string.
        Error: the file cannot be opened.
    """

    def __init__(
        self, output: str | os.PathLike[str], events: Sequence[str] = ("ALL",), verbose: Sequence[str] = ()
    ) -> None:
        super().__init__(output, events, verbose, format="text")


class FlightRecorderHook(_core.FlightRecorderHook):  # type: ignore[no-redef]
    """Flight recorder of chosen communicators, with torchcomms' dumps. See torch_overlap.hooks.FlightRecorderHook.

    Differences: calls have the name of their backend ("gloo:all_reduce"), which PyTorch's analyzer of torch 2.11
    accepts for NCCL only; communicators without calls are in the dump; is_enabled() is True after a registration.
    """

    def __init__(self, max_entries: int = 2048, isolated: bool = False) -> None:
        super().__init__(max_entries, isolated)
        self._comms: dict[str, dict[str, str]] = {}

    def register_with_comm(self, comm: TorchComm) -> RemovableHandle | None:
        """Records the calls of `comm`, and of the communicators that its splits make."""
        self._comms[comm.get_name()] = {
            "name": comm.get_name(),
            "desc": comm.get_backend(),
            "ranks": str(comm.get_ranks_in_world()).replace(" ", ""),
        }
        return super().register_with_comm(comm)

    def is_enabled(self) -> bool:
        """Returns True if the hook was registered with a communicator."""
        return bool(self._comms)

    def dump_json(self, include_completed: bool = True) -> str:
        """Returns the records as JSON.

        Args:
            include_completed: if False, omits the calls that have completed.
        """
        return json.dumps(self._trace(include_completed))

    def dump_file(self, rank: int, include_completed: bool = True) -> str:
        """Writes the records as a pickle, and returns the file name: TORCHCOMM_FR_DUMP_TEMP_FILE followed by the rank,
        or alone if TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME is set.

        Args:
            rank: the rank in the file name.
            include_completed: if False, omits the calls that have completed.

        Raises:
            Error: the file cannot be written.
        """
        name = super().dump_file(rank, include_completed)
        draft = f"{name}.{os.getpid()}.tmp"
        with open(draft, "wb") as file:
            pickle.dump(self._trace(include_completed), file, protocol=2)
        os.replace(draft, name)
        return name

    def __len__(self) -> int:
        """Returns the number of recorded calls."""
        return self.size()

    def _trace(self, include_completed: bool) -> dict[str, Any]:
        trace: dict[str, Any] = json.loads(super().dump_json(include_completed))
        for name, comm in self._comms.items():
            trace["pg_config"].setdefault(name, comm)
        for entry in trace["entries"]:
            backend = entry["process_group"][1]
            entry["profiling_name"] = f"{backend}:{entry['op']}"
        return trace
