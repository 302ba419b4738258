"""Operators along a sharded dimension, rewritten with reductions: no part is moved, only maxima and sums are.

If the dimension is whole the operator itself is faster, so these are only for operands whose layout is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["SHARDED", "Sharded", "as_type", "norm_of", "power_of", "settled", "variance_of", "widened"]

_HALVES = (torch.float16, torch.bfloat16)


def as_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def widened(x: Tensor) -> Tensor:
    return as_type(x, torch.float32 if x.dtype in _HALVES else x.dtype)


def settled(x: Tensor) -> Tensor:
    """Returns x, reduced here if it is partial, once for all its uses. (A clamp would drop the gradient of a NaN.)"""
    return x.pow(1)


def norm_of(x: Tensor, ord: float, dims: Sequence[int], keepdim: bool, dtype: torch.dtype) -> Any:
    """Computes vector_norm by sums, with a zero gradient where the norm is zero. Not for negative powers."""
    if -math.inf < ord < 0:
        return NotImplemented
    x = as_type(x, torch.float32 if dtype in _HALVES else dtype)
    dims = list(dims)
    if math.isinf(ord):
        out = x.abs().amax(dims, keepdim) if ord > 0 else x.abs().amin(dims, keepdim)
    elif ord == 0:
        out = x.sign().masked_fill(x != 0, 1).sum(dims, keepdim)  # sign, because its gradient is zero
    elif ord == 1:
        out = x.abs().sum(dims, keepdim)
    else:
        powers = x * x if ord == 2 else power_of(x.abs(), ord)
        out = power_of(settled(powers.sum(dims, keepdim)), 1 / ord)
    return as_type(out, dtype)


def power_of(x: Tensor, exponent: float) -> Tensor:
    """Returns x to a positive power, with a zero gradient where x is zero."""
    if exponent >= 1:
        return x.pow(exponent)
    is_zero = x == 0
    x = x.masked_fill(is_zero, 1)
    return (x.sqrt() if exponent == 0.5 else x.pow(exponent)).masked_fill(is_zero, 0)


def variance_of(x: Tensor, dims: Sequence[int], keepdim: bool, lost: float) -> Tensor:
    """Computes var by two sums. `lost` is the correction."""
    dtype, dims = x.dtype, list(dims)
    x = widened(x)
    far = x - x.mean(dims, True)
    count = math.prod(x.shape[d] for d in dims) - lost
    return as_type((far * far).sum(dims, keepdim) / max(count, 0), dtype)


def _highest(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Returns the maximum, without a gradient. A partial x is reduced here, for later uses too."""
    return settled(x.amax(list(dims), True).detach())


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    result = dtype or x.dtype
    x = widened(as_type(x, result))
    powers = (x - _highest(x, [dim])).exp()
    return as_type(powers / powers.sum(dim, True), result)


def _log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    result = dtype or x.dtype
    x = widened(as_type(x, result))
    x = x - _highest(x, [dim])
    return as_type(x - x.exp().sum(dim, True).log(), result)


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = [dim] if isinstance(dim, int) else list(dim)
    result, x = x.dtype, widened(x)
    top = _highest(x, dims)
    top = top.masked_fill(top.isinf(), 0)  # infinity stays in the sum
    out = (x - top).exp().sum(dims, True).log() + top
    if not keepdim:
        gone = {d % x.dim() for d in dims}
        out = out.reshape([n for d, n in enumerate(x.shape) if d not in gone])
    return as_type(out, result)


def _var(x: Tensor, dim: Any, unbiased: Any = True, keepdim: bool = False, *, correction: Any = None) -> Tensor:
    lost = correction if correction is not None else 1 if unbiased is None or unbiased else 0
    return variance_of(x, [dim] if isinstance(dim, int) else dim, keepdim, lost)


def _std(*args: Any, **kwargs: Any) -> Tensor:
    return power_of(settled(_var(*args, **kwargs)), 0.5)


def _norm(x: Tensor, ord: Any, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return norm_of(x, float(ord), [dim] if isinstance(dim, int) else dim, keepdim, dtype or x.dtype)


def _layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    _: Any = 0,
) -> Tensor:
    dims = list(range(-len(shape), 0))
    result, x = x.dtype, widened(x)
    x = x - x.mean(dims, True)
    return _scaled(x * ((x * x).mean(dims, True) + eps).rsqrt(), weight, bias, result)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
    if eps is None and x.dtype in _HALVES:
        return NotImplemented
    dims = list(range(-len(shape), 0))
    result, x = x.dtype, widened(x)
    least = torch.finfo(x.dtype).eps if eps is None else eps
    return _scaled(x * ((x * x).mean(dims, True) + least).rsqrt(), weight, None, result)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = x if weight is None else x * weight
    return as_type(x if bias is None else x + bias, dtype)


class Sharded(NamedTuple):
    """The replacement of an operator, and the dimensions that it runs along (None: all, which other rewrites
    handle)."""

    dims: Callable[..., Sequence[int] | None]
    function: Callable[..., Any]


def _argument(index: int) -> Callable[..., Sequence[int] | None]:
    def dims(*args: Any) -> Sequence[int] | None:
        value = args[index] if len(args) > index else None
        if isinstance(value, bool) or value is None:
            return None
        return [value] if isinstance(value, int) else list(value)

    return dims


def _last(*args: Any) -> Sequence[int]:
    return list(range(-len(args[1]), 0))


SHARDED: dict[str, Sharded] = {
    "softmax": Sharded(_argument(1), _softmax),
    "log_softmax": Sharded(_argument(1), _log_softmax),
    "logsumexp": Sharded(_argument(1), _logsumexp),
    "var": Sharded(_argument(1), _var),
    "std": Sharded(_argument(1), _std),
    "linalg_vector_norm": Sharded(_argument(2), _norm),
    "layer_norm": Sharded(_last, _layer_norm),
    "rms_norm": Sharded(_last, _rms_norm),
}
