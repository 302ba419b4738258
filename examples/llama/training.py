"""The step of train_llama.py: micro-batches, gradients in float32 buffers, clipping, AdamW on float32 weights."""

from __future__ import annotations

import torch
from gpt.text import Text
from gpt.training import Trainer
from torch import Tensor, nn

import torch_overlap as to
from llama.model import Llama
from torch_overlap.mesh.models import Transformer


class MainGradients:
    """Gradients of a step, in one flat float32 tensor, to which micro-batches add.

        | replicated parameters | split parameters |

    The products of the backward pass add those of matrices (main_grad); those of norms and of the embedding come
    through .grad after each micro-batch. A replicated parameter has the sum over this rank's rows, until
    reduce_and_clip() sums it over the ranks.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        split = to.nn.split_parameters(model)
        groups = [[p for name, p in model.named_parameters() if (name in split) == kind] for kind in (False, True)]
        sizes = [sum(p.numel() for p in group) for group in groups]
        self.flat = torch.zeros(sum(sizes), device=device)
        self.replicated, self.split = self.flat.split(sizes)
        self.parameters = [p for group in groups for p in group]
        parts = self.flat.split([p.numel() for p in self.parameters])
        self.buffers = [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]
        for parameter, buffer in zip(self.parameters, self.buffers, strict=True):
            parameter.main_grad = buffer

    def add_grads(self) -> None:
        for parameter, buffer in zip(self.parameters, self.buffers, strict=True):
            if parameter.grad is not None:
                buffer.add_(parameter.grad)
                parameter.grad = None

    def reduce_and_clip(self, comm: to.TorchComm, max_norm: float) -> None:
        """Scales the gradients so that their norm over all ranks is at most `max_norm`. Only tensor operations."""
        to.ops.all_reduce_(self.replicated, comm)
        squares = [torch.linalg.vector_norm(part).square() for part in (self.split, self.replicated)]
        norm2 = to.ops.all_reduce(squares[0], comm) + squares[1]
        self.flat.mul_((max_norm / (norm2.sqrt() + 1e-6)).clamp(max=1.0))


class LlamaTrainer(Trainer):
    """A Trainer whose step processes its `batch_size` sequences in `accumulate` micro-batches."""

    def __init__(self, shape: Transformer, comm: to.TorchComm, text: Text, *, accumulate: int, recompute: bool,
                 **options: object) -> None:  # fmt: skip
        self.accumulate, self.recompute = accumulate, recompute
        super().__init__(shape, comm, text, **options)  # type: ignore[arg-type]

    def make(self, dtype: torch.dtype, algorithm: str, fp8: to.nn.Float8Recipe | None, keep_gathered: bool) -> None:
        self.model = Llama(self.config, self.comm, seed=self.seed, device=self.device, dtype=dtype,
                           algorithm=algorithm, fp8=fp8, recompute=self.recompute)  # fmt: skip
        self.gradients = MainGradients(self.model, self.device)
        self.loss = torch.zeros((), device=self.device)
        self.weights = [nn.Parameter(p.detach().float().clone()) for p in self.gradients.parameters]
        for weight, buffer in zip(self.weights, self.gradients.buffers, strict=True):
            weight.grad = buffer

    def trained(self) -> list[Tensor]:
        return list(self.weights)

    def place(self) -> tuple[slice, slice]:
        """All tokens: each rank looks up those of its part of the vocabulary."""
        return slice(0, self.config.sequence), slice(0, self.batch_size)

    def compute(self) -> None:
        self.gradients.flat.zero_()
        self.loss.zero_()
        for tokens, targets in zip(*(t.chunk(self.accumulate, 1) for t in (self.inputs, self.targets)), strict=True):
            loss = self.model.loss(tokens.contiguous(), targets.contiguous()) / self.accumulate
            loss.backward()
            self.gradients.add_grads()
            self.loss.add_(loss.detach())
        to.nn.update_float8_scales(self.model)
        self.gradients.reduce_and_clip(self.comm, max_norm=1.0)
        self.optimizer.step()
        with torch.no_grad():
            for parameter, weight in zip(self.gradients.parameters, self.weights, strict=True):
                parameter.copy_(weight)

    def step_flops(self) -> float:
        """Floating-point operations of the products and the causal attention of a step, on all ranks."""
        shape = self.config
        products = shape.layers * shape.layer_parameters + shape.vocabulary * shape.hidden
        attention = shape.layers * shape.hidden * shape.sequence  # half of all pairs, two products
        return 6.0 * (products + attention) * shape.sequence * self.batch_size
