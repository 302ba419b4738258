"""Measures the host time of one product with a plan, compared with torch's own products on the same operands.

    python benchmarks/gemm_host.py --out results
    python benchmarks/gemm_host.py --out results --loops <build>/benchmarks/cpp/libtorch_overlap_loops.so

A sample is the host time of 100 consecutive calls, divided by 100, followed by a synchronization.
All variants take turns within every round. The products are so small that the device keeps up.
`prepared` calls gemm() again with one GemmArgs; `built` makes GemmArgs and operands for each call.
The timed part makes no plan and no query of cuBLASLt, which the program checks.
`own` runs one of our Hopper kernels, including its selection from all kernels on each call. With --loops it measures a
tensor map, of which such a kernel needs three or four, and a fused operator two or three plus one per rank; for one
matrix repeatedly, and for 65536 in rotation.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from host_time import host_sampler

from torch_overlap._gemm import custom_gemm_kernels, run_custom_gemm_kernel
from torch_overlap._timing import interleave, ratio_of, spread_of
from torch_overlap.gemm import GemmArgs, GemmOperand, ScalingMode, gemm, gemm_statistics, set_gemm_tuning
from torch_overlap.tools.bench.result import write_result

CALLS = 100
SIZE = 256
MAPS = 1 << 16
Variants = dict[str, Callable[[], object]]


def plain(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> dict[str, Variants]:
    out = torch.empty(SIZE, SIZE, dtype=x.dtype, device=x.device)

    def build(**epilogue: torch.Tensor) -> GemmArgs:
        return GemmArgs(GemmOperand(x), GemmOperand(w, True), out, **epilogue)

    product, with_bias = build(), build(bias=bias)
    kernels = custom_gemm_kernels(product)
    own: Variants = {"own": partial(run_custom_gemm_kernel, product, kernels[0])} if kernels else {}
    return {
        "bf16 x w^T": own
        | {
            "prepared": lambda: gemm(product),
            "built": lambda: gemm(build()),
            "torch.mm": lambda: torch.mm(x, w.t(), out=out),
        },
        "bf16 x w^T + bias": {
            "prepared": lambda: gemm(with_bias),
            "built": lambda: gemm(build(bias=bias)),
            "torch.addmm": lambda: torch.addmm(bias, x, w.t(), out=out),
        },
    }


def scaled(x: torch.Tensor, w: torch.Tensor) -> dict[str, Variants]:
    out = torch.empty(SIZE, SIZE, dtype=torch.bfloat16, device=x.device)
    one = torch.ones(1, device=x.device)
    lhs, rhs = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    mode = ScalingMode.CURRENT_TENSOR_SCALING

    def build() -> GemmArgs:
        operands = GemmOperand(lhs, scaling=mode, scale_inv=one), GemmOperand(rhs, True, scaling=mode, scale_inv=one)
        return GemmArgs(*operands, out)

    product = build()
    return {
        "e4m3 x w^T": {
            "prepared": lambda: gemm(product),
            "built": lambda: gemm(build()),
            "torch._scaled_mm": lambda: torch._scaled_mm(
                lhs, rhs.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True, out=out
            ),
        }
    }


def tensor_maps(library: Path, x: torch.Tensor) -> dict[str, Callable[[], float]]:
    """Returns samplers of one tensor map, found in the cache and encoded."""
    loop = ctypes.CDLL(str(library)).tensor_map_loop
    loop.restype = ctypes.c_double
    loop.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]

    def sample(matrices: int) -> float:
        return float(loop(x.data_ptr(), matrices, MAPS)) * 1e6 / MAPS

    return {"of one matrix": partial(sample, 1), "of others each time": partial(sample, MAPS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--loops", type=Path, help="libtorch_overlap_loops.so; without it no tensor maps")
    args = parser.parse_args()

    set_gemm_tuning("heuristic")
    x, w = (torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    bias = torch.randn(SIZE, dtype=torch.bfloat16, device="cuda")
    problems = plain(x, w, bias)
    if torch.cuda.get_device_capability() >= (8, 9):
        problems |= scaled(x, w)

    samplers = {}
    for problem, variants in problems.items():
        for call in variants.values():
            call()  # makes plans, handles and kernels
        samplers[problem] = {name: host_sampler(call, CALLS) for name, call in variants.items()}
    if args.loops:
        samplers["tensor map"] = tensor_maps(args.loops.resolve(), x)
    rows = []
    for problem, of_problem in samplers.items():
        before = gemm_statistics()
        samples = interleave(of_problem, args.rounds, warmup=10)
        after = gemm_statistics()
        assert (before["plans"], before["queries"]) == (after["plans"], after["queries"]), (before, after)
        for name, values in samples.items():
            us, iqr = spread_of(values)
            peers = {other: ratio_of(samples, name, other)[0] for other in samples if other != name}
            rows.append({"what": f"{problem}, {name}", "us": us, "iqr_us": iqr, "ratio_to": peers})
            text = "  ".join(f"{value:.2f}x {other}" for other, value in peers.items())
            print(f"{problem:20s} {name:20s} {us:7.3f} us (iqr {iqr:.3f})   {text}", flush=True)
    print(write_result("gemm_host", 1, rows, args.out))


if __name__ == "__main__":
    main()
