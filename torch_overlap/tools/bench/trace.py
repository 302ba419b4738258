"""Timeline of one call on rank 0: spans of products, communication and the rest, by torch.profiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._autograd import DeviceType

from torch_overlap._timing import in_graph
from torch_overlap.tools.bench.problem import Problem, Variant
from torch_overlap.tools.bench.ranks import Ranks

_PRODUCT = re.compile(
    r"gemm|nvjet|cutlass|wgmma|xmma|::(add)?mm\b|matmul|fused_(?:gather|scatter|scatter_sum|all_reduce)_kernel",
    re.IGNORECASE,
)
_COMMUNICATION = re.compile(
    r"nccl|memcpy|::copy_|gather|scatter|reduce|all_to_all|barrier|signal|wait|flag|gloo|c10d|low_latency|begin_kernel"
    r"|(?:ll|ll128|simple)_(?:copy|norm)_kernel|two_shot_kernel|bulk_kernel|zero_copy_kernel"
    r"|\bsum_kernel",
    re.IGNORECASE,
)


def lane_of(name: str) -> str:
    """Returns the lane of a kernel. A kernel that multiplies and communicates is a product."""
    if _PRODUCT.search(name):
        return "product"
    return "communication" if _COMMUNICATION.search(name) else "other"


def worth_showing(problem: Problem) -> list[Variant]:
    """Returns our variant as a user gets it, and the first two peers: the library's, and torch's own."""
    ours = [variant for variant in problem.variants if variant.role == "ours"]
    peers = [variant for variant in problem.variants if variant.role == "peer"]
    torchs = [variant for variant in peers if variant.name.startswith("torch")]
    return ours[:1] + peers[:1] + [variant for variant in torchs[:1] if variant is not peers[0]]


def timelines(problem: Problem, ranks: Ranks) -> list[dict[str, Any]]:
    """Returns a timeline for each variant worth showing; empty on ranks other than 0. Collective."""
    found = []
    for variant in worth_showing(problem):
        spans: list[dict[str, Any]] = []
        reason = ranks.try_on_all_ranks(lambda v=variant, s=spans: s.extend(_record(v.call, ranks)))  # type: ignore[misc]
        if reason or not spans:
            problem.missing[f"timeline of {variant.name}"] = reason or "the profiler saw nothing"
            continue
        case = problem.case
        shown = f"{variant.name} ({variant.chosen})" if variant.chosen else variant.name
        found.append(
            {"op": case.op, "name": case.label, "shape": list(case.shape), "dtype": case.dtype,
             "variant": f"ours, {shown}" if variant.role == "ours" else shown, "spans": spans}
        )  # fmt: skip
    return found


def _record(call: Callable[[int], object], ranks: Ranks) -> list[dict[str, Any]]:
    on_gpu = ranks.device.type == "cuda"
    once: Callable[[], object] = in_graph(lambda: call(0)) if on_gpu else lambda: call(0)
    once()
    ranks.synchronize()
    activity = torch.profiler.ProfilerActivity
    profiler = torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU])
    with profiler:
        if on_gpu:
            ranks.captured.meet()
        once()
        ranks.synchronize()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    seen = [
        (event.time_range.start, event.time_range.elapsed_us(), event.name)
        for event in profiler.events() or []
        if event.device_type == wanted and event.cpu_parent is None and not getattr(event, "is_user_annotation", False)
    ]
    # On a GPU the first event is the barrier of the ranks.
    return spans_of(sorted(seen)[1 if on_gpu else 0 :])


def spans_of(events: Sequence[tuple[float, float, str]]) -> list[dict[str, Any]]:
    """Converts (start, duration, name) in order to spans that start at 0."""
    if not events:
        return []
    first = events[0][0]
    return [
        {"lane": lane_of(name), "name": name[:60], "start_us": round(start - first, 2), "us": round(us, 2)}
        for start, us, name in events
    ]
