"""What the benchmarks share: interleaved rounds, medians with their spread, and the result file.

Ours and the baselines take turns within every round, so that a machine that warms up or is disturbed
does so for all of them; a ratio is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import torch_overlap as to


def median_and_iqr(samples: Sequence[float]) -> tuple[float, float]:
    """Median and interquartile range."""
    if len(samples) < 4:
        return statistics.median(samples), max(samples) - min(samples)
    low, _, high = statistics.quantiles(samples, n=4)
    return statistics.median(samples), high - low


def timed(call: Callable[[], object], repeats: int, meet: Callable[[], object]) -> Callable[[], float]:
    """Microseconds of one call, over `repeats` between two events; before them the ranks meet on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        meet()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / repeats

    return sample


def in_graph(call: Callable[[], object], count: int) -> Callable[[], object]:
    """A graph of `count` calls."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph.replay


def interleave(variants: dict[str, Callable[[], float]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Calls every variant once a round, in an order that rotates; each returns its own sample."""
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds + warmup):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            sample = variants[name]()
            if index >= warmup:
                samples[name].append(sample)
    return samples


def slowest_rank(samples: dict[str, list[float]], comm: to.TorchComm) -> dict[str, list[float]]:
    """The maximum over ranks of each sample: a collective is as slow as its slowest rank."""
    names = sorted(samples)
    table = torch.tensor([samples[n] for n in names], dtype=torch.float64, device=comm.get_device())
    comm.all_reduce(table, to.ReduceOp.MAX, async_op=False)
    return {name: row.tolist() for name, row in zip(names, table.cpu(), strict=True)}


def ratio(samples: dict[str, list[float]], ours: str, baseline: str) -> tuple[float, float]:
    """Median and spread of ours / baseline within each round."""
    pairs = zip(samples[ours], samples[baseline], strict=True)
    return median_and_iqr([a / b for a, b in pairs])


def _git_commit() -> str:
    """TORCH_OVERLAP_COMMIT, for a copy of the tree without its history; else git's."""
    if commit := os.environ.get("TORCH_OVERLAP_COMMIT"):
        return commit
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _driver() -> str:
    try:
        return subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def _command() -> str:
    """How to run this again: script, ranks and what was asked, without the paths of this machine."""
    asked = []
    skip_value = False
    for argument in sys.argv[1:]:
        if not skip_value and argument not in ("--out", "--loops"):
            asked.append(argument)
        skip_value = argument in ("--out", "--loops")
    ranks = os.environ.get("WORLD_SIZE", "1")
    return " ".join(["torchrun --nproc_per_node", ranks, "benchmarks/" + Path(sys.argv[0]).name, *asked])


def result(benchmark: str, rows: list[dict[str, Any]], command: str | None = None) -> dict[str, Any]:
    """What a result file holds."""
    return {
        "benchmark": benchmark,
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "driver": _driver(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none",
        "commit": _git_commit(),
        "command": command or _command(),
        "rows": rows,
    }


def write_result(benchmark: str, tp: int, rows: list[dict[str, Any]], folder: Path) -> Path:
    """Writes `<benchmark>-<gpu>-tp<n>-<date>.json` and returns its path. Call it on rank 0."""
    content = result(benchmark, rows)
    folder.mkdir(parents=True, exist_ok=True)
    name = content["gpu"].lower().replace("nvidia ", "").replace(" ", "-")
    path = folder / f"{benchmark}-{name}-tp{tp}-{content['date']}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
