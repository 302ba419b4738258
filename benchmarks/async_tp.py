"""The products of a layer by torch's async tensor parallelism, inserted by hand.

torch.compile with torch._inductor.config._micro_pipeline_tp fuses (torch/_inductor/fx_passes/micro_pipeline_tp.py), in
a layer with sequence parallelism:

              column-parallel                               row-parallel
    forward   x gathered, then its product with every       product, then reduce-scatter:
              weight: fused_all_gather_matmul               fused_matmul_reduce_scatter
    backward  one weight: dy w, then reduce-scatter:        dy gathered, then dy w:
              fused_matmul_reduce_scatter                   fused_all_gather_matmul
              several: reduce-scatter of their products'
              sum, not fused, since it follows no product

Gathered tensors are kept (return_A): x until the backward pass, which does not gather it again, and dy for the gradient
of the weight. These gradients are plain products. "joined" gives async TP one weight for all products of one gather
(query, key and value; gate and up), and it then fuses their backward pass too. The rest of the layer is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines the operators
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torch_overlap.nn import ColumnParallelLinear, ParallelTransformerBlock, RowParallelLinear
from torch_overlap.tools.bench.libraries import NO_CUDA

GATHER_MATMUL = "symm_mem::fused_all_gather_matmul"


@dataclass(frozen=True)
class Products:
    """The operators of async TP, for rows [M, K] and weights [K, N].

    gather_matmul: takes this rank's rows, returns all rows and their product with each weight.
    matmul_scatter: returns this rank's rows of the sum of all ranks' products.
    scatter: returns this rank's rows of the sum of all ranks' rows.
    """

    gather_matmul: Callable[[Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]
    matmul_scatter: Callable[[Tensor, Tensor], Tensor]
    scatter: Callable[[Tensor], Tensor]

    @staticmethod
    def fused(group: dist.ProcessGroup, device: torch.device) -> Products:
        """Returns torch.ops.symm_mem's operators. They allocate symmetric memory in their first calls: capture later
        calls.

        Raises:
            RuntimeError: they do not run on this device or group.
        """
        if not torch._C._dispatch_has_kernel_for_dispatch_key(GATHER_MATMUL, device.type.upper()):
            raise RuntimeError(NO_CUDA)
        if group.size() == 1:
            raise RuntimeError("needs two ranks")
        name = group.group_name

        def gather_matmul(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(x, weights, 0, name, return_A=True)
            return gathered, products

        def matmul_scatter(x: Tensor, weight: Tensor) -> Tensor:
            part: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 0, name)
            return part

        def scatter(x: Tensor) -> Tensor:
            part = x.new_empty(x.size(0) // group.size(), x.size(1))
            dist.reduce_scatter_tensor(part, x, group=group)
            return part

        return Products(gather_matmul, matmul_scatter, scatter)


def use_async_tp(block: ParallelTransformerBlock, products: Products, joined: bool) -> None:
    """Makes a block compute its products by `products`. Requires sequence parallelism along dim 0 and no biases.

    The block keeps its parameters. `joined`: the weights of one gather are concatenated along dim 0.
    """
    for part, first, last in ((block.attention, "qkv", "out"), (block.mlp, "up", "down")):
        setattr(part, first, _Column(getattr(part, first), products, joined))
        setattr(part, last, _Row(getattr(part, last), products))


class _Column(nn.Module):
    def __init__(self, layer: ColumnParallelLinear, products: Products, joined: bool) -> None:
        super().__init__()
        self.products, self.joined = products, joined
        self.sizes = [w.size(0) for w in layer.weights]
        self.weights = nn.ParameterList([torch.cat(layer.weights).detach()] if joined else layer.weights)

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = _GatherMatmul.apply(self.products, x, *self.weights)  # type: ignore[no-untyped-call]
        return list(outputs[0].split(self.sizes, -1) if self.joined else outputs)


class _Row(nn.Module):
    def __init__(self, layer: RowParallelLinear, products: Products) -> None:
        super().__init__()
        self.products, self.weight = products, layer.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _MatmulScatter.apply(self.products, x, self.weight)  # type: ignore[no-untyped-call]
        return output


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).contiguous()


def _unflatten(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(-1, *like.shape[1:-1], rows.size(-1))


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Products, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        gathered, outputs = products.gather_matmul(_rows(x), [w.t() for w in weights])
        ctx.products = products
        ctx.save_for_backward(gathered, *weights)
        return tuple(_unflatten(y, x) for y in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gathered, *weights = ctx.saved_tensors
        rows = [_rows(grad) for grad in grads]
        weight_grads = [grad.t().mm(gathered) for grad in rows]
        if len(weights) == 1:
            x_grad = ctx.products.matmul_scatter(rows[0], weights[0])
        else:
            total = rows[0].mm(weights[0])
            for grad, weight in zip(rows[1:], weights[1:], strict=True):
                total.addmm_(grad, weight)
            x_grad = ctx.products.scatter(total)
        return None, _unflatten(x_grad, grads[0]), *weight_grads


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Products, x: Tensor, weight: Tensor) -> Tensor:
        rows = _rows(x)
        ctx.products = products
        ctx.save_for_backward(rows, weight)
        return _unflatten(products.matmul_scatter(rows, weight.t()), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        gathered, (x_grad,) = ctx.products.gather_matmul(_rows(grad), [weight])
        return None, _unflatten(x_grad, grad), gathered.t().mm(rows)
