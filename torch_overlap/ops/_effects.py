"""send and recv act on other ranks: a compiler may not drop, merge or reorder them."""

from __future__ import annotations


def register() -> None:
    """Gives both an ordered effect, which torch.compile threads through the graph as a token."""
    from torch._library import simple_registry
    from torch._library.effects import EffectType

    for name in ("torch_overlap::send", "torch_overlap::_recv"):
        simple_registry.singleton.find(name).effect.register(EffectType.ORDERED)
