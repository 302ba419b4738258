"""Classes and functions that mirror the APIs of other projects, over the core, which never imports them.

- comm_overlap: Transformer Engine's CommOverlap classes and their registry.
- options, hooks: torchcomms' option classes, and its classes of hook arguments and ready-to-use hooks.
- communication: an operation class for each communication function of torch_overlap.mesh.

The names of comm_overlap and options and the operation classes are names of `torch_overlap` too, and hooks is
`torch_overlap.hooks` too. `torch_overlap.mesh` and `torch_overlap.mesh.communication` also have the operation classes.
Each is loaded on first access.
"""

import importlib
from typing import Any

from torch_overlap.compat import comm_overlap, options
from torch_overlap.compat.comm_overlap import *  # noqa: F403
from torch_overlap.compat.options import *  # noqa: F403

__all__ = [*comm_overlap.__all__, *options.__all__]


def __getattr__(name: str) -> Any:
    if name == "CollectiveOperation" or name.endswith("Op"):
        operations = importlib.import_module("torch_overlap.compat.communication")
        if name in operations.__all__:
            return getattr(operations, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
