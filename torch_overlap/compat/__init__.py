"""Classes and functions that mirror the APIs of other projects, over the core, which never imports them.

- comm_overlap: Transformer Engine's CommOverlap classes and their registry.
- options, hooks: torchcomms' option classes, and its classes of hook arguments and ready-to-use hooks.
- communication: an operation class for each communication function of torch_overlap.mesh.

The names of comm_overlap and options are names of `torch_overlap` too, and hooks is `torch_overlap.hooks` too.
`torch_overlap.mesh.communication` has the operation classes. Each is loaded on first access.
"""

from torch_overlap.compat import comm_overlap, options
from torch_overlap.compat.comm_overlap import *  # noqa: F403
from torch_overlap.compat.options import *  # noqa: F403

__all__ = [*comm_overlap.__all__, *options.__all__]
