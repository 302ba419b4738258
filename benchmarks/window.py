"""Compares one-sided puts with a plain copy to the peer, and measures the latency of a put and its signal.

    torchrun --nproc_per_node 2 benchmarks/window.py --out results

put: rank 0 writes to rank 1; microseconds of one put, over several consecutive ones, compared with torch's copy_ into
the mapped tensor of the peer (a copy-engine copy between the same two buffers). Ratio: bandwidth of ours over that
copy's, median over rounds. latency: ranks 0 and 1 send each other `bytes` in turns, put + signal + wait_signal; half a
round trip is one way. Eager, and in CUDA graphs of many operations.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torch_overlap as to
from torch_overlap._timing import Stopwatch, in_graph, interleave, ratio_of, slowest_rank, spread_of
from torch_overlap.tools.bench.result import write_result

KIB = 1 << 10
SIZES = [KIB * 4**i for i in range(10)]  # 1 KiB .. 256 MiB
LATENCY_SIZES = [8, KIB, 64 * KIB, 1024 * KIB]
TURNS = 20


def row(op: str, size: int, mode: str, comm: to.TorchComm, us: float, iqr: float, **more: Any) -> dict[str, Any]:
    found = {"op": op, "shape": size, "dtype": "uint8", "tp": comm.get_size(), "mode": mode, "algorithm": "window"}
    return {**found, "us": us, "iqr_us": iqr, **more}


def put_rows(comm: to.TorchComm, rounds: int) -> list[dict[str, Any]]:
    rows = []
    watch = Stopwatch(comm.get_device(), partial(comm.barrier, async_op=False))
    writes = comm.get_rank() == 0
    for size in SIZES:
        window = comm.new_window(to.symmetric_empty(size, torch.uint8, comm))
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
        mapped = window.map_remote_tensor(1)

        def put(window: to.TorchCommWindow = window, source: torch.Tensor = source) -> None:
            if writes:
                window.put(source, 1, 0, async_op=False)

        def copy(mapped: torch.Tensor = mapped, source: torch.Tensor = source) -> None:
            if writes:
                mapped.copy_(source)

        many = max(2, min(50, (64 << 20) // size))
        calls = {"eager": (put, copy, many), "graph": (in_graph(put, many), in_graph(copy, many), 1)}
        for mode, (ours, theirs, repeats) in calls.items():
            variants = {
                "ours": watch.sampler(ours, repeats=repeats),
                "copy": watch.sampler(theirs, repeats=repeats),
            }
            samples = slowest_rank(interleave(variants, rounds), comm)
            if mode == "graph":
                samples = {name: [value / many for value in values] for name, values in samples.items()}
            bandwidth_ratio, spread = ratio_of(samples, "copy", "ours")
            us, iqr = spread_of(samples["ours"])
            plain, _ = spread_of(samples["copy"])
            rows.append(row("put", size, mode, comm, us, iqr, bandwidth_ratio=bandwidth_ratio, ratio_iqr=spread,
                            peers={"peer copy": plain}))  # fmt: skip
            if writes:
                print(f"put      {size:10d} B  {mode:5s} {us:9.2f} us {size / us / 1000:7.1f} GB/s  copy "
                      f"{plain:9.2f} us  ratio {bandwidth_ratio:.3f} +- {spread:.3f}", flush=True)  # fmt: skip
        # A graph keeps the window's memory alive: both are freed before the next size.
        del calls, mapped
        window.tensor_deregister()
    return rows


def latency_rows(comm: to.TorchComm, rounds: int) -> list[dict[str, Any]]:
    rows = []
    watch = Stopwatch(comm.get_device(), partial(comm.barrier, async_op=False))
    rank = comm.get_rank()
    for size in LATENCY_SIZES:
        window = comm.new_window(to.symmetric_empty(size, torch.uint8, comm))
        source = torch.zeros(size, dtype=torch.uint8, device="cuda")

        def turn(window: to.TorchCommWindow = window, source: torch.Tensor = source) -> None:
            if rank > 1:
                return
            if rank == 1:
                window.wait_signal(0, async_op=False)
            window.put(source, 1 - rank, 0, async_op=False)
            window.signal(1 - rank, async_op=False)
            if rank == 0:
                window.wait_signal(1, async_op=False)

        for mode, (call, repeats) in {"eager": (turn, TURNS), "graph": (in_graph(turn, TURNS), 1)}.items():
            samples = slowest_rank(interleave({"ours": watch.sampler(call, repeats=repeats)}, rounds), comm)
            turns = TURNS if mode == "graph" else 1
            us, iqr = spread_of([value / turns / 2 for value in samples["ours"]])
            rows.append(row("put+signal", size, mode, comm, us, iqr, peers={}))
            if rank == 0:
                print(f"one way  {size:10d} B  {mode:5s} {us:9.2f} us +- {iqr:.2f}", flush=True)
        window.tensor_deregister()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    comm = to.new_comm("nccl", torch.device("cuda"), name="window")
    rows = put_rows(comm, args.rounds) + latency_rows(comm, args.rounds)
    if comm.get_rank() == 0:
        print(write_result("window", comm.get_size(), rows, args.out))
    comm.finalize()


if __name__ == "__main__":
    main()
