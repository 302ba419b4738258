"""`torch_overlap.objcol`, under the path that torchcomms has for it."""

from torch_overlap.objcol import *  # noqa: F403
from torch_overlap.objcol import __all__  # noqa: F401
