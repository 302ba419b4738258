"""Compares our own products for Hopper with cuBLASLt's best, and CUTLASS's, on the shapes of the operators' benchmark.

    python benchmarks/own_gemm.py --tp 4 --dtype bf16 --out results
    python benchmarks/own_gemm.py --tp 4 --dtype bf16 --cutlass cutlass_gemm.so --out results

One GPU. The shapes are those of one of `tp` ranks; weights are [n, k] or, with --weights kn (16 bits), [k, n]; with
--lhs km the other operand is transposed too, as in the gradient of a weight; results are bfloat16; fp8 is e4m3 with one
scale for each operand; --residual adds a matrix like the result. Each variant is captured in a CUDA graph of several
calls on operands that rotate; variants take turns within every round, and a ratio is the median over rounds of the
ratio within one. The baseline is cuBLASLt with `set_gemm_tuning("measured")`, the fastest of its heuristics.
--cutlass adds the kernels of a library made from benchmarks/cpp/cutlass (docs/results.md describes the build). Each
must give cuBLASLt's result in every order in which it can visit the tiles, and is timed in the fastest.
At the end: the geometric mean and the worst over all shapes of the fastest of our kernels, and of CUTLASS's.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from cutlass_kernels import SETTINGS, CutlassKernels, Setting

from torch_overlap._gemm import custom_gemm_kernels, run_custom_gemm_kernel
from torch_overlap._timing import Samples, Stopwatch, in_graph, interleave, ratio_of, spread_of
from torch_overlap.gemm import GemmArgs, GemmOperand, ScalingMode, gemm, set_gemm_tuning
from torch_overlap.tools.bench.cases import GATHERS, SCATTERS, Case
from torch_overlap.tools.bench.ranks import LEAD_CYCLES
from torch_overlap.tools.bench.result import result, write

BASELINE = "cublaslt"
CUTLASS = "cutlass:"
OWN = "own "
CALLS = 6  # minimum calls per sample
TRIALS = 3

Call = Callable[[GemmArgs], object]


def shapes_of(tp: int) -> dict[str, tuple[int, int, int]]:
    """Returns the products of one rank: the columns of the weights, or the summed dimension, are split over the
    ranks."""
    gather = {f"{name} ag": (m, n // tp, k) for name, (m, n, k) in GATHERS.items()}
    return gather | {f"{name} rs": (m, n, k // tp) for name, (m, n, k) in SCATTERS.items()}


def products_of(shape: tuple[int, int, int], dtype: str, lhs: str, weights: str, adds: bool) -> list[GemmArgs]:
    """Returns enough products to exceed the L2 cache together, and at least two."""
    m, n, k = shape
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")

    def random(rows: int, columns: int, transposed: bool) -> GemmOperand:
        data = torch.randn(rows, columns, device="cuda")
        if dtype == "bf16":
            return GemmOperand(data.bfloat16(), transposed)
        factor = torch.rand(1, device="cuda") + 0.5
        return GemmOperand(
            data.to(torch.float8_e4m3fn), transposed, scaling=ScalingMode.CURRENT_TENSOR_SCALING, scale_inv=factor
        )

    def random_lhs() -> GemmOperand:
        return random(m, k, False) if lhs == "mk" else random(k, m, True)

    def random_weights() -> GemmOperand:
        return random(n, k, True) if weights == "nk" else random(k, n, False)

    def random_residual() -> torch.Tensor | None:
        return torch.randn(m, n, device="cuda").bfloat16() if adds else None

    sets = Case("gemm", shape, dtype).sets(1)
    return [GemmArgs(random_lhs(), random_weights(), out, residual=random_residual()) for _ in range(sets)]


def sampler_of(call: Call, products: list[GemmArgs]) -> Callable[[], float]:
    def all_sets() -> None:
        for product in products:
            call(product)

    all_sets()  # makes plans and loads kernels
    turns = -(-CALLS // len(products))
    watch = Stopwatch(torch.device("cuda"), meet=lambda: None, lead_cycles=LEAD_CYCLES)
    return watch.sampler(in_graph(all_sets, turns), calls=turns * len(products))


def check(call: Call, product: GemmArgs, expected: torch.Tensor) -> None:
    """Raises RuntimeError if the result differs from `expected`.

    Both are rounded to bfloat16, and their sums have another order: for 8-bit operands the tensor cores keep about 14
    bits of the accumulator.
    """
    product.out.fill_(float("nan"))
    call(product)
    share = 2.0**-4 if product.lhs.data.element_size() == 1 else 2.0**-8
    if not torch.allclose(product.out.float(), expected, rtol=2.0**-7, atol=share * float(expected.std())):
        raise RuntimeError("expected cuBLASLt's result, got another one")


def best_setting(kernels: CutlassKernels, kernel: str, products: list[GemmArgs], expected: torch.Tensor) -> Setting:
    calls = {str(setting): partial(kernels.run, kernel=kernel, setting=setting) for setting in SETTINGS}
    for call in calls.values():
        check(call, products[0], expected)
    samples = interleave({name: sampler_of(call, products) for name, call in calls.items()}, TRIALS, warmup=1)
    return min(SETTINGS, key=lambda setting: statistics.median(samples[str(setting)]))


def cutlass_settings(kernels: CutlassKernels, products: list[GemmArgs], dtype: str) -> dict[str, Setting]:
    """Returns the fastest setting of each kernel that gives cuBLASLt's result; prints the kernels that do not."""
    gemm(products[0])
    expected = products[0].out.float()
    settings = {}
    for kernel in kernels.names(dtype):
        try:
            settings[kernel] = best_setting(kernels, kernel, products, expected)
        except RuntimeError as error:
            print(f"{CUTLASS}{kernel} is left out: {error}", flush=True)
    return settings


def measure(products: list[GemmArgs], rounds: int, others: dict[str, Call]) -> Samples:
    """Returns microseconds of a call, by variant."""
    variants: dict[str, Call] = {BASELINE: gemm}
    variants |= {kernel: partial(run_custom_gemm_kernel, kernel=kernel) for kernel in custom_gemm_kernels(products[0])}
    variants |= others
    return interleave({name: sampler_of(call, products) for name, call in variants.items()}, rounds)


def quickest(ratios: dict[str, float]) -> dict[str, float]:
    """Returns the least ratio of ours, of CUTLASS's if there are any, and of both."""
    ours = [ratio for kernel, ratio in ratios.items() if not kernel.startswith(CUTLASS)]
    theirs = [ratio for kernel, ratio in ratios.items() if kernel.startswith(CUTLASS)]
    return {"ours": min(ours)} | ({"cutlass": min(theirs), "both": min(ours + theirs)} if theirs else {})


def summary(best: dict[str, list[float]]) -> str:
    """Returns the geometric mean and the worst ratio, by owner of the kernels."""
    return "; ".join(
        f"{whose}: geometric mean {statistics.geometric_mean(ratios):.3f}, worst {max(ratios):.3f}"
        for whose, ratios in best.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=4, help="the ranks that share a layer (default: %(default)s)")
    parser.add_argument("--dtype", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--weights", choices=["nk", "kn"], default="nk")
    parser.add_argument("--lhs", choices=["mk", "km"], default="mk")
    parser.add_argument("--residual", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cutlass", type=Path, help="a library of CUTLASS's kernels")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    if args.cutlass and (args.residual or args.weights != "nk"):
        parser.error("CUTLASS's kernels are compiled for weights [n, k] and without a residual: leave out --cutlass")
    if args.dtype == "fp8" and args.weights != "nk":
        parser.error("expected weights [n, k] of 8 bits, got --weights kn: give --dtype bf16")
    if args.lhs == "km" and args.weights != "kn":
        parser.error("expected weights [k, n] with --lhs km, got --weights nk: give --weights kn")
    kernels = CutlassKernels(args.cutlass) if args.cutlass else None
    set_gemm_tuning("measured")
    torch.manual_seed(0)
    rows, best = [], defaultdict(list)
    for name, shape in shapes_of(args.tp).items():
        products = products_of(shape, args.dtype, args.lhs, args.weights, args.residual)
        settings = cutlass_settings(kernels, products, args.dtype) if kernels else {}
        others = {
            CUTLASS + kernel: partial(kernels.run, kernel=kernel, setting=setting)
            for kernel, setting in settings.items()
        }
        samples = measure(products, args.rounds, others)
        ratios = {}
        for kernel, values in samples.items():
            us, iqr = spread_of(values)
            ratios[kernel] = ratio_of(samples, kernel, BASELINE).median
            is_own = kernel != BASELINE and not kernel.startswith(CUTLASS)
            row = {
                "op": "gemm",
                "name": name,
                "shape": list(shape),
                "dtype": args.dtype,
                "tp": args.tp,
                "lhs": args.lhs,
                "weights": args.weights,
                "residual": args.residual,
                "mode": "graph",
            }
            row |= {"algorithm": OWN * is_own + kernel, "us": us, "iqr_us": iqr}
            row |= {"gemm_us": spread_of(samples[BASELINE]).median, "ratio_gemm": ratios[kernel], "peers": {}}
            setting = settings.get(kernel.removeprefix(CUTLASS))
            rows.append(row | (setting._asdict() if setting else {}))
        del ratios[BASELINE]
        for whose, ratio in quickest(ratios).items():
            best[whose].append(ratio)
        text = "  ".join(f"{kernel} {ratio:.3f}" for kernel, ratio in ratios.items())
        print(f"{name:12s} {shape!s:22s} {spread_of(samples[BASELINE]).median:8.1f} us  {text}", flush=True)
    print(f"tp {args.tp}: {summary(best)}")
    parts = {"fp8": args.dtype == "fp8", "km": args.lhs == "km", "kn": args.weights == "kn", "residual": args.residual}
    name = "_".join(["own_gemm", *(part for part, is_so in parts.items() if is_so)])
    versions = {"cutlass": kernels.version} if kernels else {}
    print(write(result(name, rows, **versions), 1, args.out))


if __name__ == "__main__":
    main()
