"""Measures the fused kernels without communication: the cost of their structure, and thus of waits and links.

    python benchmarks/fused_alone.py --tp 4 --library <build>/benchmarks/cpp/libtorch_overlap_fused_alone.so

    python benchmarks/fused_alone.py --check --library ...

One GPU, one process, no other rank: the library is made by the target torch_overlap_benchmarks. The kernels and
their launches are those of `algorithm="fused"`, in a channel whose flags are all set and whose memory, including that
of the other ranks, is on this device. Shapes are those of one of `tp` ranks of the operators' benchmark.

    gather                  all-gather and product: the rows of all chunks have arrived
    gather, one chunk       the same kernel with all rows as its own
    scatter                 product and reduce-scatter: tiles are stored to local memory, paced as for a link, and those
                            of the other ranks, which have arrived, are added
    scatter, no sums        tiles of all rows are stored in the same way, and none is added
    scatter, one rank       neither: the product by the same kernel
    sums, one rank          the kernel after products of pieces that copy engines send: the product of one rank's rows,
                            a `tp`-th of all, and those of the other ranks, which have arrived, are added

The comparison is with cuBLASLt with `set_gemm_tuning("measured")`, the baseline, and our plain product by each of its
tiles. Results are checked against torch's before anything is timed. Each variant is captured in a CUDA graph of several
calls on operands that rotate beyond the L2 cache; variants take turns within every round, and a ratio is the median
over rounds of the ratio within one: `ratio_gemm` to cuBLASLt, `ratio_own` to the fastest tile of our plain product.

--check measures nothing: it compares every element of "sums, one rank" of 2 to 7 ranks, for odd sizes, few and many
stages of k, and one scale or one per row, with fp64. Two GPUs test the sum of one other rank only.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from own_gemm import BASELINE, OWN, check, products_of, sampler_of, shapes_of

from torch_overlap._gemm import custom_gemm_kernels, run_custom_gemm_kernel
from torch_overlap._timing import Samples, interleave, ratio_of, spread_of
from torch_overlap.gemm import GemmArgs, gemm, set_gemm_tuning
from torch_overlap.tools.bench.result import result, write

MAX_RANKS = 8  # maximum of a fused kernel
OUT_BYTES = 2  # bytes of an output element
PIECES = 2  # number of pieces in which the rows of the other ranks have arrived


@dataclass(frozen=True)
class Variant:
    run: Callable[[GemmArgs], object]
    # Raises RuntimeError if the result of run() differs from the product in fp32.
    check: Callable[[GemmArgs, torch.Tensor], None]


def operands(product: GemmArgs) -> tuple[torch.Tensor, torch.Tensor]:
    return product.lhs.data, product.rhs.data


def scales(product: GemmArgs) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return product.lhs.scale_inv, product.rhs.scale_inv


def product_of(product: GemmArgs) -> torch.Tensor:
    """Computes the product by torch, in fp32."""
    x, w = (data.float() for data in operands(product))
    factors = [scale for scale in scales(product) if scale is not None]
    whole = x @ w.t()
    for factor in factors:
        whole *= factor
    return whole


def close(got: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    """Raises RuntimeError if the results differ. `share`: tolerance for another order of sums, relative to the standard
    deviation of `expected`."""
    if not torch.allclose(got.float(), expected, rtol=2.0**-6, atol=share * float(expected.std())):
        raise RuntimeError("expected torch's result, got another one")


def tolerance_of(product: GemmArgs) -> float:
    return 2.0**-4 if product.lhs.data.element_size() == 1 else 2.0**-7


def gather(ranks: Any, product: GemmArgs) -> None:
    ranks.gather(*operands(product), product.out, *scales(product))


class Scatter:
    """`sums`: this rank has the first chunk; otherwise it is an additional rank, which has none."""

    def __init__(self, library: Any, shape: tuple[int, int, int], tp: int, sums: bool) -> None:
        m, n, _ = shape
        self.size, self.rank, self.rows = tp + (not sums), 0 if sums else tp, m // tp
        self.ranks = library.Rank(self.size, self.rank, self.size * self.rows * n * OUT_BYTES)
        self.out = torch.empty(self.rows * sums, n, dtype=torch.bfloat16, device="cuda")
        self.like = torch.empty(self.rows, n, dtype=torch.bfloat16, device="meta")

    def run(self, product: GemmArgs) -> None:
        self.ranks.scatter(*operands(product), self.out, self.rows, 0, *scales(product))

    def run_own(self, product: GemmArgs) -> None:
        self.ranks.scatter(*operands(product), self.out, self.rows, PIECES, *scales(product))

    def check(self, product: GemmArgs, expected: torch.Tensor) -> None:
        chunks = expected.split(self.rows)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sent = [self.ranks.tiles(rank, self.rank, self.like) for rank in others]
        for part in sent:
            part.fill_(float("nan"))
        self.check_own(self.run, product, expected)
        for rank, part in zip(others, sent, strict=True):
            close(part, chunks[rank], tolerance_of(product))

    def check_own(self, run: Callable[[GemmArgs], object], product: GemmArgs, expected: torch.Tensor) -> None:
        received = [self.ranks.tiles(self.rank, rank, self.like) for rank in range(self.size) if rank != self.rank]
        for part in received:
            part.copy_(torch.randn(part.shape, device="cuda") * float(expected.std()))
        self.out.fill_(float("nan"))
        run(product)
        if len(self.out) > 0:
            own = expected.split(self.rows)[self.rank]
            close(self.out, sum((part.float() for part in received), own), tolerance_of(product))


def one_rank(ranks: Any, product: GemmArgs) -> None:
    ranks.scatter(*operands(product), product.out, product.out.shape[0], 0, *scales(product))


def fused_variants(library: Any, name: str, shape: tuple[int, int, int], tp: int) -> dict[str, Variant]:
    """Returns the variants of a shape of `shapes_of`, by its name."""

    def whole(run: Callable[[GemmArgs], object]) -> Variant:
        return Variant(run, partial(check, run))

    alone = library.Rank(1, 0, 0)
    if name.endswith(" ag"):
        return {
            "gather": whole(partial(gather, library.Rank(tp, 0, 0))),
            "gather, one chunk": whole(partial(gather, alone)),
        }
    summed, unsummed = (Scatter(library, shape, tp, sums) for sums in (True, False))
    return {
        "scatter": Variant(summed.run, summed.check),
        "scatter, no sums": Variant(unsummed.run, unsummed.check),
        "scatter, one rank": whole(partial(one_rank, alone)),
        "sums, one rank": Variant(summed.run_own, partial(summed.check_own, summed.run_own)),
    }


def measure(library: Any, name: str, products: Sequence[GemmArgs], tp: int, rounds: int) -> Samples:
    """Returns microseconds of a call, by variant. Raises RuntimeError if a variant's result differs from torch's."""
    product = products[0]
    m, n = product.out.shape
    variants = fused_variants(library, name, (m, n, product.lhs.data.shape[1]), tp)
    expected = product_of(product)
    calls: dict[str, Callable[[GemmArgs], object]] = {BASELINE: gemm}
    calls |= {OWN + kernel: partial(run_custom_gemm_kernel, kernel=kernel) for kernel in custom_gemm_kernels(product)}
    for call in calls.values():
        check(call, product, expected)
    for variant in variants.values():
        variant.check(product, expected)
    calls |= {kind: variant.run for kind, variant in variants.items()}
    return interleave({kind: sampler_of(call, list(products)) for kind, call in calls.items()}, rounds)


def check_sums(library: Any, size: int, shape: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    """Checks the sums of `shape`: the rows of each rank, n, k. `kind`: "16 bits", or the scales of 8-bit operands:
    "tensor", "rows"."""
    rows, n, k = shape
    x, w = (torch.randn(count, k, device="cuda") * 0.5 for count in (size * rows, n))
    x, w = (data.to(dtype if kind == "16 bits" else torch.float8_e4m3fn) for data in (x, w))
    scales = None, None
    own = x[:rows].double() @ w.double().t()
    spread = own.std()
    if kind != "16 bits":
        scales = tuple(torch.rand(1 if kind == "tensor" else len(data), device="cuda") - 0.5 for data in (x, w))
        factors = (scales[0] if kind == "tensor" else scales[0][:rows, None]).double() * scales[1].double()
        own, spread = own * factors, spread * factors.abs()
    scatter = Scatter(library, (size * rows, n, k), size, True)
    out = torch.full((rows, n), float("nan"), dtype=dtype, device="cuda")
    like = torch.empty(rows, n, dtype=dtype, device="meta")
    total = own.clone()
    for rank in range(1, size):
        received = scatter.ranks.tiles(0, rank, like)
        total += received.copy_(torch.randn(rows, n, device="cuda") * float(own.std())).double()
    scatter.ranks.scatter(x, w, out, rows, PIECES, *scales)
    info = torch.finfo(dtype)
    # One rounding, also of subnormal results, plus sums in fp32 in another order.
    bound = info.eps / 2 * (total.abs() * 1.01 + info.smallest_normal) + 2.0**-20 * own.std()
    # For 8-bit operands the tensor cores keep about 14 bits of the accumulator.
    bound += (2.0**-11 if kind == "16 bits" else 2.0**-5) * spread
    wrong = int((~((out.double() - total).abs() <= bound)).sum())
    if wrong:
        raise RuntimeError(f"{size} ranks, {shape}, {kind}, {dtype}: expected the sum, got {wrong} other elements")


# The rows of a rank, n and k: several tiles of 128 x 256, and of 128 x 128, for each block.
MANY_TILES = [(1000, 8192, 2048), (128, 20_000, 2048)]


def check_all(library: Any) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}", flush=True)
    torch.manual_seed(seed)
    choose, cases = random.Random(seed), 0
    for size in range(2, MAX_RANKS):
        for kind in ("16 bits", "tensor", "rows"):
            for dtype in (torch.bfloat16, torch.float16):
                small = [
                    (choose.choice([128, 130, 257, 384]), choose.choice([136, 256, 264, 1032, 4096]), k)
                    for k in (16, 48, 128, 192, 256, 320, 448, 640, 1024)
                ]
                for shape in small + MANY_TILES:
                    check_sums(library, size, shape, kind, dtype)
                    cases += 1
    print(f"{cases} sums are right")


def rows_of(name: str, shape: tuple[int, int, int], dtype: str, tp: int, samples: Samples) -> list[dict[str, Any]]:
    """Returns a row for each variant of one rank's product, with its time relative to the library's and our fastest
    tile."""
    medians = {kind: spread_of(values).median for kind, values in samples.items()}
    own = min((kind for kind in samples if kind.startswith(OWN)), key=medians.__getitem__)
    rows = []
    for kind, values in samples.items():
        us, iqr = spread_of(values)
        to_gemm, to_own = ratio_of(samples, kind, BASELINE), ratio_of(samples, kind, own)
        row = {"op": "gemm", "name": name, "shape": list(shape), "dtype": dtype, "tp": tp, "mode": "graph"}
        row |= {"algorithm": kind, "us": us, "iqr_us": iqr, "gemm_us": medians[BASELINE]}
        row |= {"ratio_gemm": to_gemm.median, "iqr_ratio_gemm": to_gemm.iqr}
        row |= {"own": own, "own_us": medians[own], "ratio_own": to_own.median, "iqr_ratio_own": to_own.iqr}
        rows.append(row | {"peers": {}})
    return rows


def line_of(rows: Sequence[dict[str, Any]]) -> str:
    first = rows[0]
    parts = [f"{first['name']:12s} {first['dtype']} {first['shape']!s:22s} {first['gemm_us']:8.1f} us"]
    parts.append(f"{first['own']} {first['own_us'] / first['gemm_us']:.3f}")
    fused = [row for row in rows if row["algorithm"] != BASELINE and not row["algorithm"].startswith(OWN)]
    parts += [f"{row['algorithm']} {row['ratio_gemm']:.3f} ({row['ratio_own']:.3f} of ours)" for row in fused]
    return "  ".join(parts)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True, help="libtorch_overlap_fused_alone.so")
    parser.add_argument("--tp", type=int, default=4, help="the ranks that share a layer (default: %(default)s)")
    parser.add_argument("--dtype", nargs="+", choices=["bf16", "fp8"], default=["bf16", "fp8"])
    parser.add_argument("--only", nargs="+", metavar="NAME", help='shapes, such as "small-up ag" (default: all)')
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--check", action="store_true", help="compares sums with fp64, and measures nothing")
    args = parser.parse_args(arguments)
    if not 2 <= args.tp < MAX_RANKS:  # one more rank participates if nothing is added
        parser.error(f"expected --tp from 2 to {MAX_RANKS - 1}, got {args.tp}")
    if args.rounds < 1:
        parser.error(f"expected --rounds of 1 or more, got {args.rounds}")
    unknown = sorted(set(args.only or []) - set(shapes_of(args.tp)))
    if unknown:
        parser.error(f"expected --only to name shapes of {', '.join(shapes_of(args.tp))}, got {', '.join(unknown)}")
    if not args.library.is_file():
        parser.error(f"expected a library in --library, got {args.library}; build the target torch_overlap_benchmarks")
    if not torch.cuda.is_available():
        parser.error("expected a GPU of compute capability 9.0, got none")
    if torch.cuda.get_device_capability()[0] != 9:
        parser.error(f"expected a GPU of compute capability 9.0, got {torch.cuda.get_device_name()}")
    return args


def main() -> None:
    args = parse()
    torch.classes.load_library(str(args.library.resolve()))
    library = torch.classes.fused_alone
    set_gemm_tuning("measured")
    torch.manual_seed(0)
    if args.check:
        check_all(library)
        return
    rows = []
    for dtype in args.dtype:
        for name, shape in shapes_of(args.tp).items():
            if args.only and name not in args.only:
                continue
            samples = measure(library, name, products_of(shape, dtype, "mk", "nk", False), args.tp, args.rounds)
            rows += rows_of(name, shape, dtype, args.tp, samples)
            print(line_of(rows[-len(samples) :]), flush=True)
    print(write(result("fused_alone", rows), args.tp, args.out))


if __name__ == "__main__":
    main()
