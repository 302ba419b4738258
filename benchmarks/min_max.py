"""Compares MIN and MAX of floats over NCCL, composed so that a NaN propagates, with NCCL's own and with SUM.

torchrun --nproc_per_node 4 benchmarks/min_max.py --json min_max.json

Each row: microseconds of one call in a CUDA graph, the median over rounds of the slowest rank, by operation.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import torch_overlap as to
from torch_overlap.tools.bench.result import result, text

SIZES = [1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]  # bytes
ROUNDS, REPEATS = 15, 10


def graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    return graph


def sample(graph: torch.cuda.CUDAGraph, comm: to.TorchComm) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    comm.barrier(async_op=False)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    mine = torch.tensor([begin.elapsed_time(end) * 1000 / REPEATS], device="cuda")
    comm.all_reduce(mine, to.ReduceOp.MAX, async_op=False)
    return mine.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    comm = to.new_comm("nccl", torch.device("cuda"), name="bench")
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for size in SIZES:
            x = torch.randn(size // dtype.itemsize, device="cuda").to(dtype)
            calls = {
                "max": lambda x=x: comm.all_reduce(x, to.ReduceOp.MAX, async_op=False),
                "sum": lambda x=x: comm.all_reduce(x, to.ReduceOp.AVG, async_op=False),
                "nccl_max": lambda x=x: dist.all_reduce(x, dist.ReduceOp.MAX),
            }
            graphs = {name: graph_of(call) for name, call in calls.items()}
            times: dict[str, list[float]] = {name: [] for name in graphs}
            for _ in range(ROUNDS):
                for name, graph in graphs.items():
                    times[name].append(sample(graph, comm))
            us = {name: statistics.median(values) for name, values in times.items()}
            rows.append({"what": f"all_reduce MAX {str(dtype)[6:]} {size} bytes", "us": round(us["max"], 2),
                         "peers": {"NCCL's MAX, which drops a NaN": round(us["nccl_max"], 2),
                                   "AVG": round(us["sum"], 2)}})  # fmt: skip
            if comm.get_rank() == 0:
                print(rows[-1], flush=True)
    if comm.get_rank() == 0 and args.json:
        with open(args.json, "w") as file:
            file.write(text(result("min_max", rows, tp=comm.get_size())))
    comm.finalize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
