"""Compares the losses of two training runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    good: bool
    text: str


def compare(losses: list[float], expected: list[float], tolerance: float) -> Verdict:
    """Checks step by step that each loss is within `tolerance` of the expected one. NaN never is."""
    differences = [abs(got - want) for got, want in zip(losses, expected, strict=True)]
    for step, difference in enumerate(differences):
        if not difference <= tolerance:
            wanted = f"expected loss {expected[step]:.6f} within {tolerance:g} at step {step}, got {losses[step]:.6f}"
            return Verdict(False, f"{wanted}; --overlap none and --no-graph narrow down what differs")
    worst = max(differences, default=0.0)
    return Verdict(True, f"{len(differences)} steps equal within {worst:.1e} (allowed: {tolerance:g})")
