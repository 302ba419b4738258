"""`torch_overlap.device_mesh`, under the path that torchcomms has for it."""

from torch_overlap.device_mesh import *  # noqa: F403
from torch_overlap.device_mesh import __all__  # noqa: F401
