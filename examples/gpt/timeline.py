"""Timeline of one step: its communication and computation."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

COMM = re.compile(r"nccl|torch_overlap::(all_gather|reduce_scatter|all_reduce|all_to_all|broadcast)_?$", re.IGNORECASE)
GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|aten::(mm|addmm|bmm|linear)$", re.IGNORECASE)
CHUNK = re.compile(r"torch_overlap::chunk_(comm|wait)\[(\d+)\]")

Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    lane: str  # on a GPU the same as kind, else a thread or "in flight"
    kind: str  # "communication" or "GEMM"
    start: float  # microseconds since the step began
    end: float


def record(step: Callable[[], None], trace: Path) -> list[Span]:
    """Runs `step` under the profiler; writes its trace for chrome://tracing or Perfetto."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    else:
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # otherwise it logs a missing driver as an error
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    return spans(json.loads(trace.read_text())["traceEvents"])


def spans(events: list[dict]) -> list[Span]:
    """Returns communication and GEMMs of a trace: the kernels if there are any, else the host's spans by thread.

    Kernels have one lane per kind: a graph runs on streams of its own choice, dozens of them.
    """
    complete = [e for e in events if e.get("ph") == "X"]
    kernels = [e for e in complete if e.get("cat") == "kernel"]
    chosen = kernels or [e for e in complete if e.get("cat") in ("cpu_op", "user_annotation")]
    chosen.sort(key=lambda e: (e["ts"], -e["dur"]))
    found = outermost(chosen, by_thread=not kernels) + in_flight(chosen)
    origin = min((s.start for s in found), default=0.0)
    return [Span(s.lane, s.kind, s.start - origin, s.end - origin) for s in found]


def outermost(events: list[dict], *, by_thread: bool) -> list[Span]:
    """Returns the outer span of spans that are nested in one lane."""
    found: list[Span] = []
    covered: dict[str, float] = {}
    for event in events:
        kind = "communication" if COMM.search(event["name"]) else "GEMM" if GEMM.search(event["name"]) else None
        if kind is None:
            continue
        name, end = f"thread {event['tid']}" if by_thread else kind, event["ts"] + event["dur"]
        if end > covered.get(name, 0.0):
            covered[name] = end
            found.append(Span(name, kind, event["ts"], end))
    return found


def in_flight(events: list[dict]) -> list[Span]:
    """Returns the chunks that overlapped operators send in the background on a CPU: from issue until the wait ends."""
    found: list[Span] = []
    issued: dict[str, list[float]] = {}
    for event in events:
        match = CHUNK.fullmatch(event["name"])
        if match is None:
            continue
        what, chunk = match.groups()
        if what == "comm":
            issued.setdefault(chunk, []).append(event["ts"])
        elif issued.get(chunk):
            found.append(Span("in flight", "communication", issued[chunk].pop(0), event["ts"] + event["dur"]))
    return found


def hidden_share(found: Iterable[Span]) -> float:
    """Returns the fraction of the communication time during which a GEMM ran."""
    comm, gemm = (merge((s.start, s.end) for s in found if s.kind == kind) for kind in ("communication", "GEMM"))
    total = sum(end - start for start, end in comm)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in comm for b in gemm)
    return both / total if total > 0 else 0.0


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union as disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
