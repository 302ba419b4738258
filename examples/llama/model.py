"""A llama-shaped model with tensor and sequence parallelism, from the modules of torch_overlap.nn.

Rank r of n holds 1/n of every matrix, of the vocabulary and of every sequence. Activations are [sequence, batch,
feature]:

    tokens [S, B]   the same on all ranks
    x [S/n, B, D]   this rank's rows: the embedding of its part of the vocabulary, by reduce_scatter; then the blocks
    logits [S, B, V/n], and a cross entropy that does not gather them

Parameters and products are in `dtype`. Gradients of all matrices but the embedding are added to float32 buffers by the
products of the backward pass (main_grad).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from gpt.model import rotate
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_overlap as to
from torch_overlap.mesh.models import Transformer
from torch_overlap.nn.layout import set_layout

BASE = 500_000.0  # of the rotary position embedding
EPS = 1e-5


def normal(generator: torch.Generator, std: float = 0.02) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight.normal_(std=std, generator=generator)


class VocabularyEmbedding(nn.Module):
    """The embedding of tokens [S, B], as rows [S/n, B, D] of this rank. It holds V/n rows of the table, whose gradient
    is sparse: a row for each token, zero for those of other ranks."""

    def __init__(self, vocabulary: int, features: int, comm: to.TorchComm, init: Callable[[Tensor], Tensor],
                 device: torch.device, dtype: torch.dtype) -> None:  # fmt: skip
        super().__init__()
        self.comm, self.rank = comm, comm.get_rank()
        part = vocabulary // comm.get_size()
        first = self.rank * part
        table = torch.empty(vocabulary, features, device=device)
        with torch.no_grad():
            init(table)
        self.weight = nn.Parameter(table[first : first + part].to(dtype, copy=True))  # not the whole table
        set_layout(self, to.nn.ParameterLayout(comm, {"weight": 0}))

    def forward(self, tokens: Tensor) -> Tensor:
        part = self.weight.size(0)
        is_here = tokens // part == self.rank
        # Tokens of other ranks read different rows, and the results are masked. If all read one row, its gradient would
        # be a serial sum.
        found = F.embedding(tokens % part, self.weight, sparse=True)
        return to.ops.reduce_scatter(found.masked_fill(~is_here.unsqueeze(-1), 0), self.comm, 0)


class Llama(nn.Module):
    """Maps tokens [S, B] to this rank's part of the logits [S, B, V/n]; loss() to the mean loss over all tokens.

    Args:
        shape: sizes of the whole model.
        recompute: if True, blocks keep their input alone and run again in the backward pass.
        others: as for to.nn.ParallelTransformerBlock.
    """

    def __init__(self, shape: Transformer, comm: to.TorchComm, *, seed: int, device: torch.device, dtype: torch.dtype,
                 algorithm: str = "auto", fp8: to.nn.Float8Recipe | None = None,
                 recompute: bool = False) -> None:  # fmt: skip
        super().__init__()
        ranks = comm.get_size()
        for what in ("heads", "kv_heads", "ffn", "vocabulary", "sequence"):
            if getattr(shape, what) % ranks != 0:
                raise ValueError(f"train_llama: expected {what} divisible by the {ranks} ranks, got "
                                 f"{getattr(shape, what)}. Use another preset or number of ranks.")  # fmt: skip
        generator = torch.Generator(device).manual_seed(seed)  # every rank draws full weights and keeps its part
        start = normal(generator)
        self.comm, self.recompute = comm, recompute
        self.embedding = VocabularyEmbedding(shape.vocabulary, shape.hidden, comm, start, device, dtype)
        self.blocks = nn.ModuleList(
            to.nn.ParallelTransformerBlock(
                shape.hidden, shape.heads, shape.ffn, comm, kv_heads=shape.kv_heads, activation="swiglu", norm="rms",
                norm_eps=EPS, bias=False, device=device, dtype=dtype, algorithm=algorithm, fp8=fp8,
                gradient_accumulation_fusion=True, init=start,
                output_init=normal(generator, 0.02 / math.sqrt(2 * shape.layers)),
            )
            for _ in range(shape.layers)
        )  # fmt: skip
        self.norm = nn.RMSNorm(shape.hidden, eps=EPS, device=device, dtype=dtype)
        self.head = to.nn.ColumnParallelLinear(shape.hidden, shape.vocabulary, comm, bias=False, device=device,
                                               dtype=dtype, algorithm=algorithm, init=start,
                                               gradient_accumulation_fusion=True)  # fmt: skip
        to.nn.mark_replicated(self.norm, comm)
        to.nn.defer_replicated_grads(self)  # the trainer sums them, once a step
        self.register_buffer("angles", rotation_angles(shape).to(device, dtype))
        self.rotate = torch.compile(rotate) if device.type == "cuda" else rotate  # one kernel

    def forward(self, tokens: Tensor) -> Tensor:
        rotate_by_position = partial(self.rotate, angles=self.angles)
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, rotate_by_position, use_reentrant=False)
            else:
                x = block(x, rotate_by_position)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return to.nn.vocabulary_parallel_cross_entropy(self(tokens), targets, self.comm)


def rotation_angles(shape: Transformer) -> Tensor:
    """Returns cosines and sines of the rotary position embedding: [2, S, 1, 1, head_dim / 2]."""
    half = shape.hidden // shape.heads // 2
    frequencies = torch.exp(torch.arange(half) * (-math.log(BASE) / half))
    angles = torch.arange(shape.sequence)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))[:, :, None, None, :]
