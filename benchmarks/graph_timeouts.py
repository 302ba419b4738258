"""Measures the cost of the hint graph_timeouts: all_reduces in a graph, with and without it.

    torchrun --nproc_per_node 2 benchmarks/graph_timeouts.py --out results

A sample is the time of one replay of a graph of 20 consecutive all_reduces, divided by 20, maximum over ranks.
A third communicator, without the hint, shows how much two communicators differ by themselves.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

import torch_overlap as to
from torch_overlap._timing import Stopwatch, in_graph, interleave, ratio_of, slowest_rank, spread_of
from torch_overlap.tools.bench.result import write_result

CALLS = 20


def replay_time(comm: to.TorchComm, x: torch.Tensor, async_op: bool) -> Callable[[], float]:
    """Returns a sampler of the microseconds of one all_reduce in a replayed graph."""
    replay = in_graph(lambda: comm.all_reduce(x, to.ReduceOp.MAX, async_op=async_op).wait(), CALLS)
    return Stopwatch(comm.get_device(), meet=replay).sampler(replay, CALLS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()

    plain = to.new_comm("nccl", torch.device("cuda"), name="plain")
    watched = to.new_comm("nccl", torch.device("cuda"), name="watched", hints={"graph_timeouts": "true"})
    control = to.new_comm("nccl", torch.device("cuda"), name="control")
    rows = []
    for size in (1 << 10, 1 << 20, 64 << 20):
        for async_op in (False, True):
            x = torch.zeros(size // 4, device="cuda")
            variants = {c.get_name(): replay_time(c, x, async_op) for c in (plain, watched, control)}
            samples = slowest_rank(interleave(variants, args.rounds), plain)
            us, iqr = spread_of(samples["watched"])
            without, _ = spread_of(samples["plain"])
            cost, spread = ratio_of(samples, "watched", "plain")
            noise, _ = ratio_of(samples, "control", "plain")
            rows.append(
                {
                    "op": "all_reduce",
                    "shape": size,
                    "dtype": "fp32",
                    "tp": plain.get_size(),
                    "mode": "graph",
                    "algorithm": f"nccl, async_op={async_op}",
                    "us": us,
                    "iqr_us": iqr,
                    "ratio_plain": cost,
                    "ratio_iqr": spread,
                    "ratio_control": noise,
                    "peers": {"without graph_timeouts": without},
                }
            )
            if plain.get_rank() == 0:
                print(
                    f"{size:9d} bytes, async_op={async_op!s:5}: {us:8.2f} us watched, {without:8.2f} us plain, "
                    f"ratio {cost:.3f} +- {spread:.3f}, of another plain communicator {noise:.3f}",
                    flush=True,
                )
    if plain.get_rank() == 0:
        print(write_result("graph_timeouts", plain.get_size(), rows, args.out))
    torch.cuda.synchronize()
    for comm in (plain, watched, control):
        comm.finalize()


if __name__ == "__main__":
    main()
