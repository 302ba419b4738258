"""Compares large collectives with torch.distributed's NCCL, in one run.

    torchrun --nproc_per_node 4 benchmarks/collective_bandwidth.py --out results

Each sample times a collective with CUDA events, after a barrier on the device. Ratio: bandwidth of
ours over theirs, median of the per-round ratios of the slowest rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import torch_overlap as to
from torch_overlap._timing import Stopwatch, interleave, ratio_of, slowest_rank, spread_of
from torch_overlap.tools.bench.result import write_result

MIB = 1 << 20


def cases(comm: to.TorchComm, megabytes: int) -> dict[str, dict[str, Callable[[], object]]]:
    """Returns, per operation, ours and torch.distributed's, on the same buffers."""
    size, device = comm.get_size(), comm.get_device()
    whole = torch.randn(megabytes * MIB // 2, device=device).to(torch.bfloat16)
    whole = whole[: whole.numel() // size * size]
    part = torch.randn(whole.numel() // size, device=device).to(torch.bfloat16)
    other = torch.empty_like(whole)
    reduce_op = to.ReduceOp.AVG  # values stay bounded over repetitions
    return {
        "all_reduce": {
            "ours": lambda: comm.all_reduce(whole, reduce_op, async_op=False),
            "torch.distributed": lambda: dist.all_reduce(whole, dist.ReduceOp.AVG),
        },
        "all_gather_single": {
            "ours": lambda: comm.all_gather_single(other, part, async_op=False),
            "torch.distributed": lambda: dist.all_gather_into_tensor(other, part),
        },
        "reduce_scatter_single": {
            "ours": lambda: comm.reduce_scatter_single(part, whole, reduce_op, async_op=False),
            "torch.distributed": lambda: dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG),
        },
        "all_to_all_single": {
            "ours": lambda: comm.all_to_all_single(other, whole, async_op=False),
            "torch.distributed": lambda: dist.all_to_all_single(other, whole),
        },
        "broadcast": {
            "ours": lambda: comm.broadcast(whole, 0, async_op=False),
            "torch.distributed": lambda: dist.broadcast(whole, 0),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[16, 64, 256])
    args = parser.parse_args()

    comm = to.new_comm("nccl", torch.device("cuda"), name="bandwidth")
    dist.init_process_group("nccl", device_id=comm.get_device())
    watch = Stopwatch(comm.get_device(), dist.barrier)
    rows = []
    for megabytes in args.mebibytes:
        for op, variants in cases(comm, megabytes).items():
            samplers = {name: watch.sampler(call, repeats=4) for name, call in variants.items()}
            samples = slowest_rank(interleave(samplers, args.rounds), comm)
            bandwidth_ratio, spread = ratio_of(samples, "torch.distributed", "ours")
            us, iqr = spread_of(samples["ours"])
            theirs, _ = spread_of(samples["torch.distributed"])
            rows.append(
                {
                    "op": op,
                    "shape": megabytes * MIB,
                    "dtype": "bf16",
                    "tp": comm.get_size(),
                    "mode": "eager",
                    "algorithm": "nccl",
                    "us": us,
                    "iqr_us": iqr,
                    "bandwidth_ratio": bandwidth_ratio,
                    "ratio_iqr": spread,
                    "peers": {"torch.distributed": theirs},
                }
            )
            if comm.get_rank() == 0:
                print(
                    f"{op:24s} {megabytes:4d} MiB  {us:9.1f} us  torch.distributed {theirs:9.1f} us"
                    f"  bandwidth ratio {bandwidth_ratio:.3f} +- {spread:.3f}",
                    flush=True,
                )
    if comm.get_rank() == 0:
        print(write_result("collective_bandwidth", comm.get_size(), rows, args.out))
    dist.destroy_process_group()
    comm.finalize()


if __name__ == "__main__":
    main()
