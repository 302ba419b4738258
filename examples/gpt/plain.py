"""The model of model.py in plain torch, and its trainer on a mesh, without explicit communication.

`shard_module` defines the layouts of the weights, the trainer those of the tokens; the communication follows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_overlap as to
from gpt.model import Config, normal, rotate, rotation_angles
from gpt.training import Trainer
from torch_overlap.mesh import P, Sharded

# Tensor parallel: the projections into a block are split by rows, those out of it by columns. Others are whole.
LAYOUTS = {"*.w[qkv]": P("tp"), "*.up": P("tp"), "*.wo": P(None, "tp"), "*.down": P(None, "tp")}
TOKENS = P("tp", "dp")  # [S, B]: sequence parallel, and data parallel


class Block(nn.Module):
    def __init__(self, config: Config, generator: torch.Generator) -> None:
        super().__init__()
        d = config.dim
        self.heads = config.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)

        def weight(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
            return nn.Parameter(normal(generator, gain)(torch.empty(rows, columns)))  # type: ignore[arg-type]

        last = (2 * config.layers) ** -0.5
        with torch.no_grad():
            self.wq, self.wk, self.wv = weight(d, d), weight(d, d), weight(d, d)
            self.wo = weight(d, d, last)
            self.up = weight(4 * d, d)
            self.down = weight(d, 4 * d, last)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (F.linear(h, w).unflatten(-1, (self.heads, -1)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (rotate(q, angles), rotate(k, angles), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(y.permute(2, 0, 1, 3).flatten(2), self.wo)
        return x + F.linear(F.gelu(F.linear(self.mlp_norm(x), self.up), approximate="tanh"), self.down)


class PlainGPT(nn.Module):
    """Maps bytes [S, B] to logits [S, B, 256]; draws the same weights as model.GPT."""

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config, generator) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, bias=False)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        with torch.no_grad():
            self.embedding.weight.normal_(std=0.02, generator=generator)
            normal(generator)(self.head.weight)
        self.register_buffer("angles", rotation_angles(config))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class MeshTrainer(Trainer):
    """A Trainer of the plain model on a mesh with axes dp and tp."""

    def make(self, dtype: torch.dtype, algorithm: str, fp8: to.nn.Float8Recipe | None, keep_gathered: bool) -> None:
        """Makes the model, as in Trainer. Values on a mesh always cache their gathered copies."""
        if fp8 is not None:
            raise ValueError("train_gpt: expected --fp8 none with --mesh, got 8-bit floats; leave one out")
        self.dtype = dtype
        sizes = {"dp": 1, "tp": 1} | self.mesh_axes
        self.config.check(sizes["tp"])
        self.mesh = to.mesh.connect(sizes, self.comm, name=f"{self.comm.get_name()}/mesh")
        self.choice = "sequential" if algorithm == "sequential" else "auto"
        model = PlainGPT(self.config, self.seed).to(self.device)
        self.model = to.mesh.shard_module(model, self.mesh, LAYOUTS, defer_gradients=True)
        self.loss = torch.zeros((), device=self.device)

    def place(self) -> tuple[slice, slice]:
        rows, columns = self.config.sequence, self.batch_size
        lies = to.mesh.to_layout(TOKENS, self.mesh.mesh, 2)
        (row, column), (count, width) = (f((rows, columns), self.mesh.rank) for f in (lies.offsets, lies.local_shape))
        return slice(row, row + count), slice(column, column + width)

    def num_parameters(self) -> int:
        return sum(p.numel() for p in to.mesh.sharded_parameters(self.model).values())

    def compute(self) -> None:
        """Runs one step, as in Trainer."""
        for p in self.model.parameters():
            p.grad = None
        loss = self.sharded_loss()
        loss.backward()
        _, (total,) = to.mesh.clip_grad_norm_(self.model, 1.0, loss)
        self.loss.copy_(total.local)
        self.optimizer.step()

    def sharded_loss(self) -> Sharded:
        """Returns the mean over all tokens, as a partial sum."""
        shape = (self.config.sequence, self.batch_size)
        tokens, targets = (to.mesh.from_local(t, self.mesh, TOKENS, shape) for t in (self.inputs, self.targets))
        total: Sharded = F.cross_entropy(self.logits(tokens).permute(0, 2, 1), targets, reduction="sum")
        return total / (shape[0] * shape[1])

    def logits(self, tokens: Sharded) -> Sharded:
        cast = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with cast, to.mesh.choosing(self.choice):
            out: Sharded = self.model(tokens)
        return out.float()  # type: ignore[no-any-return]

    def mean_loss(self) -> Tensor:
        return self.sharded_loss().local

    @torch.no_grad()
    def logits_at(self, window: list[int], row: int) -> Tensor:
        padded = torch.zeros(self.config.sequence, 1, dtype=torch.int64)
        padded[: len(window), 0] = torch.tensor(window)
        logits = self.logits(to.mesh.shard(padded.to(self.device), self.mesh, P("tp")))
        found: Tensor = logits[row, 0].full()
        return found
