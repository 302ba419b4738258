"""Losses as sums, counts and divisions: exact for any sharding of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_overlap.mesh.expand_sharded import as_type

__all__ = ["LOSSES"]

_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    if reduction == _MEAN:
        return loss.mean()
    return loss.sum() if reduction == _SUM else loss


def _nll(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN, ignore: int = -100) -> Tensor:
    """Computes nll_loss of [classes], [batch, classes] or [batch, classes, ...] log probabilities."""
    return _class_loss(x, target, weight, reduction, ignore, 0.0)


def _class_loss(
    logs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int, smoothing: float
) -> Tensor:
    dim = 0 if logs.dim() == 1 else 1
    is_ignored = target == ignore
    safe = target.masked_fill(is_ignored, 0)
    loss = -logs.gather(dim, safe.unsqueeze(dim)).squeeze(dim)
    own = None if weight is None else weight[safe]
    if own is not None:
        loss = loss * own
    if smoothing > 0:
        classes = logs.shape[dim]
        weighted = logs if weight is None else logs * weight.reshape((-1,) + (1,) * (logs.dim() - 1 - dim))
        loss = loss * (1 - smoothing) - weighted.sum(dim) * (smoothing / classes)
    loss = loss.masked_fill(is_ignored, 0)
    if reduction == _NONE:
        return loss
    if reduction == _SUM:
        return loss.sum()
    wide = torch.float32 if logs.dtype in (torch.float16, torch.bfloat16) else logs.dtype  # counts are exact
    counts = (target != ignore).to(wide)
    total = (counts if own is None else as_type(own, wide).masked_fill(is_ignored, 0)).sum()
    return as_type(as_type(loss, wide).sum() / total, logs.dtype)


def _cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore: int = -100,
    smoothing: float = 0.0,
) -> Tensor:
    dim = 0 if x.dim() == 1 else 1
    logs = torch.log_softmax(x, dim)
    if not target.is_floating_point():
        return _class_loss(logs, target, weight, reduction, ignore, smoothing)
    classes = x.shape[dim]
    if smoothing > 0:
        target = target * (1 - smoothing) + smoothing / classes
    products = logs * target
    if weight is not None:
        products = products * weight.reshape((-1,) + (1,) * (x.dim() - 1 - dim))
    loss = -products.sum(dim)
    if reduction == _NONE:
        return loss
    total = loss.sum()
    return total if reduction == _SUM else total / (x.numel() // classes)


def _mse(x: Tensor, target: Tensor, reduction: int = _MEAN) -> Any:
    dtype = torch.promote_types(x.dtype, target.dtype)
    difference = as_type(x, dtype) - as_type(target, dtype)  # a difference of bools is an error
    return _reduced(difference * difference, reduction)


def _l1(x: Tensor, target: Tensor, reduction: int = _MEAN) -> Any:
    return _reduced((x - target).abs(), reduction)


def _after(name: str, place: int) -> Callable[..., Any]:
    """Returns a loss that is elementwise except for its reduction, which is argument number `place`."""

    def loss(*args: Any) -> Any:
        reduction = args[place] if len(args) > place else _MEAN
        if reduction == _NONE:
            return NotImplemented  # the elementwise loss has a rule
        before = list(args[:place]) + [None] * (place - len(args))
        function = getattr(torch.ops.aten, name)
        return _reduced(function(*before, _NONE, *args[place + 1 :]), reduction)

    return loss


LOSSES: dict[str, Callable[..., Any]] = {
    "nll_loss": _nll,
    "nll_loss_nd": _nll,
    "nll_loss2d": _nll,
    "cross_entropy_loss": _cross_entropy,
    "mse_loss": _mse,
    "l1_loss": _l1,
    "smooth_l1_loss": _after("smooth_l1_loss", 2),
    "huber_loss": _after("huber_loss", 2),
    "binary_cross_entropy": _after("binary_cross_entropy", 3),
    "binary_cross_entropy_with_logits": _after("binary_cross_entropy_with_logits", 4),
    "soft_margin_loss": _after("soft_margin_loss", 2),
}
