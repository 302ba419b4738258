"""calibrate: measures a cost model of the machine that a mesh runs on."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_overlap._C import InvalidValueError, MeshComms, ReduceOp, TorchComm
from torch_overlap._timing import Stopwatch, interleave, slowest_rank, spread_of
from torch_overlap.mesh._core import CostModel, wire_bytes
from torch_overlap.mesh.cost import save_cost_model

__all__ = ["calibrate"]

_ops = torch.ops.torch_overlap
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast")
SIZES = {"cuda": tuple(1 << i for i in range(10, 29, 3)), "cpu": tuple(1 << i for i in range(10, 23, 3))}
MATRIX = {"cuda": 8192, "cpu": 512}
COPIED = {"cuda": 1 << 30, "cpu": 1 << 25}
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def calibrate(
    mesh: MeshComms,
    path: str | Path | None = None,
    *,
    name: str = "measured",
    sizes: Sequence[int] | None = None,
    rounds: int = 7,
) -> CostModel:
    """Measures the times of collectives, products and copies on this mesh. Collective; the same result on every rank.

        cost = calibrate(mesh, "cost.json")
        mesh.close(); mesh = connect(axes, comm, cost=cost)

    It measures each collective over each axis of one class of links; products of 2-, 4- and 8-byte elements; a copy; a
    small kernel; and, on GPUs, the slowdown of a product by a concurrent collective. Results are medians over `rounds`,
    of the slowest rank. Values that cannot be measured here (links that the mesh lacks, 8-bit products, chunks) are
    those of `mesh.cost`.

    Args:
        mesh: the connected mesh to measure.
        path: the file to which rank 0 writes the model, for load_cost_model.
        name: the name of the model.
        sizes: bytes of the larger of a rank's input and output, increasing; default: 1 KiB to 256 MiB, on a CPU 4 MiB.
        rounds: samples of each measurement.

    Raises:
        InvalidValueError: sizes that do not increase, or are smaller than one 4-byte element per rank.
    """
    device = mesh.comm.get_device().type
    chosen = list(sizes or SIZES[device])
    most = max(mesh.mesh.axes.values())
    if chosen != sorted(set(chosen)) or len(chosen) < 2 or chosen[0] < 4 * most:
        raise InvalidValueError(
            f"calibrate: expected two or more rising sizes of at least {4 * most} bytes, got {chosen}"
        )
    clock = _Clock(mesh, rounds)
    values = mesh.cost.to_dict()
    values["name"] = name
    values["links"] = dict(values["links"])
    measured: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for axis, size in mesh.mesh.axes.items():
        comm = mesh.group_comm(axis)
        links = {link: n for link, n in mesh.mesh.links(axis).items() if n > 1}
        if comm is None or len(links) != 1:
            continue
        (link,) = links
        if size not in measured.setdefault(link, {}):
            measured[link][size] = _curves(clock, comm, chosen)
    for link, by_size in measured.items():
        values["links"][link] = _link(by_size)
    values["device"] = _device(clock, device, values["device"])
    if device == "cuda":
        values["overlap"] = values["overlap"] | {"contention": _contention(clock, mesh.comm)}
    model = CostModel.from_dict(values)
    if path is not None and mesh.rank == 0:
        save_cost_model(model, path)
    return model


class _Clock:
    """Times work that all ranks start together."""

    def __init__(self, mesh: MeshComms, rounds: int) -> None:
        self._comm, self._rounds = mesh.comm, rounds
        self.device = mesh.comm.get_device()
        self._watch = Stopwatch(self.device, lambda: mesh.comm.barrier(async_op=False))

    def microseconds(self, work: Callable[[], object], calls: int = 4) -> float:
        """Returns microseconds of one of `calls` consecutive calls: the median over rounds, of the slowest rank."""
        samples = interleave({"": self._watch.sampler(work, repeats=calls)}, self._rounds, warmup=1)
        return spread_of(slowest_rank(samples, self._comm)[""]).median


def _call(collective: str, comm: TorchComm, size: int) -> Callable[[], Tensor]:
    """Returns one collective, the larger of whose input and output has `size` bytes."""
    count, rank_name = comm.get_size(), comm.get_name()
    elements = size // 4 // count * count
    large = torch.zeros(elements, device=comm.get_device())
    if collective == "all_reduce":
        return lambda: _ops.all_reduce(large, "sum", rank_name, count)
    if collective == "all_gather":
        part = large[: elements // count].clone()
        return lambda: _ops.all_gather(part, 0, rank_name, count)
    if collective == "reduce_scatter":
        return lambda: _ops.reduce_scatter(large, 0, "sum", rank_name, count)
    if collective == "all_to_all":
        return lambda: _ops.all_to_all(large, 0, 0, rank_name, count)
    if collective == "permute":
        pairs = list(itertools.chain.from_iterable((i, (i + 1) % count) for i in range(count)))
        return lambda: _ops.permute(large, pairs, rank_name)
    return lambda: _ops.broadcast(large, 0, rank_name)


def _curves(clock: _Clock, comm: TorchComm, sizes: Sequence[int]) -> list[dict[str, Any]]:
    out = []
    with torch.no_grad():
        for collective in COLLECTIVES:
            points: list[list[float]] = []
            for size in sizes:
                us = clock.microseconds(_call(collective, comm, size))
                # A larger size cannot be faster: an apparent speed-up is noise.
                points.append([size, max(us, points[-1][1] * 1.001) if points else us])
            out.append({"collective": collective, "ranks": comm.get_size(), "bytes_us": points})
    return out


def _link(by_size: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns a class of links from the curves of groups of some sizes."""
    smallest = {n: min(c["bytes_us"][0][1] for c in curves) for n, curves in by_size.items()}
    first, last = min(by_size), max(by_size)
    slope = (smallest[last] - smallest[first]) / (last - first) if last > first else 0.0
    gather = next(c["bytes_us"] for c in by_size[last] if c["collective"] == "all_gather")
    (a, before), (b, after) = gather[-2], gather[-1]
    sent = wire_bytes("all_gather", last, b) - wire_bytes("all_gather", last, a)
    return {
        "start_us": smallest[first],
        "latency_us": max(slope, 0.0),
        "bandwidth_gbps": sent / (after - before) / 1e3,
        "curves": [curve for curves in by_size.values() for curve in curves],
    }


def _device(clock: _Clock, device: str, base: dict[str, Any]) -> dict[str, Any]:
    n, where = MATRIX[device], clock.device
    tflops = dict(base["tflops"])
    for size, dtype in DTYPES.items():
        a, b = (torch.ones(n, n, device=where).to(dtype) for _ in range(2))
        us = clock.microseconds(functools.partial(torch.matmul, a, b), calls=2)
        tflops[str(size)] = 2 * n**3 / us / 1e6
    source = torch.zeros(COPIED[device] // 4, device=where)
    target = torch.empty_like(source)
    gbps = 2 * COPIED[device] / clock.microseconds(lambda: target.copy_(source), calls=2) / 1e3
    small = torch.zeros(16, device=where)
    processors = torch.cuda.get_device_properties(where).multi_processor_count if device == "cuda" else 1
    return base | {
        "tflops": tflops,
        "memory_gbps": gbps,
        "processors": processors,
        "kernel_us": clock.microseconds(lambda: small.add_(1), calls=100),
        "tiles": device == "cuda",
    }


def _contention(clock: _Clock, comm: TorchComm) -> float:
    """Returns the fraction by which a concurrent collective slows down a product."""
    n = MATRIX["cuda"]
    a = torch.ones(n, n, dtype=torch.bfloat16, device=clock.device)
    moved = torch.zeros(1 << 26, device=clock.device)

    def both() -> None:
        work = comm.all_reduce(moved, ReduceOp.SUM, async_op=True)
        for _ in range(4):
            a @ a
        work.wait()

    alone = clock.microseconds(lambda: [a @ a for _ in range(4)], calls=1)
    together = clock.microseconds(both, calls=1)
    collective = clock.microseconds(lambda: comm.all_reduce(moved, ReduceOp.SUM, async_op=False), calls=1)
    return max(0.0, min(1.0, (together - max(alone, collective)) / alone))
