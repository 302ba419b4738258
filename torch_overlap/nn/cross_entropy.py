"""Cross entropy of logits that are split over the ranks by vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_overlap._C import TorchComm
from torch_overlap.ops._arguments import group

__all__ = ["vocabulary_parallel_cross_entropy"]

_ops = torch.ops.torch_overlap
REDUCTIONS = ("mean", "sum", "none")


def vocabulary_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    comm: TorchComm,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Computes torch.nn.functional.cross_entropy without gathering the logits.

    Sends three numbers per row, and one more with label smoothing: the maxima, then the sums. On GPUs a kernel reads
    the logits once for these, and another reads them once for their gradient: no other tensor of their size is made
    (float64: by torch's operators). The gradient of the loss must be the same on every rank, as when all ranks
    backpropagate from it. The algorithm is that of Shoeybi et al., "Megatron-LM", 2019, section 3.

        head = to.nn.ColumnParallelLinear(4096, 128256, comm, bias=False)
        loss = to.nn.vocabulary_parallel_cross_entropy(head(x), targets, comm)

    Args:
        logits: this rank's part of the vocabulary [..., V/n], in rank order; floating point. 16-bit logits are computed
            in float32.
        targets: the token of each row [...], int64, the same on all ranks.
        comm: the communicator whose ranks share the vocabulary.
        ignore_index: rows with this target have no loss.
        reduction: "mean" over the rows that are not ignored, "sum", or "none".
        label_smoothing: as for torch.nn.functional.cross_entropy.

    Returns: the loss, the same on every rank, float32 for 16-bit logits; valid on the current stream.

    Raises:
        ValueError: shapes or options that do not match.
        IndexError: a target outside of the vocabulary, on the CPU. On GPUs and under torch.compile its loss is NaN.
    """
    who = "vocabulary_parallel_cross_entropy"
    if logits.dim() < 1 or logits.shape[:-1] != targets.shape:
        raise ValueError(f"{who}: expected logits [..., V/n] and targets [...], got shapes {list(logits.shape)} and "
                         f"{list(targets.shape)}. Pass targets without a dimension of the vocabulary.")  # fmt: skip
    if not logits.is_floating_point() or targets.dtype != torch.int64:
        raise ValueError(f"{who}: expected floating-point logits and int64 targets, got {logits.dtype} and "
                         f"{targets.dtype}. Convert them.")  # fmt: skip
    if reduction not in REDUCTIONS:
        raise ValueError(f"{who}: expected reduction of {', '.join(REDUCTIONS)}, got '{reduction}'. Use one of them.")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{who}: expected label_smoothing from 0 to 1, got {label_smoothing}. Use a number between.")
    name, size = group(comm)
    counted = targets != ignore_index
    vocabulary = logits.size(-1) * size
    outside = counted & ((targets < 0) | (targets >= vocabulary))
    if targets.device.type == "cpu" and not torch.compiler.is_compiling() and bool(outside.any()):
        raise IndexError(f"{who}: expected targets from 0 to {vocabulary - 1} or {ignore_index}, got "
                         f"{targets.min().item()} to {targets.max().item()}. Check the tokens.")  # fmt: skip
    own = targets - _rank(comm) * logits.size(-1)
    losses: Tensor = _CrossEntropy.apply(logits, own, counted, name, size, label_smoothing)  # type: ignore[no-untyped-call]
    losses = losses.masked_fill(outside, torch.nan)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / counted.sum() if reduction == "mean" else total


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _rank(comm: TorchComm) -> int:
    return comm.get_rank()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, own: Tensor, counted: Tensor, comm: str, size: int,
                smoothing: float) -> Tensor:  # fmt: skip
        # An exported program has these operators, and their gradients in place of backward.
        terms = _ops._cross_entropy_terms(logits, own, bool(smoothing))
        largest = _ops.all_reduce(terms[0].detach(), "max", comm, size)
        below = terms[0] - largest
        is_own = (own >= 0) & (own < logits.size(-1))
        parts = [terms[1] * below.exp(), (terms[2] - largest).where(is_own, 0)]
        parts += [terms[3] + logits.size(-1) * below] if smoothing else []
        sums = _ops.all_reduce(torch.stack(parts), "sum", comm, size, "I")
        log_sum = sums[0].log()
        loss = log_sum - sums[1]
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (log_sum - sums[2] / (logits.size(-1) * size))
        ctx.save_for_backward(logits, own, counted, largest, log_sum)
        ctx.comm, ctx.size, ctx.smoothing = comm, size, smoothing
        result: Tensor = loss.where(counted, 0)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        logits, own, counted, largest, log_sum = ctx.saved_tensors
        shift = ctx.smoothing / (logits.size(-1) * ctx.size)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            # Each rank's logits change the sum, and use its gradient and the loss's.
            grad = _ops._invariant_to_replicated(grad, ctx.comm, ctx.size)
            x = logits.to(log_sum.dtype) - largest.unsqueeze(-1)
            log_sum = _ops.all_reduce(x.exp().sum(-1), "sum", ctx.comm, ctx.size).log()
        out = _ops._cross_entropy_gradient(
            logits, own, largest, log_sum, grad.where(counted, 0), ctx.smoothing - 1, shift
        )
        return out, None, None, None, None, None
