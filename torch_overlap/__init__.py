"""torch_overlap: a communicator (`TorchComm`) and communication-overlapped operators for PyTorch.

import torch, torch_overlap as to
comm = to.new_comm("nccl", torch.device("cuda"), name="tp")
work = comm.all_reduce(x, to.ReduceOp.SUM, async_op=True)
work.wait()
"""

from torch_overlap._load import load_library

load_library()

from torch_overlap import _c10d, device_mesh, flight_recorder, hooks, mesh, nn, objcol, ops  # noqa: E402
from torch_overlap._build_info import VERSION as __version__  # noqa: E402
from torch_overlap._C import (  # noqa: E402
    AllGatherOptions,
    AllGatherSingleOptions,
    AllReduceOptions,
    AllToAllOptions,
    AllToAllSingleOptions,
    AllToAllvSingleOptions,
    BackendOptions,
    BarrierOptions,
    BatchP2POptions,
    BatchSendRecv,
    BroadcastOptions,
    CommOptions,
    Error,
    GatherOptions,
    GatherSingleOptions,
    InvalidTypeError,
    InvalidValueError,
    OperationTimeoutError,
    OpName,
    P2POp,
    P2POpType,
    RecvOptions,
    RedOpType,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ReduceScatterSingleOptions,
    RemovableHandle,
    ScatterOptions,
    SendOptions,
    StateError,
    TorchComm,
    TorchCommWinAccessType,
    TorchCommWindow,
    TorchCommWindowAttr,
    TorchWork,
    UnsupportedError,
    WorkStatus,
    _BackendWrapper,  # noqa: F401
    built_backends,
    comm_names,
    get_comm,
    get_window,
    window_names,
)
from torch_overlap._health import health  # noqa: E402
from torch_overlap.comm import (  # noqa: E402
    Timeout,
    TorchCommBackend,
    is_backend_built,
    new_comm,
    register_backend,
)
from torch_overlap.symmetric import get_mem_allocator, symmetric_empty  # noqa: E402

__all__ = [
    "AllGatherOptions",
    "AllGatherSingleOptions",
    "AllReduceOptions",
    "AllToAllOptions",
    "AllToAllSingleOptions",
    "AllToAllvSingleOptions",
    "BackendOptions",
    "BarrierOptions",
    "BatchP2POptions",
    "BatchSendRecv",
    "BroadcastOptions",
    "CommOptions",
    "Error",
    "GatherOptions",
    "GatherSingleOptions",
    "InvalidTypeError",
    "InvalidValueError",
    "OpName",
    "OperationTimeoutError",
    "P2POp",
    "P2POpType",
    "RecvOptions",
    "RedOpType",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ReduceScatterSingleOptions",
    "RemovableHandle",
    "ScatterOptions",
    "SendOptions",
    "StateError",
    "Timeout",
    "TorchComm",
    "TorchCommBackend",
    "TorchCommWinAccessType",
    "TorchCommWindow",
    "TorchCommWindowAttr",
    "TorchWork",
    "UnsupportedError",
    "WorkStatus",
    "__version__",
    "built_backends",
    "comm_names",
    "device_mesh",
    "flight_recorder",
    "get_comm",
    "get_mem_allocator",
    "get_window",
    "health",
    "hooks",
    "is_backend_built",
    "mesh",
    "new_comm",
    "nn",
    "objcol",
    "ops",
    "register_backend",
    "symmetric_empty",
    "window_names",
]

_c10d.register()
