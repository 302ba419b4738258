"""One step as a picture: what communicated and what computed, when."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

COMM = re.compile(r"nccl|chunk_comm|all_gather|reduce_scatter|all_reduce|all_to_all|broadcast", re.IGNORECASE)
GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|aten::(mm|addmm|bmm|linear)$", re.IGNORECASE)

Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    lane: str  # a stream of the GPU, or a thread
    kind: str  # "communication" or "GEMM"
    start: float  # microseconds since the step began
    end: float


def record(step: Callable[[], None], trace: Path) -> list[Span]:
    """Runs `step` under the profiler; leaves its trace for chrome://tracing or Perfetto."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # Collectives of the CPU run on threads of their own.
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=activities, experimental_config=config, acc_events=True) as profiler:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    return spans(json.loads(trace.read_text())["traceEvents"])


def spans(events: list[dict]) -> list[Span]:
    """Communication and GEMMs of a trace; of two that are nested in one lane, the outer one."""
    complete = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "cpu_op", "user_annotation")]
    kernels = [e for e in complete if e["cat"] == "kernel"]
    chosen = kernels or complete
    lane_name = "stream {}" if kernels else "thread {}"
    origin = min((e["ts"] for e in chosen), default=0.0)
    found: list[Span] = []
    covered: dict[str, float] = {}
    for event in sorted(chosen, key=lambda e: (e["ts"], -e["dur"])):
        kind = kind_of(event["name"])
        lane = lane_name.format(event["tid"])
        start, end = event["ts"] - origin, event["ts"] - origin + event["dur"]
        if kind is None or end <= covered.get(lane, -1.0):
            continue
        covered[lane] = end
        found.append(Span(lane, kind, start, end))
    return found


def kind_of(name: str) -> str | None:
    """A fused operator is both, and shows as its parts."""
    if "matmul" in name and "chunk" not in name:
        return None
    return "communication" if COMM.search(name) else "GEMM" if GEMM.search(name) else None


def hidden_share(found: Iterable[Span]) -> float:
    """The part of the communication's time during which a GEMM ran."""
    comm, gemm = (merge((s.start, s.end) for s in found if s.kind == kind) for kind in ("communication", "GEMM"))
    total = sum(end - start for start, end in comm)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in comm for b in gemm)
    return both / total if total > 0 else 0.0


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
