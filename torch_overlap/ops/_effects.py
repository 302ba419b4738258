"""Side effects of the operators: they act on other ranks, so a compiler must not drop one with an unused result."""

from __future__ import annotations

import torch

_COMMUNICATING = (
    "all_reduce",
    "_all_reduce_traced",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_v",
    "broadcast",
    "_reduce_to_root",
    "permute",
    "send",
    "_recv",
    "_waited",
    "all_gather_matmul",
    "_all_gather_matmul_backward",
    "matmul_reduce_scatter",
    "_matmul_reduce_scatter_backward",
    "matmul_all_reduce",
    "_matmul_all_reduce_backward",
    "all_reduce_rms_norm",
    "matmul_all_reduce_rms_norm",
    "all_reduce_rms_norm_quantize",
    "matmul_all_reduce_rms_norm_quantize",
    "all_to_all_matmul",
    "_all_to_all_matmul_backward",
    "matmul_all_to_all",
    "_matmul_all_to_all_backward",
    "bulk_overlap_matmul",
    "_bulk_overlap_matmul_backward",
    "scaled_all_gather_matmul",
    "scaled_matmul_reduce_scatter",
    "scaled_matmul_all_reduce",
    "_gemm_overlapped",
    "all_reduce_async",
    "all_gather_async",
    "reduce_scatter_async",
    "all_to_all_async",
    "all_to_all_v_async",
    "broadcast_async",
    "permute_async",
)


def register() -> None:
    """Keeps all operators in a graph, in the order of the program.

    Ranks may run different graphs (one uses a result, another does not; one sends, another receives), and a compiler
    that dropped or moved a communication on one of them would make all hang. Therefore each has an ordered effect,
    which torch.compile threads through the graph as a token; torch.fx's own passes check has_side_effect.
    """
    from torch._library import simple_registry
    from torch._library.effects import EffectType

    for name in _COMMUNICATING:
        packet = getattr(torch.ops.torch_overlap, name)
        torch.fx.node.has_side_effect(packet)
        torch.fx.node.has_side_effect(packet.default)
        simple_registry.singleton.find(f"torch_overlap::{name}").effect.register(EffectType.ORDERED)
    # Above autograd, as a program calls it, this may be a gemm over a buffer; below autograd that is _gemm_overlapped.
    torch.fx.node.has_side_effect(torch.ops.torch_overlap.gemm)
