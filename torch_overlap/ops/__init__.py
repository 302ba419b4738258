"""The operators, with a `TorchComm` in place of the communicator's name and size.

    (q, k, v), _ = torch_overlap.ops.all_gather_matmul(x, [wq, wk, wv], comm)

Each function calls `torch.ops.torch_overlap.<name>` with the same meaning; docs/reference/operators.md has the schemas.
They have gradients of any order by torch.autograd (forward mode and `torch.func.grad` raise), and work with fake
tensors, under `torch.compile(fullgraph=True)`, `torch.export`, in CUDA graphs and under `torch.vmap`, there with
weights that all elements share. The gradient convention is that of `torch.distributed._functional_collectives`: a rank
gets the gradient of the sum of all ranks' losses.

Streams: a result is valid on the current stream when the call returns; the host does not wait for the GPU. A result of
an `*_async` function is not ready yet: pass it through `wait_tensor` before anything reads it. It may be dropped
without a wait. While a compiler traces, the `*_async` functions are the synchronous ones.

The input of an `*_async` function must not be changed in place until its result has passed through `wait_tensor`: with
any backend, the communicator may read it at any time before, and has no copy of it. `wait_tensor` raises `StateError`
for an input that was changed, even if the operation had completed before the change. It checks the version of the
tensor, as autograd does for a saved tensor. It does not detect a change through `x.data`, or by a kernel that torch
does not know of, nor a change of an input that is a part of a larger buffer, whose parts share a version. Tensors of
`torch.inference_mode` have no version, and are copied. The input may be dropped. A compiler that traces the functions
orders a later change after the operation.

torch.compile keeps every operator, even if its result is unused, in the order of the program. There are two limits.
Inductor of torch 2.11 moves operators that do not depend on each other to save memory. All ranks that compile the same
function for the same shapes move them alike; if ranks compile different ones, set
`torch._inductor.config.reorder_for_peak_memory = False`. And the debugging backend aot_eager copies an argument that
requires a gradient before the function's own wait_tensor; wait for a pending result before passing it to such a
function.

Errors: an invalid argument raises `InvalidValueError` (a `ValueError`) or `InvalidTypeError` (a `TypeError`) before
anything is sent. A value that is not a tensor, or not a number, where the schema has one is refused by torch, as a
RuntimeError with the schema. After `finalize()` the operators raise `StateError`. All ranks must call the same
operators in the same order with the same shapes and options.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_overlap.ops import _effects, _vmap, _vmap_overlapped
from torch_overlap.ops.gemm import (
    dequantize,
    gemm,
    grouped_gemm,
    quantize,
    quantize_delayed,
    swiglu,
    swizzle_scales,
    unswizzle_scales,
    update_scale_,
)
from torch_overlap.ops.resharding import reshard

if TYPE_CHECKING:
    from torch_overlap.ops.collectives import *  # noqa: F403
    from torch_overlap.ops.norms import *  # noqa: F403
    from torch_overlap.ops.overlapped import *  # noqa: F403
    from torch_overlap.ops.windows import *  # noqa: F403

__all__ = [
    "add_rms_norm",
    "all_gather",
    "all_gather_async",
    "all_gather_matmul",
    "all_reduce",
    "all_reduce_",
    "all_reduce_async",
    "all_reduce_rms_norm",
    "all_reduce_rms_norm_quantize",
    "all_to_all",
    "all_to_all_async",
    "all_to_all_matmul",
    "all_to_all_v",
    "all_to_all_v_async",
    "broadcast",
    "broadcast_async",
    "bulk_overlap_matmul",
    "dequantize",
    "gemm",
    "grouped_gemm",
    "matmul_all_reduce",
    "matmul_all_reduce_rms_norm",
    "matmul_all_reduce_rms_norm_quantize",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "permute",
    "permute_async",
    "put",
    "quantize",
    "quantize_delayed",
    "recv_",
    "reduce_scatter",
    "reduce_scatter_async",
    "reshard",
    "scaled_all_gather_matmul",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
    "send",
    "signal",
    "swiglu",
    "swizzle_scales",
    "unswizzle_scales",
    "update_scale_",
    "wait_signal",
    "wait_tensor",
]

# Loaded on first access to one of their functions: they register with torch.compile, which imports it.
_MODULES = ("collectives", "norms", "overlapped", "windows")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            found = vars(importlib.import_module(f"torch_overlap.ops.{module}"))
            globals().update({name: found[name] for name in __all__ if name in found})
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_effects.register()
_vmap.register()
_vmap_overlapped.register()
