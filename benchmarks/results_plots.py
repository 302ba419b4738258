"""Plots of results: bars against peers, whole layers, lines over sizes, and timelines."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results_tables import TITLES, Group, peers_of

OURS = "#2b6cb0"
PEERS = ("#d9822b", "#a0aec0", "#718096", "#2f855a", "#805ad5", "#b7791f")
LANES = {"product": OURS, "communication": "#d9822b", "other": "#a0aec0"}
DPI = 80


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def figure_of(width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    """Returns a figure and its panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, squeeze=False)[:, 0]


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date and no version: the same numbers give the same file.
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def _draw_bars(plot: Any, labels: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float]],
               floors: Sequence[float | None]) -> None:  # fmt: skip
    """Draws a group of bars for each label, a bar for each name, and the floor as a line across a group."""
    width = 0.8 / len(names)
    for index, (group, floor) in enumerate(zip(values, floors, strict=True)):
        for turn, (value, color) in enumerate(zip(group, (OURS, *PEERS), strict=False)):
            label = names[turn] if index == 0 else None
            plot.bar(index + (turn - (len(names) - 1) / 2) * width, value, width, color=color, label=label)
        if floor is not None:
            plot.plot([index - 0.42, index + 0.42], [floor, floor], color="black", lw=1.5,
                      label="floor" if index == 0 else None)  # fmt: skip
    plot.set_xticks(range(len(labels)), labels)


def bars(groups: Sequence[Group], title: str, path: Path) -> None:
    """Plots the time over that of the product without communication: ours and the peers of each case, the floor as a
    line across its bars."""
    peers = peers_of(groups)
    figure, (plot,) = figure_of(max(7.0, 1.5 * len(groups)), 4)
    rows = [(group.label, row) for group in groups if (row := group.ours(group.mode)) is not None]
    values = [[row["ratio_gemm"], *[row["peers"].get(peer, 0.0) / row["gemm_us"] for peer in peers]] for _, row in rows]
    floors = [row["floor_us"] / row["gemm_us"] if "floor_us" in row else None for _, row in rows]
    _draw_bars(plot, [label for label, _ in rows], ["ours", *peers], values, floors)
    plot.axhline(1.0, color="#cbd5e0", lw=1, zorder=0)
    top = max((value for group in values for value in group), default=0.0)
    plot.set(ylabel="time / product alone (from 0.8)", title=title, ylim=(0.8, 1.02 * max(top, 1.0)))
    figure.legend(loc="outside lower center", ncols=2 + len(peers), fontsize="small")
    save(figure, path)


def layers(rows: Sequence[tuple[str, dict[str, Any]]], title: str, path: Path) -> None:
    """Plots the time of whole layers over that with NCCL's collectives: ours, the peers, and the floor as a line.

    Args:
        rows: a label, and the row of "auto" in a result of benchmarks/layer.py.
        title: the title.
        path: the file to write.
    """
    peers = list(dict.fromkeys(peer for _, row in rows for peer in row["peers"]))
    figure, (plot,) = figure_of(7, 4)
    values = [
        [row["over_nccl"], *[row["peers"].get(peer, 0.0) / row["peers"]["nccl"] for peer in peers]] for _, row in rows
    ]
    floors = [row["over_nccl"] / row["ratio_floor"] for _, row in rows]
    _draw_bars(plot, [label for label, _ in rows], ["ours", *peers], values, floors)
    plot.set(ylabel="time / time with NCCL (from 0.6)", title=title, ylim=(0.6, 1.05))
    figure.legend(loc="outside lower center", ncols=2 + len(peers), fontsize="small")
    save(figure, path)


def lines(groups: Sequence[Group], title: str, path: Path) -> None:
    """Plots microseconds over the size of a collective."""
    peers = peers_of(groups)
    figure, (plot,) = figure_of(7, 4)
    rows = [(group.shape[0], row) for group in groups if (row := group.ours(group.mode))]
    sizes = [size for size, _ in rows]
    plot.plot(sizes, [row["us"] for _, row in rows], "o-", color=OURS, lw=2, label="ours")
    for peer, color in zip(peers, PEERS, strict=False):
        known = [(size, row["peers"][peer]) for size, row in rows if peer in row["peers"]]
        plot.plot([size for size, _ in known], [us for _, us in known], ".-", color=color, label=peer)
    if all("floor_us" in row for _, row in rows):
        plot.plot(sizes, [row["floor_us"] for _, row in rows], color="black", lw=1.5, label="floor")
    plot.set_xscale("log", base=2)
    plot.set_yscale("log")
    plot.set_xticks(sizes, [group.label for group in groups], fontsize="small")
    plot.minorticks_off()
    plot.set(ylabel="microseconds", title=title)
    plot.grid(alpha=0.3)
    plot.legend(fontsize="small")
    save(figure, path)


def timeline(timelines: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Plots one step of each variant, with a lane for products and one for communication."""
    figure, axes = figure_of(9, 0.6 + 1.1 * len(timelines), len(timelines))
    longest = max(span["start_us"] + span["us"] for line in timelines for span in line["spans"])
    lanes = [lane for lane in LANES if any(s["lane"] == lane for line in timelines for s in line["spans"])]
    for plot, line in zip(axes, timelines, strict=True):
        for index, lane in enumerate(lanes):
            spans = [(s["start_us"], s["us"]) for s in line["spans"] if s["lane"] == lane]
            plot.broken_barh(spans, (index + 0.1, 0.8), facecolors=LANES[lane], edgecolor="white", lw=0.3)
        plot.set_yticks([i + 0.5 for i in range(len(lanes))], lanes, fontsize="small")
        plot.set(xlim=(0, longest), ylim=(len(lanes), 0))
        plot.set_title(f"{line['variant']}", loc="left", fontsize="small")
        plot.tick_params(axis="x", labelsize="small")
    axes[-1].set_xlabel("microseconds")
    figure.suptitle(title, fontsize="medium")
    save(figure, path)


def title_of(group: Group, gpu: str) -> str:
    return f"{TITLES[group.op]}: {group.tp} {gpu}, {group.dtype}, {group.mode}"
