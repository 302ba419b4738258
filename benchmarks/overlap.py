#!/usr/bin/env python3
"""GEMMs overlapped with their all-gather or reduce-scatter, beside the best GEMM alone and torch's fused operators.

    torchrun --nproc_per_node 4 benchmarks/overlap.py [--out benchmarks/results] [--rounds 20] [--only up qkv]

(M, N, K) are of the whole layer: an all-gather has x [M / tp, K] and w [N / tp, K], a reduce-scatter x [M, K / tp] and
w [N, K / tp]. bf16, random data, inputs that rotate beyond the L2 cache. "gemm" is the whole rank-local product by the
algorithm of cuBLASLt that was measured to be the fastest: ratio_gemm is the time over that one's, in the same round.
Every time is the slowest rank's. "op" is the operator; "ring" and "pipeline" are the methods of
the overlap classes; "nccl" and "torch" are the collective and the product one after the other, and torch's
symm_mem.fused_*.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # registers torch's fused operators
from harness import in_graph, interleave, median_and_iqr, ratio, slowest_rank, timed, write_result

import torch_overlap as to
from torch_overlap.gemm import GemmArgs, GemmOperand, gemm, set_gemm_tuning

AG = to.CommOverlapType.AG
RS = to.CommOverlapType.RS
RING = to.CommOverlapMethod.RING_EXCHANGE
PIPELINE = to.CommOverlapMethod.PIPELINE

GATHERS = {
    "8b-up": (8192, 28672, 4096),
    "70b-up": (8192, 57344, 8192),
    "70b-qkv": (8192, 10240, 8192),
    "fc1": (8192, 49152, 12288),
    "small-up": (2048, 14336, 4096),
}
SCATTERS = {
    "8b-down": (8192, 4096, 14336),
    "70b-down": (8192, 8192, 28672),
    "70b-o": (8192, 8192, 8192),
    "fc2": (8192, 12288, 49152),
    "small-down": (2048, 4096, 14336),
}
CACHE_BYTES = 128 << 20
Calls = dict[str, Callable[[int], object]]


def product(lhs: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    gemm(GemmArgs(GemmOperand(lhs), GemmOperand(weight, transposed=True), out))


def sets_of(bytes_each: int) -> int:
    """How many inputs it takes that none is in the cache when its turn comes."""
    return max(2, -(-CACHE_BYTES // bytes_each))


def gather_calls(comm: to.TorchComm, m: int, n: int, k: int) -> tuple[Calls, int]:
    tp, device = comm.get_size(), comm.get_device()
    sets = sets_of(2 * (m * k // tp + n * k // tp))
    made = partial(torch.randn, dtype=torch.bfloat16, device=device)
    xs = [made(m // tp, k) for _ in range(sets)]
    ws = [made(n // tp, k) for _ in range(sets)]
    whole = made(m, k)
    out = torch.empty(m, n // tp, dtype=torch.bfloat16, device=device)
    gathered = torch.empty(m, k, dtype=torch.bfloat16, device=device)
    ring = to.CommOverlapP2PBase(comm, to.CommOverlapConfig(AG, RING, [m, k], torch.bfloat16, tp))
    name = dist.group.WORLD.group_name

    def nccl(i: int) -> None:
        dist.all_gather_into_tensor(gathered, xs[i % sets])
        product(gathered, ws[i % sets], out)

    calls: Calls = {
        "gemm": lambda i: product(whole, ws[i % sets], out),
        "op": lambda i: to.ops.all_gather_matmul(xs[i % sets], [ws[i % sets]], comm, algorithm="ring"),
        "ring": lambda i: ring.split_overlap_ag(ws[i % sets], True, xs[i % sets], False, out),
        "nccl": nccl,
        "torch": lambda i: torch.ops.symm_mem.fused_all_gather_matmul(xs[i % sets], [ws[i % sets].t()], 0, name),
    }
    return calls, sets


def scatter_calls(comm: to.TorchComm, m: int, n: int, k: int) -> tuple[Calls, int]:
    tp, device = comm.get_size(), comm.get_device()
    sets = sets_of(2 * (m * k // tp + n * k // tp))
    made = partial(torch.randn, dtype=torch.bfloat16, device=device)
    xs = [made(m, k // tp) for _ in range(sets)]
    ws = [made(n, k // tp) for _ in range(sets)]
    whole = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    out = torch.empty(m // tp, n, dtype=torch.bfloat16, device=device)
    ring = to.CommOverlapP2PBase(comm, to.CommOverlapConfig(RS, RING, [m, n], torch.bfloat16, tp))
    pipeline = to.CommOverlapBase(comm, to.CommOverlapConfig(RS, PIPELINE, [m, n], torch.bfloat16, tp))
    name = dist.group.WORLD.group_name

    def nccl(i: int) -> None:
        product(xs[i % sets], ws[i % sets], whole)
        dist.reduce_scatter_tensor(out, whole)

    calls: Calls = {
        "gemm": lambda i: product(xs[i % sets], ws[i % sets], whole),
        "op": lambda i: to.ops.matmul_reduce_scatter(xs[i % sets], ws[i % sets], comm, algorithm="ring"),
        "ring": lambda i: ring.split_overlap_rs(ws[i % sets], True, xs[i % sets], False, None, rs_output=out),
        "pipeline": lambda i: pipeline.split_overlap_rs(ws[i % sets], True, xs[i % sets], False, None, rs_output=out),
        "nccl": nccl,
        "torch": lambda i: torch.ops.symm_mem.fused_matmul_reduce_scatter(
            xs[i % sets], ws[i % sets].t(), "sum", 0, name
        ),
    }
    return calls, sets


def measure(comm: to.TorchComm, calls: Calls, sets: int, mode: str, rounds: int) -> dict[str, list[float]]:
    meet = partial(comm.barrier, async_op=False)
    count = max(sets, 6)
    samplers = {}
    for name, call in calls.items():
        for i in range(sets):
            call(i)
        torch.cuda.synchronize()
        step = iter(range(1 << 30))
        one = lambda call=call, step=step: call(next(step))  # noqa: E731
        samplers[name] = timed(in_graph(one, count), 1, meet) if mode == "graph" else timed(one, count, meet)
    samples = interleave(samplers, rounds)
    if mode == "graph":
        samples = {name: [value / count for value in values] for name, values in samples.items()}
    return slowest_rank(samples, comm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="*", help="names of layers")
    args = parser.parse_args()

    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    comm = to.new_comm("nccl", torch.device("cuda"), "overlap")
    torch.cuda.set_device(comm.get_device())
    set_gemm_tuning("measured")
    torch.manual_seed(comm.get_rank())
    rows: list[dict[str, Any]] = []
    for op, layers, calls_of in (("AG", GATHERS, gather_calls), ("RS", SCATTERS, scatter_calls)):
        for layer, (m, n, k) in layers.items():
            if args.only and layer not in args.only:
                continue
            calls, sets = calls_of(comm, m, n, k)
            for mode in ("graph", "eager"):
                samples = measure(comm, calls, sets, mode, args.rounds)
                gemm_us, gemm_iqr = median_and_iqr(samples["gemm"])
                for algorithm in (name for name in ("op", "ring", "pipeline") if name in calls):
                    us, iqr = median_and_iqr(samples[algorithm])
                    over, spread = ratio(samples, algorithm, "gemm")
                    peers = {name: median_and_iqr(samples[name])[0] for name in ("nccl", "torch")}
                    rows.append(
                        {"op": op, "layer": layer, "shape": [m, n, k], "dtype": "bfloat16", "tp": comm.get_size(),
                         "mode": mode, "algorithm": algorithm, "us": us, "iqr_us": iqr, "gemm_us": gemm_us,
                         "gemm_iqr_us": gemm_iqr, "ratio_gemm": over, "ratio_iqr": spread, "peers": peers}
                    )  # fmt: skip
                    if comm.get_rank() == 0:
                        print(f"{op} {layer:10} {mode:5} {algorithm:8} {us:8.1f} us = {over:.3f} +- {spread:.3f} x gemm"
                              f" {gemm_us:.1f}; nccl {peers['nccl'] / gemm_us:.3f}, torch"
                              f" {peers['torch'] / gemm_us:.3f}", flush=True)  # fmt: skip
            del calls
    if comm.get_rank() == 0:
        print(write_result("overlap", comm.get_size(), rows, args.out))
    comm.finalize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
