"""The parts of a transformer, split over the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from torch_overlap._C import TorchComm
from torch_overlap.nn._initialize import Init
from torch_overlap.nn._norm import RMSNorm
from torch_overlap.nn._parallel_linear import LayerOptions, per_rank
from torch_overlap.nn.layout import mark_replicated, ranks_of, replicate
from torch_overlap.nn.linear import ColumnParallelLinear, RowParallelLinear
from torch_overlap.ops.gemm import swiglu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": F.silu,  # applied to the gate, which multiplies
}
NORMS: dict[str, Callable[..., nn.Module]] = {"layer": nn.LayerNorm, "rms": RMSNorm}


def _one_of(who: str, what: str, table: dict[str, Any], value: str) -> Any:
    if value not in table:
        raise ValueError(f"{who}: expected {what} to be one of {', '.join(table)}, got '{value}'. Use one of them.")
    return table[value]


def _end(row: nn.Module, h: Tensor, column: nn.Module, x: Tensor) -> Tensor:
    """Returns row(h), of which the backward pass starts to gather the x of `column` again.

    Layers that took the place of ours are called with h alone.
    """
    if isinstance(row, RowParallelLinear) and isinstance(column, ColumnParallelLinear):
        return row(h, column.regathered(x))  # type: ignore[no-any-return]
    return row(h)  # type: ignore[no-any-return]


class ParallelMLP(nn.Module):
    """Computes down(activation(up(x))), or down(silu(gate(x)) * up(x)), with hidden features split over the ranks.

    x and the result: this rank's rows [S/n, ..., features] with sequence_parallel, else all rows on every rank.

    Args:
        features, hidden: of the whole layer; hidden is divisible by the number of ranks.
        comm: as for ColumnParallelLinear.
        activation: "gelu", "gelu_tanh", or "swiglu", whose gate and up projections share one gather.
        sequence_dim: the dimension of rows that sequence parallelism splits.
        keep_gathered: of the first projections; see ColumnParallelLinear.
        init, output_init: of the first projections and of the last; see ColumnParallelLinear.
        options: bias, sequence_parallel, device, dtype, algorithm, require_fused, fp8, as for ColumnParallelLinear.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        comm: TorchComm | DeviceMesh,
        *,
        activation: str = "gelu",
        sequence_dim: int = 0,
        keep_gathered: bool = False,
        init: Init | None = None,
        output_init: Init | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        self.activation = _one_of("ParallelMLP", "activation", ACTIVATIONS, activation)
        self.is_gated = activation == "swiglu"
        per_rank("ParallelMLP", "hidden", hidden, ranks_of("ParallelMLP", comm)[0])
        self.up = ColumnParallelLinear(features, [hidden, hidden] if self.is_gated else [hidden], comm,
                                       gather_dim=sequence_dim, keep_gathered=keep_gathered, init=init,
                                       **options)  # fmt: skip
        self.down = RowParallelLinear(hidden, features, comm, scatter_dim=sequence_dim, init=output_init, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output, valid on the current stream."""
        return _end(self.down, self._gated(x) if self.is_gated else self.activation(*self.up(x)), self.up, x)

    def _gated(self, x: Tensor) -> Tensor:
        gate, up = self.up(x)
        if torch.compiler.is_compiling() or gate.dtype != up.dtype:  # compilers fuse the operators of torch
            return F.silu(gate) * up  # type: ignore[no-any-return]
        return swiglu(gate, up)


class ParallelSelfAttention(nn.Module):
    """Scaled dot product attention over the whole sequence, with heads split over the ranks.

    x and the result: [sequence, batch, features] (sequence_dim 0) or [batch, sequence, features] (1); with
    sequence_parallel each rank has its part of the sequence, else all of it. Query, key and value share one gather.

    Args:
        features, heads: of the whole layer; heads and kv_heads are divisible by the number of ranks.
        kv_heads: heads of key and value, each of which serves heads / kv_heads queries; default: heads.
        head_dim: default: features / heads.
        causal: if True, a position attends to itself and earlier ones only.
        init, output_init: of the projections to query, key and value, and of the last one.
        others: as for ParallelMLP.

    Raises:
        ValueError: heads that do not divide.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        comm: TorchComm | DeviceMesh,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        sequence_dim: int = 0,
        keep_gathered: bool = False,
        init: Init | None = None,
        output_init: Init | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        who, kv_heads = "ParallelSelfAttention", heads if kv_heads is None else kv_heads
        if sequence_dim not in (0, 1):
            raise ValueError(f"{who}: expected sequence_dim 0 or 1, got {sequence_dim}. x is [sequence, batch, "
                             "features] or [batch, sequence, features].")  # fmt: skip
        if heads % kv_heads != 0:
            raise ValueError(f"{who}: expected heads divisible by kv_heads {kv_heads}, got {heads}. Each head of key "
                             "and value serves as many heads of the query; choose kv_heads so.")  # fmt: skip
        if not head_dim and features % heads != 0:
            raise ValueError(f"{who}: expected features divisible by heads {heads} without head_dim, got {features}. "
                             "Pass head_dim.")  # fmt: skip
        ranks = ranks_of(who, comm)[0]
        per_rank(who, "heads", heads, ranks, "A head stays whole on one rank: add heads")
        per_rank(who, "kv_heads", kv_heads, ranks, "A head stays whole on one rank: repeat heads of key and value")
        self.head_dim = head_dim if head_dim else features // heads
        self.shares_kv, self.causal, self.sequence_dim = kv_heads != heads, causal, sequence_dim
        sizes = [count * self.head_dim for count in (heads, kv_heads, kv_heads)]
        self.qkv = ColumnParallelLinear(features, sizes, comm, gather_dim=sequence_dim, keep_gathered=keep_gathered,
                                        init=init, **options)  # fmt: skip
        self.out = RowParallelLinear(sizes[0], features, comm, scatter_dim=sequence_dim, init=output_init, **options)

    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Returns the output, valid on the current stream.

        Args:
            x: the input, in the layout of the class.
            rotate: applied to query and key, as [sequence, batch, heads/n, head_dim] or [batch, sequence, ...] with
                the whole sequence; for rotary position embeddings.
        """
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv(x))
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        order = (1, 2, 0, 3) if self.sequence_dim == 0 else (0, 2, 1, 3)  # [batch, heads/n, sequence, head_dim]
        q, k, v = (t.permute(order) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.shares_kv)
        back = (2, 0, 1, 3) if self.sequence_dim == 0 else (0, 2, 1, 3)
        return _end(self.out, y.permute(back).flatten(2), self.qkv, x)


class ParallelTransformerBlock(nn.Module):
    """Computes h = x + attention(norm(x)), then h + mlp(norm(h)).

    With sequence_parallel the norms work on this rank's rows: the backward pass sums the gradients of their parameters
    over the ranks.

    Args:
        features, heads, hidden: of the whole block.
        kv_heads, head_dim, causal: as for ParallelSelfAttention.
        activation: as for ParallelMLP.
        norm: "layer" or "rms". "rms" with a norm_eps runs eagerly on a GPU as one kernel forward and two backward;
            under torch.compile or autocast it is torch's.
        norm_eps: default: that of nn.LayerNorm, nn.RMSNorm.
        bias: of the linear layers, and of a layer norm.
        others: as for ParallelMLP.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        hidden: int,
        comm: TorchComm | DeviceMesh,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        activation: str = "gelu",
        norm: str = "layer",
        norm_eps: float | None = None,
        sequence_dim: int = 0,
        keep_gathered: bool = False,
        init: Init | None = None,
        output_init: Init | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        make_norm = _one_of("ParallelTransformerBlock", "norm", NORMS, norm)
        device = options.get("device")
        ranks = ranks_of("ParallelTransformerBlock", comm)[0]
        of_norm: dict[str, Any] = {"device": ranks.get_device() if device is None else device,
                                   "dtype": options.get("dtype")}  # fmt: skip
        if norm_eps is not None:
            of_norm["eps"] = norm_eps
        if norm == "layer":
            of_norm["bias"] = options.get("bias", True)
        self.attention_norm = make_norm(features, **of_norm)
        self.attention = ParallelSelfAttention(
            features, heads, comm, kv_heads=kv_heads, head_dim=head_dim, causal=causal, sequence_dim=sequence_dim,
            keep_gathered=keep_gathered, init=init, output_init=output_init, **options,
        )  # fmt: skip
        self.mlp_norm = make_norm(features, **of_norm)
        self.mlp = ParallelMLP(features, hidden, comm, activation=activation, sequence_dim=sequence_dim,
                               keep_gathered=keep_gathered, init=init, output_init=output_init,
                               **options)  # fmt: skip
        if options.get("sequence_parallel", True):
            mark_replicated(self.attention_norm, comm)
            mark_replicated(self.mlp_norm, comm)
        elif isinstance(comm, DeviceMesh):  # DTensors, as all parameters of the block
            replicate(self.attention_norm, ranks, comm, is_partial=False)
            replicate(self.mlp_norm, ranks, comm, is_partial=False)

    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Returns the output, valid on the current stream. `rotate`: as for ParallelSelfAttention."""
        x = x + self.attention(self.attention_norm(x), rotate)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]
