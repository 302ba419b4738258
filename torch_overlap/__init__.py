"""torch_overlap: a communicator (`TorchComm`) and communication-overlapped operators for PyTorch.

import torch, torch_overlap as to
comm = to.new_comm("nccl", torch.device("cuda"), name="tp")
work = comm.all_reduce(x, to.ReduceOp.SUM, async_op=True)
work.wait()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_overlap._load import load_library

load_library()

from torch_overlap import _c10d, ops  # noqa: E402
from torch_overlap._build_info import VERSION as __version__  # noqa: E402
from torch_overlap._C import (  # noqa: E402
    BackendOptions,
    BatchSendRecv,
    CommOptions,
    Error,
    InvalidTypeError,
    InvalidValueError,
    OperationTimeoutError,
    OpName,
    P2POp,
    P2POpType,
    RedOpType,
    ReduceOp,
    RemovableHandle,
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
    window_names,
)
from torch_overlap._c10d import comm_from_group  # noqa: E402
from torch_overlap._explain import Explanation, explain  # noqa: E402
from torch_overlap._health import health  # noqa: E402
from torch_overlap._methods import get_comm, get_window  # noqa: E402
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
    "CommOverlapAlgo",
    "CommOverlapBase",
    "CommOverlapConfig",
    "CommOverlapCore",
    "CommOverlapEntry",
    "CommOverlapHelper",
    "CommOverlapMethod",
    "CommOverlapP2PBase",
    "CommOverlapType",
    "Error",
    "Explanation",
    "GatherOptions",
    "GatherSingleOptions",
    "InvalidTypeError",
    "InvalidValueError",
    "OpName",
    "OperationTimeoutError",
    "OverlapGroup",
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
    "comm_from_group",
    "comm_names",
    "comm_overlap_buffer",
    "comm_overlap_buffers",
    "compat",
    "create_comm_overlap_buffer",
    "destroy_all_comm_overlap_buffers",
    "destroy_comm_overlap_buffer",
    "device_mesh",
    "explain",
    "flight_recorder",
    "gemm",
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
    "quantize",
    "register_backend",
    "symmetric_empty",
    "tools",
    "window_names",
]

if TYPE_CHECKING:
    from torch_overlap import compat, device_mesh, flight_recorder, gemm, hooks, mesh, nn, objcol, quantize, tools
    from torch_overlap.compat.comm_overlap import *  # noqa: F403
    from torch_overlap.compat.options import *  # noqa: F403

# These modules and the names of torch_overlap.compat, with its operation classes, are loaded on first access, so that
# `import torch_overlap` loads only the communicator and the operators. `jax` needs jax.
_LAZY = frozenset(
    {"compat", "device_mesh", "flight_recorder", "gemm", "hooks", "jax", "mesh", "nn", "objcol", "quantize", "tools"}
)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"torch_overlap.{name}")
    if name == "CollectiveOperation" or name.endswith("Op"):
        return getattr(importlib.import_module("torch_overlap.compat"), name)
    if name in __all__:
        return globals().setdefault(name, getattr(importlib.import_module("torch_overlap.compat"), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_c10d.register()
