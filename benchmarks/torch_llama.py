"""The training step of examples/train_llama.py as torch itself does it: DTensor's tensor and sequence parallelism.

Every layer is compiled, and so is the loss; torch.compile fuses the products with the collectives if asked to ("async
TP"). Parameters are bfloat16 with float32 weights for AdamW, as in the example; gradients of micro-batches add up in
bfloat16, as torch does it. The plan of the layers is that of torchtitan's llama3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gpt.model import rotate
from llama.model import EPS, Llama, rotation_angles
from llama.training import LlamaTrainer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import torch_overlap as to
from torch_overlap.mesh.models import Transformer
from torch_overlap.tools.bench.libraries import NO_CUDA

ALONG = Shard(1)  # of x [B, S, D]
MODEL_PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=ALONG),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=ALONG, output_layouts=Shard(-1), use_local_output=False),
}
BLOCK_PLAN = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(ALONG, None), desired_input_layouts=(Replicate(), None)),
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=ALONG),
    "mlp_norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(ALONG,), desired_input_layouts=(Replicate(),)),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=ALONG),
}


def linear(inner: int, outer: int) -> nn.Linear:
    return nn.Linear(inner, outer, bias=False, device="meta")


class Attention(nn.Module):
    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.width = shape.hidden // shape.heads
        sizes = [count * self.width for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
        self.wq, self.wk, self.wv = (linear(shape.hidden, size) for size in sizes)
        self.wo = linear(sizes[0], shape.hidden)
        self.shares_kv = shape.heads != shape.kv_heads

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.width)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, angles), rotate(k, angles), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shares_kv)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.gate, self.up = (linear(shape.hidden, shape.ffn) for _ in range(2))
        self.down = linear(shape.ffn, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(shape.hidden, EPS, device="meta") for _ in range(2))
        self.attention, self.mlp = Attention(shape), FeedForward(shape)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.mlp(self.mlp_norm(x))


class TorchLlama(nn.Module):
    """Maps tokens [B, S] to logits [B, S, V], a DTensor that is split by vocabulary."""

    def __init__(self, shape: Transformer, mesh: DeviceMesh, source: Llama) -> None:
        """`source` has the weights of this rank."""
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden, device="meta")
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, EPS, device="meta")
        self.head = linear(shape.hidden, shape.vocabulary)
        parallelize_module(self, mesh, MODEL_PLAN)
        for block in self.blocks:
            parallelize_module(block, mesh, BLOCK_PLAN)
        parts = [source.embedding.weight]
        for block in source.blocks:
            parts += [block.attention_norm.weight, block.mlp_norm.weight, *block.attention.qkv.weights,
                      block.attention.out.weight, *block.mlp.up.weights, block.mlp.down.weight]  # fmt: skip
        parts += [source.norm.weight, source.head.weight]
        for (name, parameter), part in zip(list(self.named_parameters()), parts, strict=True):
            value = DTensor.from_local(part.detach().clone(), mesh, parameter.placements)
            module, _, last = name.rpartition(".")
            setattr(self.get_submodule(module), last, nn.Parameter(value))
        angles = rotation_angles(shape)[:, :, 0].to(parts[0].device, parts[0].dtype)  # [2, S, 1, head_dim / 2]
        self.register_buffer("angles", angles)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        logits: Tensor = self.head(self.norm(x))
        return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class TorchTrainer(LlamaTrainer):
    """The trainer of the example with torch's model. Its collectives are those of torch's default group.

    Args:
        async_tp: if True, torch.compile fuses products with collectives.
        others: as for LlamaTrainer; the algorithm is not used.
    """

    def __init__(self, *args: object, async_tp: bool, **options: object) -> None:
        self.async_tp = async_tp
        super().__init__(*args, **options)  # type: ignore[arg-type]

    def make(self, dtype: torch.dtype, algorithm: str, fp8: to.nn.Float8Recipe | None, keep_gathered: bool) -> None:
        source = Llama(self.config, self.comm, seed=self.seed, device=self.device, dtype=dtype)
        self.mesh = init_device_mesh(self.device.type, (self.comm.get_size(),), mesh_dim_names=("tp",))
        self.model = TorchLlama(self.config, self.mesh, source)
        if self.async_tp:
            if self.device.type != "cuda":
                raise RuntimeError(NO_CUDA)
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            enable_symm_mem_for_group(self.mesh.get_group().group_name)
        self.criterion = cross_entropy
        if self.device.type == "cuda":
            options = {"_micro_pipeline_tp": self.async_tp}
            for block in self.model.blocks:
                block.compile(fullgraph=True, options=options)
            self.criterion = torch.compile(cross_entropy)
        self.parameters = list(self.model.parameters())
        self.weights = [nn.Parameter(p.detach().to_local().float()) for p in self.parameters]
        self.is_split = [p.placements != (Replicate(),) for p in self.parameters]
        self.loss = torch.zeros((), device=self.device)

    def compute(self) -> None:
        self.loss.zero_()
        for tokens, targets in zip(*(t.t().chunk(self.accumulate) for t in (self.inputs, self.targets)), strict=True):
            with loss_parallel():
                loss = self.criterion(self.model(tokens.contiguous()), targets.contiguous()) / self.accumulate
                loss.backward()
            self.loss.add_(loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach())
        squares = torch.zeros(2, device=self.device)  # of split parameters, of the others
        for parameter, weight, is_split in zip(self.parameters, self.weights, self.is_split, strict=True):
            weight.grad = parameter.grad.redistribute(placements=parameter.placements).to_local().float()
            parameter.grad = None
            squares[0 if is_split else 1] += torch.linalg.vector_norm(weight.grad).square()
        torch.distributed.all_reduce(squares[0])
        scale = (1.0 / (squares.sum().sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([weight.grad for weight in self.weights], scale)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # the next micro-batches need the memory
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, self.weights, strict=True):
                parameter.to_local().copy_(weight)
