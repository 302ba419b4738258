"""A model as in torchtitan, whose code has no ranks, and plans of styles for it."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from torch_overlap.nn.styles import ColumnParallel, RowParallel, SequenceParallel, ShardInput, SharedGather

DIM, HEADS, HEAD_DIM, HIDDEN, VOCABULARY, SEQUENCE = 24, 6, 4, 48, 30, 12


def start(rank, size, store, shape=None, names=("tp",), backend="torch_overlap"):
    """Returns a mesh. DTensor's cache may have meshes of an earlier test in this process, whose groups are gone."""
    _clear_sharding_prop_cache()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    return dist.init_device_mesh("cpu", shape or (size,), mesh_dim_names=names)


class Attention(nn.Module):
    def __init__(self, kv_heads, bias):
        super().__init__()
        self.wq = nn.Linear(DIM, HEADS * HEAD_DIM, bias=bias)
        self.wk = nn.Linear(DIM, kv_heads * HEAD_DIM, bias=bias)
        self.wv = nn.Linear(DIM, kv_heads * HEAD_DIM, bias=bias)
        self.wo = nn.Linear(HEADS * HEAD_DIM, DIM, bias=bias)

    def forward(self, x, angles):
        batch, sequence, _ = x.shape
        q, k, v = (w(x).view(batch, sequence, -1, HEAD_DIM) for w in (self.wq, self.wk, self.wv))
        q, k = q * angles[:sequence, None], k * angles[:sequence, None]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).contiguous().view(batch, sequence, -1))


class FeedForward(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.w1 = nn.Linear(DIM, HIDDEN, bias=bias)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=bias)
        self.w3 = nn.Linear(DIM, HIDDEN, bias=bias)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, kv_heads, bias):
        super().__init__()
        self.attention, self.feed_forward = Attention(kv_heads, bias), FeedForward(bias)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x, angles):
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, kv_heads=6, bias=False, layers=2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(i): Block(kv_heads, bias) for i in range(layers)})
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)
        self.register_buffer("angles", torch.linspace(0.5, 1.5, SEQUENCE * HEAD_DIM).view(SEQUENCE, HEAD_DIM))

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.angles)
        return self.output(self.norm(x))


def plan(sequence_parallel, algorithm="auto", fused=False):
    options = {"sequence_parallel": sequence_parallel, "algorithm": algorithm, "require_fused": fused}
    always = {
        "layers.*.attention": SharedGather("wq", "wk", "wv", multiple_of=HEAD_DIM, **options),
        "layers.*.attention.wo": RowParallel(**options),
        "layers.*.feed_forward": SharedGather("w1", "w3", **options),
        "layers.*.feed_forward.w2": RowParallel(**options),
        "output": ColumnParallel(gather_output=True, **options),
    }
    norms = {name: SequenceParallel() for name in ("layers.*.attention_norm", "layers.*.ffn_norm", "norm")}
    return always | norms | {"layers.0": ShardInput()} if sequence_parallel else always
