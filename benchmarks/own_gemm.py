"""Our own products for Hopper beside cuBLASLt's best, on the twelve shapes of the operators' benchmark.

    python benchmarks/own_gemm.py --tp 4 --dtype bf16 --out results

One GPU; the shapes are those of one of `tp` ranks, weights [n, k], results bfloat16; fp8: e4m3 with one factor for
each operand. Each variant is captured in a CUDA graph
of several calls on operands that rotate; variants take turns within every round, and a ratio is the median over rounds
of the ratio within one. The baseline is cuBLASLt with `set_gemm_tuning("measured")`, the quickest of its heuristics.
At the end: the geometric mean and the worst over all shapes of the quickest of our kernels.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from torch_overlap._gemm import own_gemm_kernels, run_own_gemm_kernel
from torch_overlap.bench.cases import GATHERS, SCATTERS
from torch_overlap.bench.result import write_result
from torch_overlap.bench.timing import Stopwatch, in_graph, interleave, ratio_of, spread_of
from torch_overlap.gemm import GemmArgs, GemmOperand, ScalingMode, gemm, set_gemm_tuning

BASELINE = "cublaslt"
CALLS = 6
SETS = 2


def shapes_of(tp: int) -> dict[str, tuple[int, int, int]]:
    """The products of one rank: columns of the weights are shared out, or what is summed."""
    gather = {f"{name} ag": (m, n // tp, k) for name, (m, n, k) in GATHERS.items()}
    return gather | {f"{name} rs": (m, n, k // tp) for name, (m, n, k) in SCATTERS.items()}


def measure(shape: tuple[int, int, int], dtype: str, rounds: int) -> dict[str, list[float]]:
    """Microseconds of a call, by variant."""
    m, n, k = shape
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")

    def random(rows: int, transposed: bool) -> GemmOperand:
        data = torch.randn(rows, k, device="cuda")
        if dtype == "bf16":
            return GemmOperand(data.bfloat16(), transposed)
        one = torch.ones(1, device="cuda")
        return GemmOperand(
            data.to(torch.float8_e4m3fn), transposed, scaling=ScalingMode.CURRENT_TENSOR_SCALING, scale_inv=one
        )

    products = [GemmArgs(random(m, False), random(n, True), out) for _ in range(SETS)]
    variants: dict[str, Callable[[GemmArgs], object]] = {BASELINE: gemm}
    variants |= {kernel: partial(run_own_gemm_kernel, kernel=kernel) for kernel in own_gemm_kernels(products[0])}
    watch = Stopwatch(torch.device("cuda"), meet=lambda: None)
    samplers = {}
    for name, call in variants.items():

        def all_sets(call: Callable[[GemmArgs], object] = call) -> None:
            for product in products:
                call(product)

        all_sets()  # plans are made and kernels loaded
        samplers[name] = watch.sampler(in_graph(all_sets, CALLS // SETS), calls=CALLS)
    return interleave(samplers, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=4, help="the ranks that share a layer (default: %(default)s)")
    parser.add_argument("--dtype", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    set_gemm_tuning("measured")
    torch.manual_seed(0)
    rows, best = [], []
    for name, shape in shapes_of(args.tp).items():
        samples = measure(shape, args.dtype, args.rounds)
        ratios = {}
        for kernel, values in samples.items():
            us, iqr = spread_of(values)
            ratios[kernel] = ratio_of(samples, kernel, BASELINE).median
            row = {"op": "gemm", "name": name, "shape": list(shape), "dtype": args.dtype, "algorithm": kernel}
            rows.append(row | {"us": us, "iqr_us": iqr, "ratio_gemm": ratios[kernel], "peers": {}})
        del ratios[BASELINE]
        best.append(min(ratios.values()))
        text = "  ".join(f"{kernel} {ratio:.3f}" for kernel, ratio in ratios.items())
        print(f"{name:12s} {shape!s:22s} {spread_of(samples[BASELINE]).median:8.1f} us  {text}", flush=True)
    mean = math.exp(sum(map(math.log, best)) / len(best))
    print(f"tp {args.tp}: geometric mean {mean:.3f}, worst {max(best):.3f}")
    print(write_result("own_gemm" if args.dtype == "bf16" else "own_gemm_fp8", 1, rows, args.out))


if __name__ == "__main__":
    main()
