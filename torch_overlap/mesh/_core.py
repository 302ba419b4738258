"""The compiled planner under a module name of its own. Its types are in _core.pyi."""

from torch_overlap._C._mesh import *  # noqa: F403
