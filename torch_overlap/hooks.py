"""`torch_overlap.compat.hooks`, under the path that torchcomms has for it."""

from torch_overlap.compat.hooks import *  # noqa: F403
from torch_overlap.compat.hooks import __all__, _make_post_args, _make_pre_args  # noqa: F401
