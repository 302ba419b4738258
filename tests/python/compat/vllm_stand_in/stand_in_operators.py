"""The operators of the stand-in. They are registered once in a process, also if the stand-in is loaded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# group name -> the all_reduce of its communicator
ALL_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {}


def _all_reduce(tensor: Tensor, group_name: str) -> Tensor:
    return ALL_REDUCE[group_name](tensor)


def _norm(rows: Tensor, weight: Tensor | None, epsilon: float, dtype: torch.dtype) -> Tensor:
    rows = rows.double()
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)
    return (rows if weight is None else rows * weight.double()).to(dtype)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    return _norm(x, weight, epsilon, x.dtype)


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    rows = x.double() + x_residual.double()
    return _norm(rows, weight, epsilon, x.dtype), rows.to(x.dtype)


def quantized(input: Tensor, scale: Tensor) -> Tensor:
    scaled = input.to(torch.float32) * scale.reciprocal()
    return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _static_scaled_fp8_quant(result: Tensor, input: Tensor, scale: Tensor) -> None:
    result.copy_(quantized(input, scale))


def _register(namespace: str, schema: str, on_cpu: Callable[..., Any], on_meta: Callable[..., Any]) -> None:
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(schema)
    name = schema.partition("(")[0]
    library.impl(name, on_cpu, "CPU")
    library.impl(name, on_meta, "Meta")
    _libraries.append(library)


_libraries: list[torch.library.Library] = []
_register(
    "vllm",
    "all_reduce(Tensor tensor, str group_name) -> Tensor",
    _all_reduce,
    lambda tensor, group_name: torch.empty_like(tensor),
)
_register(
    "vllm_ir",
    "rms_norm(Tensor x, Tensor? weight, float epsilon, int? variance_size=None) -> Tensor",
    _rms_norm,
    lambda x, *args: torch.empty_like(x),
)
_register(
    "vllm_ir",
    "fused_add_rms_norm(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, int? variance_size=None)"
    " -> (Tensor, Tensor)",
    _fused_add_rms_norm,
    lambda x, *args: (torch.empty_like(x), torch.empty_like(x)),
)
_register(
    "_C",
    "static_scaled_fp8_quant(Tensor(a!) result, Tensor input, Tensor scale) -> ()",
    _static_scaled_fp8_quant,
    lambda result, input, scale: None,
)
