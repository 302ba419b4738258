"""A small GPT with tensor and sequence parallelism, from the modules of torch_overlap.nn.

Rank r of n holds 1/n of every matrix and of every sequence. Activations are [sequence, batch, feature]:

    x  [S/n, B, D]  the residual stream: each rank has its own rows, in fp32
    |--- norm -> all_gather_matmul(x, [wq, wk, wv]) -> attention, heads/n  -> matmul_reduce_scatter(., wo) ---+
    x <-------------------------------------------------------------------------------------------------------+
    |--- norm -> all_gather_matmul(x, [up])         -> [S, B, 4D/n], gelu  -> matmul_reduce_scatter(., down) -+
    x <-------------------------------------------------------------------------------------------------------+

Embedding, norms and head act on the rank's own rows with weights that every rank holds in full: their gradients are
sums over those rows, and the trainer sums them over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import torch_overlap as to


@dataclass(frozen=True)
class Config:
    """Shapes of the whole model, independent of the number of ranks."""

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


def normal(generator: torch.Generator, gain: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Returns a function that fills weights [out, in] on the CPU so that a product has the variance of its input, times
    gain^2."""
    return lambda weight: weight.normal_(std=gain * weight.size(-1) ** -0.5, generator=generator)


class GPT(nn.Module):
    """Maps bytes [S/n, B] of this rank's rows to logits [S/n, B, 256] in fp32.

    `dtype` is that of the matrix products and their communication; parameters and the residual stream are fp32. `fp8`:
    the products of the blocks use 8-bit floats, with results in `dtype`. `keep_gathered`: the gathered inputs of the
    blocks' products are kept until the backward pass.
    """

    def __init__(self, config: Config, comm: to.TorchComm, *, seed: int, device: torch.device, dtype: torch.dtype,
                 algorithm: str, fp8: to.nn.Float8Recipe | None = None,
                 keep_gathered: bool = False) -> None:  # fmt: skip
        super().__init__()
        config.check(comm.get_size())
        generator = torch.Generator().manual_seed(seed)  # every rank draws full weights and keeps its part
        self.dtype = dtype
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(
            to.nn.ParallelTransformerBlock(
                config.dim, config.heads, 4 * config.dim, comm, activation="gelu_tanh", bias=False,
                algorithm=algorithm, fp8=fp8, keep_gathered=keep_gathered, device="cpu", init=normal(generator),
                output_init=normal(generator, gain=(2 * config.layers) ** -0.5),
            )
            for _ in range(config.layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(config.dim, bias=False)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        with torch.no_grad():
            self.embedding.weight.normal_(std=0.02, generator=generator)
            normal(generator)(self.head.weight)
        to.nn.mark_replicated(self, comm)  # all parameters except the blocks' matrices, which are split
        to.nn.defer_replicated_grads(self)  # Gradients sums them, with the loss and the norm
        self.register_buffer("angles", rotation_angles(config).to(dtype))
        self.to(device)

    def forward(self, tokens: Tensor) -> Tensor:
        rotate_by_position = partial(rotate, angles=self.angles)
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, rotate_by_position)
            return self.head(self.norm(x)).float()


def rotation_angles(config: Config) -> Tensor:
    """Returns cosines and sines of the rotary position embedding: [2, S, 1, 1, head_dim / 2]."""
    half = config.dim // config.heads // 2
    frequencies = torch.exp(torch.arange(half) * (-math.log(10_000.0) / half))
    angles = torch.arange(config.sequence)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))[:, :, None, None, :]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates the pairs (first half, second half) of each head [S, B, heads, head_dim] by its position's angle."""
    a, b = x.chunk(2, -1)
    cos, sin = angles
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
