"""The process group of torchft: reconfigurable, over the backend "torch_overlap"."""

from __future__ import annotations

import functools
import importlib
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

from torch_overlap._C import _BackendWrapper

__all__ = ["process_group"]


def process_group(timeout: timedelta = timedelta(seconds=60)) -> Any:
    """Returns a process group for torchft's Manager, in place of its ProcessGroupNCCL or ProcessGroupGloo.

    Each quorum gets a communicator of its own; the one before is aborted.

    Args:
        timeout: of reconfiguration and of operations.
    """
    return _kind()(timeout=timeout)


@functools.cache
def _kind() -> Any:
    torchft: Any = importlib.import_module("torchft.process_group")

    class ProcessGroupTorchOverlap(torchft.ProcessGroupWrapper):  # type: ignore[misc]
        def _create_pg(self, store: Any, rank: int, world_size: int) -> ProcessGroup:
            group = ProcessGroup(store, rank, world_size)
            name = f"torchft_quorum_{self._quorum_id}"
            backend = _BackendWrapper._make_group(store, rank, world_size, name, self._timeout, None)
            group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
            for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                group._register_backend(torch.device(kind), ProcessGroup.BackendType.CUSTOM, backend)
            return group

        def getBackendName(self) -> str:
            return "torch_overlap"

    return ProcessGroupTorchOverlap
