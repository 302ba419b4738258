"""Operators act on other ranks: a compiler may not drop one because nobody reads its result."""

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
    "matmul_all_reduce",
    "_matmul_all_reduce_backward",
    "all_reduce_async",
    "all_gather_async",
    "reduce_scatter_async",
    "all_to_all_async",
    "all_to_all_v_async",
    "broadcast_async",
    "permute_async",
)


def register() -> None:
    """Keeps all of them in a graph, and gives send and recv an order among themselves.

    A compiler may move collectives, alike on all ranks, which run the same graph; what two ranks say to each other is
    not the same on both, so these two have an ordered effect, which torch.compile threads through the graph as a token.
    """
    from torch._library import simple_registry
    from torch._library.effects import EffectType

    for name in _COMMUNICATING:
        packet = getattr(torch.ops.torch_overlap, name)
        torch.fx.node.has_side_effect(packet)
        torch.fx.node.has_side_effect(packet.default)
    for name in ("torch_overlap::send", "torch_overlap::_recv"):
        simple_registry.singleton.find(name).effect.register(EffectType.ORDERED)
