"""A transformer block whose code has no ranks, and the layouts of its parameters on tensor-parallel ranks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from torch_overlap.mesh import P

LAYOUTS = {"*.w[qkv].weight": P("tp"), "*.wo.weight": P(None, "tp"), "*.up.*": P("tp"), "*.down.weight": P(None, "tp")}


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.RMSNorm(dim), nn.LayerNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (w(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss of a model from tokens to logits."""
    return F.cross_entropy(model(tokens).permute(0, 2, 1), targets)
