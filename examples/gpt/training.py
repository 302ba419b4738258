"""One training step: forward, backward, gradients summed over the ranks, clipping, AdamW. On CUDA, one graph."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_overlap as to
from gpt.model import GPT, Config
from gpt.text import Text, batch

EAGER_STEPS = 3  # before the capture: libraries select their algorithms and allocate their workspaces


class Gradients:
    """All gradients in one flat tensor; every parameter's .grad is a view into it.

        | loss | norm^2 of split | replicated parameters | split parameters |
        '------------- one all_reduce: the bucket -------'

    Before the all_reduce a replicated parameter's gradient is the sum over this rank's rows; a split one's is complete.
    The bucket also contains this rank's share of the loss and of the squared norm. It thus replaces
    to.nn.sync_replicated_grads, with one transfer for everything.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        split = to.nn.split_parameters(model)
        groups = [[p for name, p in model.named_parameters() if (name in split) == kind] for kind in (False, True)]
        sizes = [sum(p.numel() for p in group) for group in groups]
        self.flat = torch.zeros(2 + sum(sizes), device=device)
        self.loss, self.split_norm2 = self.flat[0], self.flat[1]
        self.bucket = self.flat[: 2 + sizes[0]]
        self.replicated, self.split = self.flat[2:].split(sizes)
        for flat, group in zip((self.replicated, self.split), groups, strict=True):
            for p, grad in zip(group, flat.split([p.numel() for p in group]), strict=True):
                p.grad = grad.view_as(p)

    def reduce_and_clip(self, comm: to.TorchComm, loss: Tensor, max_norm: float) -> None:
        """Scales the gradients so that their norm over all ranks is at most `max_norm`. Only tensor operations."""
        self.loss.copy_(loss.detach())
        self.split_norm2.copy_(self.split.square().sum())
        to.ops.all_reduce_(self.bucket, comm)
        norm = (self.replicated.square().sum() + self.split_norm2).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        self.replicated.mul_(scale)
        self.split.mul_(scale)


class Trainer:
    """A model, its optimizer and the text, stepped together by all ranks of a communicator.

    Everything that a step reads or writes is in tensors whose addresses never change, so that a CUDA graph of the
    step can be replayed: inputs, targets and the learning rate are copied in, the loss is copied out.
    """

    def __init__(self, config: Config, comm: to.TorchComm, text: Text, *, batch_size: int, steps: int, rate: float,
                 seed: int, dtype: torch.dtype, algorithm: str, graph: bool,
                 fp8: to.nn.Float8Recipe | None = None, keep_gathered: bool = False,
                 mesh: Mapping[str, int] | None = None) -> None:  # fmt: skip
        self.config, self.comm, self.text = config, comm, text
        self.batch_size, self.steps, self.rate, self.seed = batch_size, steps, rate, seed
        self.device, self.mesh_axes = comm.get_device(), dict(mesh or {})
        cuda = self.device.type == "cuda"
        self.make(dtype, algorithm, fp8, keep_gathered)
        trained = self.trained()
        self.learning_rate = torch.zeros((), device=self.device)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=self.learning_rate, betas=(0.9, 0.95), fused=True, capturable=cuda,
        )  # fmt: skip
        self.rows, self.columns = self.place()
        shape = (self.rows.stop - self.rows.start, self.columns.stop - self.columns.start)
        self.inputs, self.targets = torch.zeros(2, *shape, dtype=torch.int64, device=self.device)
        self.losses = torch.full((steps,), math.nan, device=self.device)
        self.graph = torch.cuda.CUDAGraph() if graph and cuda else None
        self.stream = torch.cuda.Stream() if self.graph is not None else None
        self.captured = False

    def make(self, dtype: torch.dtype, algorithm: str, fp8: to.nn.Float8Recipe | None, keep_gathered: bool) -> None:
        """Makes the model, and sets the tensor that holds its loss after a step."""
        self.model = GPT(self.config, self.comm, seed=self.seed, device=self.device, dtype=dtype, algorithm=algorithm,
                         fp8=fp8, keep_gathered=keep_gathered)  # fmt: skip
        self.gradients = Gradients(self.model, self.device)
        self.loss = self.gradients.loss

    def trained(self) -> list[Tensor]:
        """Returns what the optimizer updates."""
        return list(self.model.parameters())

    def place(self) -> tuple[slice, slice]:
        """Returns the rows and columns [S, B] of this rank's tokens."""
        per_rank = self.config.sequence // self.comm.get_size()
        return slice(self.comm.get_rank() * per_rank, (self.comm.get_rank() + 1) * per_rank), slice(0, self.batch_size)

    def num_parameters(self) -> int:
        """Number of parameters of the whole model."""
        split = to.nn.split_parameters(self.model)
        parameters = self.model.named_parameters()
        return sum(p.numel() * (self.comm.get_size() if name in split else 1) for name, p in parameters)

    def train_step(self, step: int) -> None:
        """Runs one step. Collective. The loss is written to losses[step] when the device finishes; the host does not
        wait for it."""
        self._load(self.text.train, self.seed, step)
        self.learning_rate.fill_(self._rate_at(step))
        self.run_step(step)
        self.losses[step].copy_(self.loss)

    def run_step(self, step: int) -> None:
        """Runs the step on the current inputs. On CUDA: a few eager ones, then a replay of the captured one."""
        if self.graph is None:
            self.compute()
            return
        assert self.stream is not None
        if step >= EAGER_STEPS and not self.captured:
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.compute()
            self.captured = True
        if self.captured:
            self.graph.replay()
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.compute()
        torch.cuda.current_stream().wait_stream(self.stream)

    def compute(self) -> None:
        """Runs one step on the current inputs; self.loss becomes the mean loss of all ranks."""
        self.gradients.flat.zero_()
        loss = self.mean_loss()
        loss.backward()
        to.nn.update_float8_scales(self.model)
        self.gradients.reduce_and_clip(self.comm, loss, max_norm=1.0)
        self.optimizer.step()

    def mean_loss(self) -> Tensor:
        """Returns this rank's part of the mean over all tokens: the ranks' parts sum to it, and so do their
        gradients."""
        logits = self.model(self.inputs)
        total = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten(), reduction="sum")
        return total / (self.config.sequence * self.batch_size)

    @torch.no_grad()
    def validation_loss(self, batches: int = 8) -> float:
        """Returns the mean loss over windows of the text that is not trained on. Collective."""
        total = torch.zeros((), device=self.device)
        for step in range(batches):
            self._load(self.text.valid, self.seed + 1, step)
            total += self.mean_loss() / batches
        self.comm.all_reduce(total, to.ReduceOp.SUM, async_op=False)
        return total.item()

    @torch.no_grad()
    def logits_at(self, window: list[int], row: int) -> Tensor:
        """Returns the model's logits for one row of a window of bytes, on every rank. Collective."""
        padded = torch.zeros(self.config.sequence, 1, dtype=torch.int64)
        padded[: len(window), 0] = torch.tensor(window)
        logits = self.model(padded[self.rows].to(self.device))
        found = torch.zeros_like(logits[0, 0])
        if self.rows.start <= row < self.rows.stop:
            found = logits[row - self.rows.start, 0].clone()
        self.comm.all_reduce(found, to.ReduceOp.SUM, async_op=False)
        return found

    def _load(self, data: Tensor, seed: int, step: int) -> None:
        windows = batch(data, seed=seed, step=step, size=self.batch_size, sequence=self.config.sequence, rows=self.rows)
        windows = tuple(w[:, self.columns].contiguous() for w in windows)
        for static, new in zip((self.inputs, self.targets), windows, strict=True):
            static.copy_(new.pin_memory() if self.device.type == "cuda" else new, non_blocking=True)

    def _rate_at(self, step: int) -> float:
        """Returns the learning rate: linear warm-up over the first twentieth, then a cosine down to a tenth."""
        warmup = max(1, self.steps // 20)
        if step < warmup:
            return self.rate * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
