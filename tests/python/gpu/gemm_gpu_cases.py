"""Products on a GPU: gemm_cases.py with the tolerances of its arithmetic."""

import pytest
import torch
from gemm_cases import make_case

from torch_overlap._gemm import run_custom_gemm_kernel

TILES = ["128x256", "128x224", "128x192", "128x128", "64x256"]  # tiles of our own kernels
OWN_LAYOUTS = ["NN", "NT", "TN"]  # layouts that they support, for 16-bit operands


def tiles_of(layout, m):
    """Returns the tiles for 16-bit operands without gaps between their rows. TMA needs rows that begin at multiples
    of 16 bytes: rows of a transposed lhs have m elements; all other sizes are such multiples."""
    return TILES if layout in OWN_LAYOUTS and (layout != "TN" or m % 8 == 0) else []


GELU_ERROR = 2.0**-7  # the fused epilogues use the hardware's tanh
# Errors in addition to float32 sums, relative to the sum of |lhs||rhs|:
TRUNCATED = 2.0**-20  # tensor cores do not round to nearest
FAST_SUMS = 2.0**-10  # 8-bit operands: Hopper keeps about 14 bits of partial sums
DEQUANTIZED = 2.0**-7  # operands rounded to bfloat16
ROUNDED_SUMS = 2.0**-8  # a bias gradient may be the sum of 16-bit results


def capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or capability()[0] != 9, reason="our own kernels are for sm_90"
)


def case_of(*sizes, **options):
    options = {
        "device": f"cuda:{torch.cuda.current_device()}",
        "gelu_error": GELU_ERROR,
        "sum_error": ROUNDED_SUMS,
        "rounds_before_accumulate": True,  # kernels for Hopper do this
        **options,
    }
    scaling = options.get("scaling")
    if scaling:
        if capability() < (8, 9):
            pytest.skip("8-bit operands need sm_89")
        exact = scaling == "mxfp8" and capability()[0] == 9  # multiplied in bfloat16
        rounded = scaling.startswith("block") and capability()[0] != 9
        options.setdefault("product_error", TRUNCATED if exact else DEQUANTIZED if rounded else FAST_SUMS)
    elif options.get("dtype") != torch.float64:
        options.setdefault("product_error", TRUNCATED)
    return make_case(*sizes, **options)


def run_twice(case, kernel):
    """Runs one of our own kernels twice: the second run finds the state that the first one left."""
    for _ in range(2):
        case.args.out.fill_(float("nan"))
        run_custom_gemm_kernel(case.args, kernel)
    torch.cuda.synchronize()
    case.check()
