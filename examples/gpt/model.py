"""A small GPT with tensor and sequence parallelism.

Rank r of n holds 1/n of every matrix and of every sequence. Activations are [sequence, batch, feature]:

    x  [S/n, B, D]  the residual stream: each rank has its own rows, in fp32
    |--- norm -> all_gather_matmul(x, [wq, wk, wv]) -> attention, heads/n  -> matmul_reduce_scatter(., wo) ---+
    x <-------------------------------------------------------------------------------------------------------+
    |--- norm -> all_gather_matmul(x, [up])         -> [S, B, 4D/n], gelu  -> matmul_reduce_scatter(., down) -+
    x <-------------------------------------------------------------------------------------------------------+

Embedding, norms and head act on the rank's own rows with weights that every rank holds in full: their gradients are
sums over those rows, and the trainer adds them up over the ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_overlap as to


@dataclass(frozen=True)
class Config:
    """Shapes of the whole model, whatever the number of ranks."""

    dim: int = 192
    layers: int = 4
    heads: int = 6
    sequence: int = 256
    vocabulary: int = 256  # bytes

    def check(self, ranks: int) -> None:
        for what, value, by in (
            ("heads", self.heads, ranks),
            ("sequence", self.sequence, ranks),
            ("dim", self.dim, 2 * self.heads),
        ):
            if value % by != 0:
                raise ValueError(f"train_gpt: expected --{what} divisible by {by}, got {value}; change it or the ranks")


class Init:
    """Draws full weights in a fixed order on the CPU and keeps this rank's part: any number of ranks, one model."""

    def __init__(self, comm: to.TorchComm, seed: int, device: torch.device) -> None:
        self.rank, self.size, self.device = comm.get_rank(), comm.get_size(), device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float, split: int | None = None) -> nn.Parameter:
        """`split`: the dimension that is cut over the ranks; None keeps the whole on each."""
        full = torch.randn(*shape, generator=self.generator) * std
        return self._parameter(full if split is None else full.chunk(self.size, split)[self.rank], split)

    def ones(self, *shape: int) -> nn.Parameter:
        return self._parameter(torch.ones(*shape), None)

    def _parameter(self, data: Tensor, split: int | None) -> nn.Parameter:
        parameter = nn.Parameter(data.contiguous().to(self.device))
        parameter.is_split = split is not None  # type: ignore[attr-defined]
        return parameter


class Block(nn.Module):
    """Attention, then a two-layer network, each added to the residual stream."""

    def __init__(self, config: Config, init: Init, comm: to.TorchComm, dtype: torch.dtype, algorithm: str) -> None:
        super().__init__()
        self.comm, self.dtype, self.algorithm = comm, dtype, algorithm
        self.head_dim = config.dim // config.heads
        d, std, out_std = config.dim, config.dim**-0.5, (2 * config.layers * config.dim) ** -0.5
        self.norm1, self.norm2 = init.ones(d), init.ones(d)
        self.wq, self.wk, self.wv = (init.normal(d, d, std=std, split=0) for _ in range(3))
        self.wo = init.normal(d, d, std=out_std, split=1)
        self.up = init.normal(4 * d, d, std=std, split=0)
        self.down = init.normal(d, 4 * d, std=out_std / 2, split=1)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self._column(self._norm(x, self.norm1), self.wq, self.wk, self.wv)
        x = x + self._row(self._attention(q, k, v, angles), self.wo)
        (h,) = self._column(self._norm(x, self.norm2), self.up)
        return x + self._row(F.gelu(h, approximate="tanh"), self.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, weight.shape, weight).to(self.dtype)

    def _column(self, x: Tensor, *weights: Tensor) -> list[Tensor]:
        cast = [w.to(self.dtype) for w in weights]
        return to.ops.all_gather_matmul(x, cast, self.comm, algorithm=self.algorithm)[0]

    def _row(self, x: Tensor, weight: Tensor) -> Tensor:
        return to.ops.matmul_reduce_scatter(x, weight.to(self.dtype), self.comm, algorithm=self.algorithm)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, angles: Tensor) -> Tensor:
        """[S, B, D/n] of this rank's heads, over the whole sequence."""
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        q, k = rotate(q, angles), rotate(k, angles)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [B, heads/n, S, head_dim]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.permute(2, 0, 1, 3).flatten(2)


class GPT(nn.Module):
    """Bytes [S/n, B] of this rank's rows -> logits [S/n, B, 256] in fp32.

    `dtype` is that of the matrix products and of what they send; parameters and the residual stream are fp32.
    """

    def __init__(self, config: Config, comm: to.TorchComm, *, seed: int, device: torch.device, dtype: torch.dtype,
                 algorithm: str) -> None:  # fmt: skip
        super().__init__()
        config.check(comm.get_size())
        init = Init(comm, seed, device)
        self.dtype = dtype
        self.embedding = init.normal(config.vocabulary, config.dim, std=0.02)
        self.blocks = nn.ModuleList(Block(config, init, comm, dtype, algorithm) for _ in range(config.layers))
        self.norm = init.ones(config.dim)
        self.head = init.normal(config.vocabulary, config.dim, std=config.dim**-0.5)
        self.register_buffer("angles", rotation_angles(config).to(device, dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding)
        for block in self.blocks:
            x = block(x, self.angles)
        x = F.layer_norm(x, self.norm.shape, self.norm).to(self.dtype)
        return F.linear(x, self.head.to(self.dtype)).float()


def rotation_angles(config: Config) -> Tensor:
    """Cosines and sines of the rotary position embedding: [2, S, 1, 1, head_dim / 2]."""
    half = config.dim // config.heads // 2
    frequencies = torch.exp(torch.arange(half) * (-math.log(10_000.0) / half))
    angles = torch.arange(config.sequence)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))[:, :, None, None, :]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns the pairs (first half, second half) of each head [S, B, heads, head_dim] by its position's angle."""
    a, b = x.chunk(2, -1)
    cos, sin = angles
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
