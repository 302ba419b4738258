"""Compares the losses of two training runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import torch_overlap as to

if TYPE_CHECKING:
    from gpt.training import Trainer


@dataclass(frozen=True)
class Verdict:
    good: bool
    text: str


ADVICE = "--overlap none and --no-graph narrow down what differs"


def compare(losses: list[float], expected: list[float], tolerance: float, advice: str = ADVICE) -> Verdict:
    """Checks step by step that each loss is within `tolerance` of the expected one. NaN never is."""
    differences = [abs(got - want) for got, want in zip(losses, expected, strict=True)]
    for step, difference in enumerate(differences):
        if not difference <= tolerance:
            wanted = f"expected loss {expected[step]:.6f} within {tolerance:g} at step {step}, got {losses[step]:.6f}"
            return Verdict(False, f"{wanted}; {advice}")
    worst = max(differences, default=0.0)
    return Verdict(True, f"{len(differences)} steps equal within {worst:.1e} (allowed: {tolerance:g})")


def check_on_one_rank(comm: to.TorchComm, make: Callable[[to.TorchComm], Trainer], losses: list[float],
                      tolerance: float, what: str, advice: str = ADVICE) -> bool:  # fmt: skip
    """Trains the steps of `losses` again on rank 0 only, and prints the verdict. Collective; every rank gets it.

    Args:
        make: makes the trainer over a communicator.
        what: the dtype, for the text.
        advice: options that narrow down a difference.
    """
    alone = comm.split([0] if comm.get_rank() == 0 else [], name="alone")
    good = torch.zeros(1, device=comm.get_device())
    if alone is not None:
        reference = make(alone)
        for step in range(len(losses)):
            reference.train_step(step)
        verdict = compare(losses, reference.losses[: len(losses)].tolist(), tolerance, advice)
        good.fill_(verdict.good)
        stream = sys.stdout if verdict.good else sys.stderr
        print(f"check against one rank, {what}: {verdict.text}", file=stream, flush=True)
        del reference  # its graph keeps the communicator alive
        alone.finalize()
    comm.broadcast(good, 0, async_op=False)
    return bool(good.item())
