"""A Llama that generates tokens, tensor parallel, with a cache of keys and values, one CUDA graph a batch size.

Rank r of n holds 1/n of every matrix and of the cache. Rows of tokens are on all ranks; a layer sums twice:

    h [B, D]                                   the residual stream, x = norm(h)
    q, k, v = x [wq; wk; wv]^T                 1/n of the heads, joined in one product
    x, h = norm(h + sum of ranks(attention wo^T))
    gate, up = x [wgate; wup]^T
    x, h = norm(h + sum of ranks(silu(gate) * up wdown^T))

`Sums` has a product, the sum over the ranks, the residual, the norm and the product after it in one operator
(ops.matmul_all_reduce_rms_norm); its other forms are what it is measured against. With float8 the matrices have a scale
for each output and the rows one each, which the norm computes (ops.all_reduce_rms_norm_quantize). Prompts of many rows
are read with 1/n of the rows on each rank between the products (sequence parallelism): the sums scatter rows, and the
next product gathers them.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import torch_overlap as to
from llama.weights import LAYER, Weights
from torch_overlap.quantize import ScalingMode

Rows = Any  # a tensor; of a Float8Matrix its values and a scale for each row
Sum = Callable[[Rows, "Matrix", Tensor, Tensor, "Matrix | None"], tuple[Tensor, Tensor]]
# Prompts of at least SEQUENCE_ROWS / ranks rows are read with sequence parallelism. It is faster from there on
# (decode_llama-h200-tp4-2026-11-28.json).
SEQUENCE_ROWS = 4096
MAX_FLASHINFER_ROWS = 256  # of FlashInfer's workspace


class Matrix:
    """This rank's part of a weight [out, in], and the rows that it multiplies."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def rows(self, x: Tensor) -> Rows:
        return x

    def active_rows(self, gate_up: Tensor) -> Rows:
        """Returns silu(gate) * up."""
        return to.ops.swiglu(gate_up)

    def __call__(self, rows: Rows) -> Tensor:
        return F.linear(rows, self.weight)

    def gathered(self, rows: Rows, comm: to.TorchComm, algorithm: str) -> Tensor:
        """Multiplies the rows of all ranks."""
        (result,), _ = to.ops.all_gather_matmul(rows, [self.weight], comm, algorithm=algorithm)
        return result

    def scattered(self, rows: Rows, comm: to.TorchComm, algorithm: str) -> Tensor:
        """Returns this rank's rows of the sum of all ranks' products."""
        return to.ops.matmul_reduce_scatter(rows, self.weight, comm, algorithm=algorithm)


class Float8Matrix(Matrix):
    """The same as float8_e4m3fn with a scale for each output. Rows are values and a scale for each row."""

    MODE = ScalingMode.ROW_SCALING

    def __init__(self, weight: Tensor) -> None:
        values, self.scale_inv, *_ = to.ops.quantize(weight, self.MODE)
        super().__init__(values)
        self.dtype = weight.dtype
        self.activate = torch.compile(quantized_swiglu, dynamic=False) if weight.is_cuda else quantized_swiglu

    def rows(self, x: Tensor) -> Rows:
        values, scale_inv, *_ = to.ops.quantize(x, self.MODE)
        return values, scale_inv

    def active_rows(self, gate_up: Tensor) -> Rows:
        return self.activate(gate_up)

    def __call__(self, rows: Rows) -> Tensor:
        result, *_ = to.ops.gemm(*rows, self.weight, self.scale_inv, scaling_mode=self.MODE, rhs_transposed=True,
                                 out_dtype=self.dtype)  # fmt: skip
        return result

    def gathered(self, rows: Rows, comm: to.TorchComm, algorithm: str) -> Tensor:
        (result,), *_ = to.ops.scaled_all_gather_matmul(
            *rows, [self.weight], [self.scale_inv], comm, out_dtype=self.dtype, algorithm=algorithm,
            scaling_mode=self.MODE,
        )  # fmt: skip
        return result

    def scattered(self, rows: Rows, comm: to.TorchComm, algorithm: str) -> Tensor:
        return to.ops.scaled_matmul_reduce_scatter(
            *rows, self.weight, self.scale_inv, comm, out_dtype=self.dtype, algorithm=algorithm, scaling_mode=self.MODE
        )


def quantized_swiglu(gate_up: Tensor) -> Rows:
    """Returns silu(gate) * up as float8_e4m3fn values, and a scale for each row."""
    gate, up = gate_up.float().chunk(2, -1)
    active = F.silu(gate) * up
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale_inv = active.abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest
    return (active / scale_inv).clamp(-largest, largest).to(torch.float8_e4m3fn), scale_inv


class Sums:
    """How a product is summed over the ranks, normalized with the residual, and multiplied by the next matrix:
    (rows, matrix, residual, gain, following) -> (following(norm(h) * gain), h) with h = residual + the sum. Without a
    following matrix the first is norm(h) * gain.

    kind:
        "fused": one operator, whose kernels are those of `algorithm`; with float8 the first product is another.
        "nccl": torch's product, NCCL's all_reduce, torch's addition and norm.
        "torch": the same with torch's one-shot all_reduce over symmetric memory; not for float8.
        "flashinfer": torch's product, and FlashInfer's kernel for the rest (the package flashinfer-python); "nccl" for
            more rows than MAX_FLASHINFER_ROWS.
        With float8 all products but that of "fused" after the norm are `ops.gemm`.
    """

    KINDS = ("fused", "nccl", "torch", "flashinfer")

    def __init__(self, kind: str, comm: to.TorchComm, eps: float, algorithm: str = "auto") -> None:
        if kind not in self.KINDS:
            raise ValueError(f"decode_llama: expected sums of {', '.join(self.KINDS)}, got {kind}")
        self.comm, self.eps, self.algorithm = comm, eps, algorithm
        self.symmetric: dict[tuple[int, ...], Tensor] = {}
        self.flashinfer_workspace: Any = None  # the tensor of its addresses
        self.run: Sum = getattr(self, f"_{kind}")

    def __call__(self, rows: Rows, matrix: Matrix, residual: Tensor, gain: Tensor,
                 following: Matrix | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        return self.run(rows, matrix, residual, gain, following)

    def product(self, x: Tensor, matrix: Matrix) -> Tensor:
        """Multiplies the normalized rows."""
        return matrix(matrix.rows(x))

    def _fused(self, rows: Rows, matrix: Matrix, residual: Tensor, gain: Tensor,
               following: Matrix | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        if isinstance(following, Float8Matrix):
            result, _, hidden, _ = to.ops.all_reduce_rms_norm_quantize(
                matrix(rows), residual, gain, self.comm, eps=self.eps, scaling_mode=following.MODE,
                next_weight=following.weight, next_weight_scale_inv=following.scale_inv,
            )  # fmt: skip
            return result, hidden
        if isinstance(matrix, Float8Matrix):
            return to.ops.all_reduce_rms_norm(matrix(rows), residual, gain, self.comm, eps=self.eps)
        return to.ops.matmul_all_reduce_rms_norm(
            rows, matrix.weight, residual, gain, self.comm, eps=self.eps, algorithm=self.algorithm,
            next_weight=following and following.weight,
        )  # fmt: skip

    def _then_product(self, x: Tensor, following: Matrix | None) -> Tensor:
        return x if following is None else self.product(x, following)

    def _then_norm(self, total: Tensor, residual: Tensor, gain: Tensor,
                   following: Matrix | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        hidden = residual + total
        x = F.rms_norm(hidden, (hidden.shape[-1],), gain, self.eps)
        return self._then_product(x, following), hidden

    def _nccl(self, rows: Rows, matrix: Matrix, residual: Tensor, gain: Tensor,
              following: Matrix | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        total = matrix(rows)
        self.comm.all_reduce(total, to.ReduceOp.SUM, async_op=False, hints={"custom_collectives": "off"})
        return self._then_norm(total, residual, gain, following)

    def _torch(self, rows: Rows, matrix: Matrix, residual: Tensor, gain: Tensor,
               following: Matrix | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        buffer = self.symmetric_like(residual)
        torch.mm(rows, matrix.weight.t(), out=buffer)
        total = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", dist.group.WORLD.group_name)  # type: ignore[union-attr]
        return self._then_norm(total, residual, gain, following)

    def _flashinfer(self, rows: Rows, matrix: Matrix, residual: Tensor, gain: Tensor,
                    following: Matrix | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        from flashinfer import comm as flashinfer

        count, features = residual.shape
        if count > MAX_FLASHINFER_ROWS:
            return self._nccl(rows, matrix, residual, gain, following)
        rank, size = self.comm.get_rank(), self.comm.get_size()
        if self.flashinfer_workspace is None:  # collective
            _, self.flashinfer_workspace = flashinfer.trtllm_create_ipc_workspace_for_all_reduce_fusion(
                rank, size, MAX_FLASHINFER_ROWS, features, group=dist.group.WORLD
            )
        hidden, norm, values, scale_inv = torch.empty_like(residual), None, None, None
        if isinstance(following, Float8Matrix):
            pattern = flashinfer.AllReduceFusionPattern.kARResidualRMSNormDynamicFP8Quant
            values = torch.empty_like(residual, dtype=torch.float8_e4m3fn)
            scale_inv = torch.empty(count, 1, device=residual.device)
        else:
            pattern = flashinfer.AllReduceFusionPattern.kARResidualRMSNorm
            norm = torch.empty_like(residual)
        flashinfer.trtllm_allreduce_fusion(
            allreduce_in=matrix(rows), world_size=size, world_rank=rank, token_num=count, hidden_dim=features,
            workspace_ptrs=self.flashinfer_workspace, launch_with_pdl=True, trigger_completion_at_end=True,
            pattern_code=pattern, fp32_acc=True, use_oneshot=None, allreduce_out=None, residual_in=residual,
            residual_out=hidden, norm_out=norm, quant_out=values, scale_out=scale_inv, rms_gamma=gain,
            rms_eps=self.eps, scale_factor=None, layout_code=None,
        )  # fmt: skip
        if norm is None:
            return following((values, scale_inv)), hidden
        return self._then_product(norm, following), hidden

    def symmetric_like(self, rows: Tensor) -> Tensor:
        """Returns a buffer that all ranks have mapped. Collective at the first use of a shape."""
        import torch.distributed._symmetric_memory as symmetric

        if rows.shape not in self.symmetric:
            buffer = symmetric.empty(rows.shape, dtype=rows.dtype, device=rows.device)
            symmetric.rendezvous(buffer, dist.group.WORLD)  # type: ignore[arg-type]
            self.symmetric[rows.shape] = buffer
        return self.symmetric[rows.shape]


class ScatteredSums(Sums):
    """The same with 1/n of the rows, in rank order, on each rank: the residual and both results. The products have all
    rows."""

    def __init__(self, comm: to.TorchComm, eps: float, algorithm: str = "auto") -> None:
        super().__init__("fused", comm, eps, algorithm)

    def __call__(self, rows: Rows, matrix: Matrix, residual: Tensor, gain: Tensor,
                 following: Matrix | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        return self._then_norm(matrix.scattered(rows, self.comm, self.algorithm), residual, gain, following)

    def product(self, x: Tensor, matrix: Matrix) -> Tensor:
        return matrix.gathered(matrix.rows(x), self.comm, self.algorithm)


@dataclass
class Layer:
    """This rank's part of a layer: weights, and keys and values of past tokens, [batch, heads, tokens, features]."""

    norm: Tensor
    qkv: Matrix
    o: Matrix
    after_norm: Tensor
    gate_up: Matrix
    down: Matrix
    keys: Tensor
    values: Tensor


@dataclass
class Captured:
    """A CUDA graph, and the function that it was captured from, which keeps its inputs."""

    graph: torch.cuda.CUDAGraph
    function: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


class Decoder:
    """Generates the likeliest tokens.

    Args:
        weights: of the whole model; this rank keeps its part.
        batch: sequences at a time, at most.
        tokens: of a sequence, prompt included, at most.
        sums: the name of a form of `Sums`.
        sequence_rows: prompts of at least this many rows, divisible by the ranks, are read with sequence parallelism.
            Default: SEQUENCE_ROWS over the ranks.
        float8: the matrices of layers are float8_e4m3fn, in place of `dtype`.
    """

    def __init__(self, weights: Weights, comm: to.TorchComm, *, batch: int, tokens: int, dtype: torch.dtype,
                 sums: str = "fused", algorithm: str = "auto", sequence_rows: int | None = None,
                 float8: bool = False) -> None:  # fmt: skip
        self.shape, self.comm, self.dtype = weights.shape, comm, dtype
        self.device, ranks = comm.get_device(), comm.get_size()
        for what in ("kv_heads", "ffn", "vocabulary", "hidden"):
            if getattr(self.shape, what) % ranks != 0:
                raise ValueError(f"decode_llama: expected {what} divisible by the {ranks} ranks, got "
                                 f"{getattr(self.shape, what)}. Use another model or number of ranks.")  # fmt: skip
        self.kv_heads = self.shape.kv_heads // ranks
        self.width = self.shape.hidden // self.shape.heads
        self.eps = weights.eps
        self.float8 = float8
        self.matrix = Float8Matrix if float8 else Matrix
        self.angles_of = partial(rotation_angles, width=self.width, base=weights.rope_base)
        # A step has one shape. As single kernels, what is around its products takes long.
        self.attend_one = torch.compile(attend_one, dynamic=False) if self.device.type == "cuda" else attend_one
        self.sums = Sums(sums, comm, weights.eps, algorithm)
        self.scattered = ScatteredSums(comm, weights.eps, algorithm)
        self.sequence_rows = sequence_rows or SEQUENCE_ROWS // ranks
        self.embedding = self._part(weights, "model.embed_tokens.weight", dim=1)
        self.norm = self._whole(weights, "model.norm.weight")
        self.head = self._part(weights, "lm_head.weight", dim=0)
        self.layers = [self._layer(weights, LAYER.format(i)) for i in range(self.shape.layers)]
        self._make_room(batch, tokens)

    def _make_room(self, batch: int, tokens: int) -> None:
        self.tokens = tokens
        self.angles = self.angles_of(tokens).to(self.device)
        self.is_past = torch.ones(tokens, tokens, dtype=torch.bool, device=self.device).tril()
        sizes = (len(self.layers), 2, batch, self.kv_heads, tokens, self.width)
        caches = torch.zeros(sizes, device=self.device, dtype=self.dtype)
        self.layers = [replace(layer, keys=cache[0], values=cache[1])
                       for layer, cache in zip(self.layers, caches, strict=True)]  # fmt: skip
        self.graphs: dict[int, tuple[Any, Tensor, Tensor, Tensor]] = {}

    def with_room(self, batch: int, tokens: int) -> Decoder:
        """Returns a decoder with the same weights, and a cache of its own."""
        other = copy.copy(self)
        other._make_room(batch, tokens)
        return other

    def with_sums(self, kind: str, algorithm: str = "auto") -> Decoder:
        """Returns a decoder with the same weights and cache, and graphs of its own."""
        other = copy.copy(self)
        other.sums, other.graphs = Sums(kind, self.comm, self.eps, algorithm), {}
        return other

    # --- Weights

    def _whole(self, weights: Weights, name: str) -> Tensor:
        return weights.get(name).to(self.device, self.dtype)

    def _part(self, weights: Weights, name: str, dim: int) -> Tensor:
        whole = weights.get(name)
        part = whole.chunk(self.comm.get_size(), dim)[self.comm.get_rank()]
        return part.to(self.device, self.dtype, copy=True).contiguous()

    def _layer(self, weights: Weights, prefix: str) -> Layer:
        def matrix(*names: str, dim: int = 0) -> Matrix:
            return self.matrix(torch.cat([self._part(weights, f"{prefix}{name}.weight", dim) for name in names]))

        nothing = torch.empty(0)
        return Layer(
            norm=self._whole(weights, prefix + "input_layernorm.weight"),
            qkv=matrix("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            o=matrix("self_attn.o_proj", dim=1),
            after_norm=self._whole(weights, prefix + "post_attention_layernorm.weight"),
            gate_up=matrix("mlp.gate_proj", "mlp.up_proj"),
            down=matrix("mlp.down_proj", dim=1),
            keys=nothing,
            values=nothing,
        )

    # --- Forward

    def attention(self, layer: Layer, qkv: Tensor, batch: int, positions: Tensor, angles: Tensor,
                  mask: Tensor) -> Tensor:  # fmt: skip
        """qkv [batch * T, features], of the tokens at `positions` [T] of every sequence, with their angles of rotation
        and the past of each. Returns this rank's heads."""
        function = self.attend_one if positions.numel() == 1 else attend
        return function(qkv, layer.keys[:batch], layer.values[:batch], positions, angles, mask)

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns the normalized rows [B * T, D] after all layers of tokens [B, T], and extends the cache."""
        batch, rows, ranks = tokens.size(0), tokens.numel(), self.comm.get_size()
        sums = self.scattered if rows >= self.sequence_rows and rows % ranks == 0 else self.sums
        residual = to.ops.all_gather(F.embedding(tokens.flatten(), self.embedding), self.comm, dim=-1)
        if sums is self.scattered:
            residual = residual.chunk(ranks)[self.comm.get_rank()]
        x = F.rms_norm(residual, (self.shape.hidden,), self.layers[0].norm, self.eps)
        angles, mask = self.angles[:, positions], self.is_past[positions]
        qkv = sums.product(x, self.layers[0].qkv)
        for layer, next_layer in itertools.zip_longest(self.layers, self.layers[1:]):
            heads = layer.o.rows(self.attention(layer, qkv, batch, positions, angles, mask))
            gate_up, residual = sums(heads, layer.o, residual, layer.after_norm, layer.gate_up)
            active = layer.down.active_rows(gate_up)
            if next_layer is None:
                x, _ = sums(active, layer.down, residual, self.norm, None)
            else:
                qkv, residual = sums(active, layer.down, residual, next_layer.norm, next_layer.qkv)
        return to.ops.all_gather(x, self.comm) if sums is self.scattered else x

    def logits(self, rows: Tensor) -> Tensor:
        """Returns the logits [rows, V] in float32, gathered."""
        return to.ops.all_gather(F.linear(rows, self.head).float(), self.comm, dim=-1)

    def likeliest(self, rows: Tensor) -> Tensor:
        """Returns the token with the largest logit of each row. Ranks exchange a candidate each."""
        value, index = F.linear(rows, self.head).float().max(-1)
        index = index + self.comm.get_rank() * self.head.size(0)
        mine = torch.stack((value.double(), index.double()), -1)
        every = to.ops.all_gather(mine[None], self.comm)  # [ranks, rows, 2]
        best = every[..., 0].argmax(0, keepdim=True)
        return every[..., 1].gather(0, best)[0].long()

    # --- Generation

    def prefill(self, prompt: Tensor, chunk: int) -> Tensor:
        """Reads prompts [B, T], at most `chunk` tokens of each sequence at a time. Returns the first new tokens."""
        rows = prompt
        for begin in range(0, prompt.size(1), chunk):
            piece = prompt[:, begin : begin + chunk]
            positions = torch.arange(begin, begin + piece.size(1), device=self.device)
            rows = self.hidden(piece, positions).view(*piece.shape, -1)[:, -1]
        return self.likeliest(rows)

    def step(self, token: Tensor, position: Tensor, out: Tensor) -> None:
        """Writes tokens [B] at `position` [1] to `out` [B, tokens], and replaces both by the next."""
        out.index_copy_(1, position, token[:, None])
        token.copy_(self.likeliest(self.hidden(token[:, None], position)))
        position.add_(1)

    def graph(self, batch: int) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Returns the step of a batch size as a CUDA graph, or a function on a CPU, and its token, position and out."""
        if batch not in self.graphs:
            token = torch.zeros(batch, dtype=torch.long, device=self.device)
            position = torch.zeros(1, dtype=torch.long, device=self.device)
            out = torch.zeros(batch, self.tokens, dtype=torch.long, device=self.device)
            state = (token, position, out)
            if self.device.type != "cuda":
                self.graphs[batch] = (lambda: self.step(*state), *state)
            else:
                self.graphs[batch] = (self._capture(partial(self.step, *state)), *state)
        return self.graphs[batch]

    def _capture(self, function: Callable[[], object]) -> Callable[[], object]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()  # libraries allocate their workspaces, operators their buffers
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return Captured(graph, function)

    @torch.inference_mode()
    def parts(self, batch: int) -> dict[str, Callable[[], object]]:
        """Returns what a step computes, each part alone as a CUDA graph, or a function on a CPU: torch's products, the
        attention of all layers, and the sums of the ranks. Collective, as are the sums."""
        draw = partial(torch.randn, device=self.device, dtype=self.dtype)
        matrices = [matrix for layer in self.layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        matrices.append(Matrix(self.head))
        inputs = [matrix.rows(draw(batch, matrix.weight.size(1))) for matrix in matrices]
        qkv, hidden = draw(batch, matrices[0].weight.size(0)), torch.zeros_like(inputs[-1])
        position = torch.zeros(1, dtype=torch.long, device=self.device)

        def products() -> None:
            for matrix, rows in zip(matrices, inputs, strict=True):
                matrix(rows)

        def attention() -> None:
            angles, mask = self.angles[:, position], self.is_past[position]
            for layer in self.layers:
                self.attention(layer, qkv, batch, position, angles, mask)

        def sums() -> None:
            for _ in range(2 * len(self.layers)):
                self.comm.all_reduce(hidden, to.ReduceOp.SUM, async_op=False)

        parts = {"products": products, "attention": attention, "sums": sums}
        return {name: self._capture(part) if self.device.type == "cuda" else part for name, part in parts.items()}

    @torch.inference_mode()
    def generate(self, prompt: Tensor, new: int, chunk: int = 512) -> Tensor:
        """Returns prompts [B, T] and `new` tokens after each.

        Raises:
            ValueError: more sequences or tokens than there is room for.
        """
        batch, begin = prompt.shape
        room = self.layers[0].keys.size(0)
        if batch > room or begin + new > self.tokens or new < 1:
            raise ValueError(f"decode_llama: expected at most {room} sequences of {self.tokens} tokens and one new "
                             f"token or more, got {batch} of {begin} + {new}")  # fmt: skip
        replay, token, position, out = self.graph(batch)
        out[:, :begin] = prompt
        token.copy_(self.prefill(prompt, chunk))
        position.fill_(begin)
        for _ in range(new - 1):
            replay()
        out.index_copy_(1, position, token[:, None])
        return out[:, : begin + new].clone()

    @torch.inference_mode()
    def teacher_forced(self, tokens: Tensor) -> Tensor:
        """Returns the logits [B, T, V] after each of the tokens [B, T]."""
        rows = self.hidden(tokens, torch.arange(tokens.size(1), device=self.device))
        return self.logits(rows).view(*tokens.shape, -1)


def extend_cache(qkv: Tensor, keys: Tensor, values: Tensor, positions: Tensor, angles: Tensor) -> Tensor:
    """Writes the keys and values of T tokens of each sequence to a cache, and returns their queries.

    Args:
        qkv: [B * T, (heads + 2 * kv) * width], the rows of a sequence one after the other.
        keys, values: [B, kv, tokens, width].
        positions: [T], of the tokens.
        angles: [2, T, width / 2], cosines and sines.

    Returns: [B, kv, heads / kv * T, width]. The queries of a group of heads share keys: they are rows of one product.
    """
    batch, kv, _, width = keys.shape
    count = positions.numel()
    qkv = qkv.view(batch, count, -1, width).transpose(1, 2)
    heads = qkv.size(1) - 2 * kv
    q, k, v = qkv.split((heads, kv, kv), 1)
    keys.index_copy_(2, positions, rotate(k, angles))
    values.index_copy_(2, positions, v)
    return rotate(q, angles).reshape(batch, kv, -1, width)


def attend(qkv: Tensor, keys: Tensor, values: Tensor, positions: Tensor, angles: Tensor,
           mask: Tensor) -> Tensor:  # fmt: skip
    """Extends a cache (extend_cache) and attends to it. mask: [T, tokens], True for a token's past. Returns
    [B * T, heads * width]."""
    batch, kv, _, width = keys.shape
    count = positions.numel()
    q = extend_cache(qkv, keys, values, positions, angles)
    group = q.size(2) // count
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask.repeat(group, 1))
    return out.view(batch, kv * group, count, width).transpose(1, 2).reshape(batch * count, -1)


def attend_one(qkv: Tensor, keys: Tensor, values: Tensor, positions: Tensor, angles: Tensor,
               mask: Tensor) -> Tensor:  # fmt: skip
    """The same for one token of each sequence. Compiled, it is two products and a few kernels, of which scaled dot
    product attention would be more."""
    q = extend_cache(qkv, keys, values, positions, angles)
    scores = (q @ keys.transpose(-1, -2)).float() * keys.size(-1) ** -0.5
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), -1).to(q.dtype)
    return (weights @ values).reshape(keys.size(0), -1)


def rotation_angles(tokens: int, width: int, base: float) -> Tensor:
    """Returns cosines and sines of the rotary position embedding: [2, tokens, width / 2], in float32."""
    frequencies = base ** (-torch.arange(width // 2, dtype=torch.float64) * 2 / width)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin())).float()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates pairs (i, i + width / 2) of x [B, heads, T, width]."""
    first, second = x.float().chunk(2, -1)
    cosine, sine = angles
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1).to(x.dtype)
