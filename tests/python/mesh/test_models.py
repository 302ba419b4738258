"""Small models, captured whole: every operator has a rule, and the parts of the loss add up to the loss."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import simulated as sim
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_overlap.mesh import Layout, Mesh
from torch_overlap.mesh.program import Program
from torch_overlap.mesh.rules import rule_of


class Llama(nn.Module):
    """RMSNorm, rotary positions, grouped key heads, SwiGLU."""

    def __init__(self, dim: int = 16, heads: int = 4, kv_heads: int = 2, vocabulary: int = 24) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.depth = heads, kv_heads, dim // heads
        self.embedding = nn.Embedding(vocabulary, dim)
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * kv_heads * self.depth, bias=False)
        self.gate, self.up = nn.Linear(dim, 32, bias=False), nn.Linear(dim, 32, bias=False)
        self.down, self.head = nn.Linear(32, dim, bias=False), nn.Linear(dim, vocabulary, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def rotate(self, x: Tensor) -> Tensor:
        length, half = x.shape[-2], self.depth // 2
        angles = torch.arange(length, device=x.device)[:, None] * 0.5 ** torch.arange(half, device=x.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(tokens)
        batch, length, dim = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, length, self.heads, self.depth).transpose(1, 2)
        k, v = self.kv(y).view(batch, length, 2, self.kv_heads, self.depth).permute(2, 0, 3, 1, 4).unbind(0)
        z = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(z.transpose(1, 2).reshape(batch, length, dim))
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1))


class Gpt(nn.Module):
    """LayerNorm, learned positions, one projection for q, k and v, masked attention by hand, dropout that is off."""

    def __init__(self, dim: int = 16, heads: int = 4, vocabulary: int = 24) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(8, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(0.0))

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        q, k, v = self.qkv(self.norm1(x)).split(x.shape[-1], 2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        z = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        x = x + self.o(z.transpose(1, 2).contiguous().view(batch, length, -1))
        x = x + self.mlp(self.norm2(x))
        logs = (x @ self.tokens.weight.T).log_softmax(-1)
        losses = -logs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return losses.masked_fill(target == 0, 0).sum() / (target != 0).sum()


# Layouts of parameters; the rest is on every rank.
LLAMA = {"q": "[tp],[]", "kv": "[tp],[]", "o": "[],[tp]", "gate": "[tp],[]", "up": "[tp],[]", "down": "[],[tp]",
         "embedding": "[tp],[]", "head": "[],[]"}  # fmt: skip
GPT = {"qkv": "[tp],[]", "o": "[],[tp]", "mlp.0": "[tp],[]", "mlp.2": "[],[tp]", "tokens": "[],[tp]"}


def program_of(model: nn.Module, tokens: Tensor, target: Tensor) -> tuple[Program, list[Tensor]]:
    names = [name for name, _ in model.named_parameters()]
    parameters = [p.detach() for p in model.parameters()]

    def function(*given: Any) -> Tensor:
        values = dict(zip(names, given[2:], strict=True))
        out: Tensor = torch.func.functional_call(model, values, given[:2])
        return out

    tensors = [tokens, target, *parameters]
    return sim.captured(function, tensors), tensors


@pytest.mark.parametrize(("make", "layouts"), [(Llama, LLAMA), (Gpt, GPT)], ids=["llama", "gpt"])
@pytest.mark.parametrize("text", ["dp=2,tp=2", "dp=1,tp=4", "dp=4,tp=1", "dp=2,tp=4"])
def test_parts_of_a_model_make_its_loss(
    make: Callable[[], nn.Module], layouts: dict[str, str], text: str, seed: int
) -> None:
    torch.manual_seed(seed)
    model, mesh, rng = make().double(), Mesh.parse(text), random.Random(seed)
    tokens, target = torch.randint(0, 24, (4, 6)), torch.randint(0, 24, (4, 6))
    program, tensors = program_of(model, tokens, target)
    assert [step.call.name for step in program.steps if step.call.inputs and rule_of(step.call) is None] == []
    where = [Layout.parse(mesh, "[dp],[]")] * 2
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        text = layouts.get(module, "[],[]") if kind == "weight" else "[]"
        where.append(Layout.parse(mesh, text if parameter.dim() == 2 else "[]"))
    operands = [sim.spread(x, layout, rng) for x, layout in zip(tensors, where, strict=True)]
    loss = sim.run_program(program, operands, mesh)
    expected = model(tokens, target)
    torch.testing.assert_close(loss.collected(), expected.detach(), atol=1e-7, rtol=1e-7)
