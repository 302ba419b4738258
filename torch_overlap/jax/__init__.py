"""torch_overlap in JAX programs: overlapped products, collectives and the GEMM of Transformer Engine's JAX extension.

    import torch_overlap_jax as toj        # or: import torch_overlap.jax as toj, which imports torch

    mesh = jax.make_mesh((4,), ("tp",))
    toj.bootstrap(mesh, "tp")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=..., out_specs=..., check_vma=False)
    def mlp(x, w1, w2):
        return toj.matmul_reduce_scatter(jax.nn.gelu(toj.all_gather_matmul(x, w1, "tp")), w2, "tp")

docs/howto/jax.md describes it. This package imports neither torch nor the rest of torch_overlap.
"""

from __future__ import annotations

from torch_overlap.jax._library import library
from torch_overlap.jax.axis import Axis, bootstrap
from torch_overlap.jax.buffers import (
    CommOverlapMethod,
    CommOverlapType,
    ScalingMode,
    create_comm_overlap_buffer,
    destroy_all_comm_overlap_buffers,
    destroy_comm_overlap_buffer,
)
from torch_overlap.jax.collectives import all_gather, all_reduce, all_to_all, broadcast, permute, reduce_scatter
from torch_overlap.jax.gemm import GemmResults, gemm
from torch_overlap.jax.partition import column_parallel, row_parallel
from torch_overlap.jax.products import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

__all__ = [
    "Axis",
    "CommOverlapMethod",
    "CommOverlapType",
    "GemmResults",
    "ScalingMode",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "bootstrap",
    "broadcast",
    "column_parallel",
    "create_comm_overlap_buffer",
    "destroy_all_comm_overlap_buffers",
    "destroy_comm_overlap_buffer",
    "gemm",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "permute",
    "reduce_scatter",
    "row_parallel",
]

library()
