"""The loss curve and the timeline as PNG files."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from gpt.timeline import Span, hidden_share

COLORS = {"communication": "#d9822b", "GEMM": "#2b6cb0"}
NO_MATPLOTLIB = "no plots: matplotlib is not installed (pip install matplotlib)"


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw_losses(losses: list[float], validation: float, path: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(losses, color="#2b6cb0", alpha=0.3, linewidth=0.8, label="each step")
    axes.plot(smoothed(losses), color="#2b6cb0", label="training, smoothed")
    axes.axhline(validation, color="#2f855a", linestyle="--", label=f"held-out files: {validation:.3f}")
    axes.axhline(math.log(256), color="gray", linestyle=":", label="guessing: ln 256")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A small GPT on Python's standard library")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_timeline(spans: list[Span], path: Path) -> None:
    plt = pyplot()
    lanes = sorted({s.lane for s in spans}, key=lambda lane: min(s.start for s in spans if s.lane == lane))
    figure, axes = plt.subplots(figsize=(12, 1.5 + 0.6 * len(lanes)), layout="constrained")
    for kind, color in COLORS.items():
        for y, lane in enumerate(lanes):
            bars = [(s.start / 1e3, (s.end - s.start) / 1e3) for s in spans if s.lane == lane and s.kind == kind]
            axes.broken_barh(bars, (y - 0.4, 0.8), facecolors=color, label=kind if y == 0 else None)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    hidden = f"{hidden_share(spans):.0%} of the communication runs under a GEMM"
    axes.set(xlabel="milliseconds", title=f"One training step on rank 0: {hidden}")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def smoothed(values: list[float], keep: float = 0.95) -> list[float]:
    """Returns the exponential moving average, corrected for its start."""
    out, mean = [], 0.0
    for i, value in enumerate(values):
        mean = keep * mean + (1 - keep) * value
        out.append(mean / (1 - keep ** (i + 1)))
    return out


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
