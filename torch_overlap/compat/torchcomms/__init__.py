"""torchcomms' module, by its names: a program for torchcomms runs with one changed line.

    import torch_overlap.compat.torchcomms as torchcomms

    comm = torchcomms.new_comm("nccl", torch.device("cuda"), "world")
    work = comm.all_reduce(x, torchcomms.ReduceOp.SUM, async_op=True)
    work.wait()

The objects are those of torch_overlap; docs/migrate/torchcomms.md lists the names that torchcomms has and torch_overlap
has not. The submodules are `hooks`, `objcol` and `device_mesh`. Only the hooks differ from torch_overlap's: they write
the formats of torchcomms.
"""

from torch_overlap import (
    BatchSendRecv,
    CommOptions,
    OpName,
    P2POp,
    P2POpType,
    RedOpType,
    ReduceOp,
    RemovableHandle,
    Timeout,
    TorchComm,
    TorchCommBackend,
    TorchCommWinAccessType,
    TorchCommWindow,
    TorchCommWindowAttr,
    TorchWork,
    WorkStatus,
    built_backends,
    get_mem_allocator,
    is_backend_built,
    new_comm,
    register_backend,
)
from torch_overlap.compat import options
from torch_overlap.compat.options import *  # noqa: F403
from torch_overlap.compat.torchcomms import device_mesh, hooks, objcol

__all__ = [
    "BatchSendRecv",
    "CommOptions",
    "OpName",
    "P2POp",
    "P2POpType",
    "RedOpType",
    "ReduceOp",
    "RemovableHandle",
    "Timeout",
    "TorchComm",
    "TorchCommBackend",
    "TorchCommWinAccessType",
    "TorchCommWindow",
    "TorchCommWindowAttr",
    "TorchWork",
    "WorkStatus",
    "built_backends",
    "device_mesh",
    "get_mem_allocator",
    "hooks",
    "is_backend_built",
    "new_comm",
    "objcol",
    "register_backend",
    *options.__all__,
]
