"""Operators rewritten with operators that have rules, as torch code that is captured instead of the operator.

A function takes the arguments of the ATen operator. NotImplemented leaves the operator unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_overlap.mesh.expand_losses import LOSSES
from torch_overlap.mesh.expand_sharded import as_type, norm_of, power_of, settled, variance_of, widened

__all__ = ["EXPANSIONS"]


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim %= tensors[0].dim() + 1
    return torch.cat([t.unsqueeze(dim) for t in tensors], dim)


def _select(x: Tensor, dim: int, index: int) -> Tensor:
    index %= x.shape[dim]
    return x.narrow(dim, index, 1).squeeze(dim)


def _unbind(x: Tensor, dim: int = 0) -> Any:
    if x.shape[dim] == 0:
        return NotImplemented
    return tuple(part.squeeze(dim) for part in x.split(1, dim))


def _addmm(bias: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return _scaled_sum(bias, a @ b, beta, alpha)


def _scaled_sum(bias: Tensor, product: Tensor, beta: Any, alpha: Any) -> Tensor:
    if not (product.is_floating_point() or product.is_complex()):
        beta, alpha = int(beta), int(alpha)  # as torch does for integers
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        bias = bias.nan_to_num()  # torch ignores its values; its gradient is zeros
    return product + (bias if beta == 1 else bias * beta)


def _addbmm(bias: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return _addmm(bias, a.transpose(0, 1).flatten(1), b.flatten(0, 1), beta, alpha)


def _addr(bias: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    product = a.unsqueeze(1) * b.unsqueeze(0)  # which bools have, too
    return as_type(_scaled_sum(bias, product, beta, alpha), torch.promote_types(bias.dtype, product.dtype))


def _pad(x: Tensor, pads: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    if mode != "constant":
        return NotImplemented
    for i in range(len(pads) // 2):
        dim = x.dim() - 1 - i
        before, after = int(pads[2 * i]), int(pads[2 * i + 1])
        cut_before, cut_after = max(-before, 0), max(-after, 0)
        if cut_before or cut_after:
            x = x.narrow(dim, cut_before, x.shape[dim] - cut_before - cut_after)
        shape = list(x.shape)
        parts = [x]
        for size, at in ((before, 0), (after, len(parts))):
            if size > 0:
                shape[dim] = size
                fill = torch.full(shape, value or 0, dtype=x.dtype, device=x.device)
                parts.insert(at if at == 0 else len(parts), fill)
        if len(parts) > 1:
            x = torch.cat(parts, dim)
    return x


def _constant_pad(x: Tensor, pads: Sequence[int], value: float = 0) -> Any:
    return _pad(x, pads, "constant", value)


def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    x = x.reshape((1,) * (len(repeats) - x.dim()) + tuple(x.shape))
    between = [size for n in x.shape for size in (1, n)]
    wide = [size for r, n in zip(repeats, x.shape, strict=True) for size in (r, n)]
    return x.reshape(between).expand(wide).reshape([r * n for r, n in zip(repeats, x.shape, strict=True)])


def _repeat_interleave(x: Tensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> Any:
    if not isinstance(repeats, int):
        return NotImplemented
    if dim is None:
        x, dim = x.reshape(-1), 0
    dim %= x.dim()
    wide = list(x.shape)
    wide.insert(dim + 1, repeats)
    out = list(x.shape)
    out[dim] *= repeats
    return x.unsqueeze(dim + 1).expand(wide).reshape(out)


def _one_hot(x: Tensor, num_classes: int = -1) -> Any:
    if num_classes <= 0 or x.dtype != torch.int64:
        return NotImplemented
    classes = torch.arange(num_classes, device=x.device)
    x = x.unsqueeze(-1)
    known = classes.expand(*x.shape[:-1], num_classes).gather(-1, x)  # equals x; gather raises for an invalid class
    return (known == classes).to(torch.int64)


def _norm(x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Computes a norm over all dimensions by sums, so that no part is moved. Norms along some dimensions have a
    rule."""
    if not _is_everything(x, dim):
        return NotImplemented
    return norm_of(x, float(ord), range(x.dim()), keepdim, dtype or x.dtype)


def _is_everything(x: Tensor, dim: Any) -> bool:
    every = dim is None or (isinstance(dim, list | tuple) and len(dim) in (0, x.dim()))
    return every and x.dim() > 0 and x.numel() > 0 and not x.is_complex()


def _var(x: Tensor, dim: Any = None, unbiased: Any = True, keepdim: bool = False, *, correction: Any = None) -> Any:
    """Computes a variance over all dimensions by two sums. Variances along some dimensions have a rule."""
    if isinstance(dim, bool):  # var(x, unbiased)
        dim, unbiased = None, dim
    if not _is_everything(x, dim):
        return NotImplemented
    lost = correction if correction is not None else 1 if unbiased is None or unbiased else 0
    return variance_of(x, range(x.dim()), keepdim, lost)


def _std(*args: Any, **kwargs: Any) -> Any:
    out = _var(*args, **kwargs)
    return out if out is NotImplemented else power_of(settled(out), 0.5)


def _any(x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    return _truth(x, dim, keepdim, torch.amax)


def _all(x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    return _truth(x, dim, keepdim, torch.amin)


def _truth(x: Tensor, dim: Any, keepdim: bool, reduce: Callable[..., Tensor]) -> Any:
    if x.dim() == 0 or x.numel() == 0:
        return NotImplemented
    dims = list(range(x.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    dtype = torch.uint8 if x.dtype == torch.uint8 else torch.bool
    if not dims:  # all elements for maxima, none for these
        return (x != 0).to(dtype)
    return reduce((x != 0).to(torch.int32), dims, keepdim).to(dtype)


def _full(size: Any, value: Any, x: Tensor, dtype: Any) -> Tensor:
    return torch.full(size, value, dtype=dtype or x.dtype, device=x.device)


def _copy(x: Tensor, source: Tensor, _: bool = False) -> Tensor:
    """Returns `source` as a value for x. The operator has no gradient in torch, which has one for copy_ alone."""
    return as_type(source, x.dtype).expand(x.shape).clone()


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


def _dist(x: Tensor, y: Tensor, p: float = 2) -> Any:
    return torch.linalg.vector_norm(x - y, p)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    _: bool = False,
) -> Any:
    """Normalizes with the statistics of the whole batch, from sums."""
    if not training or x.dim() < 2:
        return NotImplemented
    dims = [d for d in range(x.dim()) if d != 1]
    shape = [-1 if d == 1 else 1 for d in range(x.dim())]
    wide = widened(x)
    mean = settled(wide.mean(dims, True))
    far = wide - mean
    variance = settled((far * far).mean(dims, True))
    count = x.numel() // x.shape[1]
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(mean.detach().reshape(-1) * momentum)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_(variance.detach().reshape(-1) * (momentum * count / max(count - 1, 1)))
    out = far * (variance + eps).rsqrt()
    out = out if weight is None else out * weight.reshape(shape)
    return as_type(out if bias is None else out + bias.reshape(shape), x.dtype)


EXPANSIONS: dict[str, Callable[..., Any]] = {
    "stack": _stack,
    "select": _select,
    "unbind": _unbind,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "addmv": _addmm,
    "addbmm": _addbmm,
    "addr": _addr,
    "pad": _pad,
    "constant_pad_nd": _constant_pad,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "one_hot": _one_hot,
    "linalg_vector_norm": _norm,
    "var": _var,
    "std": _std,
    "any": _any,
    "all": _all,
    "copy": _copy,
    "glu": _glu,
    "dist": _dist,
    "batch_norm": _batch_norm,
    "new_zeros": lambda x, size, dtype=None, **_: _full(size, 0, x, dtype),
    "new_ones": lambda x, size, dtype=None, **_: _full(size, 1, x, dtype),
    "new_full": lambda x, size, value, dtype=None, **_: _full(size, value, x, dtype),
    "new_empty": lambda x, size, dtype=None, **_: _full(size, 0, x, dtype),
    **LOSSES,
}
