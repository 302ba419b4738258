"""The compiled planner, under a name of its own; its types are in _core.pyi."""

from torch_overlap._C._mesh import *  # noqa: F403
