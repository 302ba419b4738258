"""The common part of the layers whose weights are split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from torch_overlap import _C
from torch_overlap._C import TorchComm, UnsupportedError
from torch_overlap.nn import _algorithm_checks
from torch_overlap.nn._float8 import ALGORITHMS
from torch_overlap.nn._initialize import Init
from torch_overlap.nn._main_grad import fusible, main_grad_of, with_main_grad
from torch_overlap.nn.float8 import Float8Recipe, Float8State
from torch_overlap.nn.layout import ranks_of


def per_rank(who: str, what: str, value: int, comm: TorchComm, advice: str = "Pad it") -> int:
    """Returns `value` / the number of ranks. Raises ValueError with `advice` if it does not divide."""
    size = comm.get_size()
    if value % size != 0:
        raise ValueError(f"{who}: expected {what} divisible by the group size {size}, got {value}. {advice}, or use "
                         "another number of ranks.")  # fmt: skip
    return value // size


class LayerOptions(TypedDict, total=False):
    """Options of both layers, which composite modules pass on; see ColumnParallelLinear."""

    bias: bool
    sequence_parallel: bool
    device: torch.device | str | None
    dtype: torch.dtype | None
    algorithm: str
    require_fused: bool
    fp8: Float8Recipe | None
    gradient_accumulation_fusion: bool


class ParallelLinear(nn.Module):
    """The common part: a communicator, the choice of the algorithm, and initial weights that are equal for any group
    size."""

    float8: Float8State | None

    def __init__(self, comm: TorchComm | DeviceMesh, *, sequence_parallel: bool, algorithm: str, require_fused: bool,
                 init: Init | None, fp8: Float8Recipe | None, gradient_accumulation_fusion: bool) -> None:  # fmt: skip
        super().__init__()
        name = self._get_name()
        self.comm, self.mesh = ranks_of(name, comm)
        if fp8 is not None and not isinstance(fp8, Float8Recipe):
            raise TypeError(f"{name}: expected fp8 as a Float8Recipe, got {fp8!r} ({type(fp8).__name__}); write "
                            'Float8Recipe("delayed"), for example')  # fmt: skip
        _algorithm_checks.expect_algorithm(name, algorithm, ("auto", *_C._algorithms()) if fp8 is None else ALGORITHMS)
        self.sequence_parallel = sequence_parallel
        self.algorithm, self.require_fused = algorithm, require_fused
        self.init, self.fp8 = init, fp8
        self.gradient_accumulation_fusion = gradient_accumulation_fusion

    def _get_name(self) -> str:
        return type(self).__name__

    def _with_main_grads(
        self, x: Tensor, names: Sequence[str], weights: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the weights, whose gradients go to main_grad if that was asked for, and the operator's buffers."""
        if not self.gradient_accumulation_fusion or not torch.is_grad_enabled():
            return weights, []
        parameters = [getattr(self, name) for name in names]
        if not any(parameter.requires_grad for parameter in parameters):
            return weights, []
        name = self._get_name()
        buffers = [main_grad_of(name, parameter) if parameter.requires_grad else None for parameter in parameters]
        wrapped = [weight if buffer is None else with_main_grad(parameter, weight, buffer)
                   for parameter, weight, buffer in zip(parameters, weights, buffers, strict=True)]  # fmt: skip
        if any(buffer is None for buffer in buffers) or self.float8 is not None or not self.sequence_parallel:
            return wrapped, []
        return wrapped, fusible(x, [buffer for buffer in buffers if buffer is not None])

    def _make_float8(self, weights: Sequence[Tensor]) -> None:
        """Makes the state of `fp8` for the weights [out, in] of this rank."""
        self.float8 = None if self.fp8 is None else Float8State(self.fp8, self.comm, weights[0].device)
        if self.fp8 is None:
            return
        for out_features, in_features in (w.shape for w in weights):
            for what, value in (("in_features", in_features), ("out_features", out_features)):
                if value % self.fp8.alignment != 0:
                    raise ValueError(f"{self._get_name()}: expected {what} of a rank divisible by "
                                     f"{self.fp8.alignment} with {self.fp8.scaling if self.fp8.block else 'fp8'}, got "
                                     f"{value}; pad it, or use fp8=None")  # fmt: skip

    def _expect_no_tangent(self, x: Tensor) -> None:
        """Raises UnsupportedError under forward-mode differentiation, before torch names our functions instead."""
        if not torch.compiler.is_compiling() and forward_ad.unpack_dual(x).tangent is not None:
            raise UnsupportedError(f"{self._get_name()}: expected x without a tangent of forward-mode differentiation, "
                                   "got one. Use torch.autograd.functional.jvp.")  # fmt: skip

    def _expect_features(self, x: Tensor, weights: Sequence[Tensor]) -> None:
        """Raises ValueError, naming the layer, if x has no rows or a weight is not [out, in] with its features."""
        name = self._get_name()
        if x.dim() < 2:
            raise ValueError(f"{name}: expected x of two or more dimensions, got shape {list(x.shape)}. "
                             "Use x.unsqueeze(0).")  # fmt: skip
        for i, weight in enumerate(weights):
            if weight.dim() != 2 or weight.size(1) != x.size(-1):
                which = "weight" if len(weights) == 1 else f"weights[{i}]"
                raise ValueError(f"{name}: expected x [..., in_features] and {which} [out_features, in_features] of "
                                 f"this rank, got shapes {list(x.shape)} and {list(weight.shape)}. Check the layer "
                                 "before, or pass weight.t() if it is [in_features, out_features].")  # fmt: skip

    def _reset_float8(self) -> None:
        if self.float8 is not None:
            self.float8.reset()

    def _require_fused(self, op: str, x: Tensor, features: int) -> None:
        if self.require_fused:
            _algorithm_checks.require_fused(self._get_name(), op, x, features, self.comm, self.algorithm)

    def _require_fused_float8(self, op: str, x: Tensor, features: int) -> None:
        self._require_fused(op if self.sequence_parallel else "scaled_matmul_all_reduce", x, features)

    def _describe(self, **values: object) -> str:
        common = {"ranks": self.comm.get_size(), "sequence_parallel": self.sequence_parallel,
                  "algorithm": self.algorithm}  # fmt: skip
        return ", ".join(f"{name}={value}" for name, value in {**values, **common}.items())


def part_of(full: Tensor, dim: int | None, comm: TorchComm) -> nn.Parameter:
    """Returns this rank's part of a full parameter along `dim`, or a copy of it for None."""
    part = full.detach()
    if dim is not None:
        part = part.chunk(comm.get_size(), dim)[comm.get_rank()]
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=full.requires_grad)
