"""Products to which a matrix is added, on one GPU. Standalone:

torchrun --nproc_per_node 1 -m pytest tests/python/gpu/test_residual.py
"""

import os
import sys

import pytest
import torch

from torch_overlap import gemm as layer
from torch_overlap._gemm import custom_gemm_kernels, run_custom_gemm_kernel
from torch_overlap.gemm import GemmArgs, gemm, gemm_statistics

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "gemm"))
from gemm_cases import E4M3, E5M2, EPILOGUES
from gemm_gpu_cases import OWN_LAYOUTS, TILES, case_of, on_hopper, run_twice, tiles_of

pytestmark = [pytest.mark.gpu(1), pytest.mark.usefixtures("gemm_draws")]

FUSED = ("none", "bias", "gelu", "bias_gelu")
PARTS = ("bias", "gelu", "pre_gelu_out", "gelu_input", "bias_grad")
# Less than a tile, fewer tiles than SMs, several of each kind per block; one to several stages of k.
SIZES = [
    *[(8, 8, 8), (264, 136, 200), (1000, 1032, 520), (130, 2056, 4096), (64, 8192, 2048), (2048, 3584, 1024)],
    *[(4104, 2568, k) for k in (64, 72, 192, 256, 320, 1096)],
]


def rounded_once(*sizes, **options):
    """Our kernels add before they round."""
    return case_of(*sizes, rounds_before_accumulate=False, residual=True, **options)


def between(case, out, residual):
    """Replaces the matrices of the case; the residual's values stay."""
    args = case.args
    residual.copy_(args.residual)
    more = {name: getattr(args, name) for name in PARTS}
    case.args = GemmArgs(args.lhs, args.rhs, out, residual=residual, **more)


def run_all(case):
    """Runs every kernel twice, out of place and in place of the residual: the bits are the same."""
    kernels = custom_gemm_kernels(case.args)
    results = {}
    kept = case.args.residual.clone()
    for kernel in kernels:
        run_twice(case, kernel)
        assert torch.equal(case.args.residual, kept), kernel
        results[kernel] = case.args.out.clone()
    out = torch.empty_like(kept)
    between(case, out, out)
    for kernel, result in results.items():
        out.copy_(kept)
        run_custom_gemm_kernel(case.args, kernel)
        torch.cuda.synchronize()
        assert torch.equal(out, result), kernel
    return kernels


@on_hopper
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", OWN_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_our_own_kernels(dtype, layout, sizes):
    for epilogue in FUSED:
        kernels = run_all(rounded_once(*sizes, dtype=dtype, layout=layout, epilogue=epilogue))
        assert kernels == tiles_of(layout, sizes[0])


@on_hopper
@pytest.mark.parametrize(
    "sizes", [(8, 16, 16), (264, 136, 8208), (2048, 3584, 2048), *[(4104, 2568, k) for k in (128, 144, 512)]], ids=str
)
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=["4x4", "5x4", "4x5"])
@pytest.mark.parametrize("scaling", ["current", "row"])
def test_our_own_kernels_of_8_bits(scaling, types, sizes):
    for out_dtype, epilogue in ((torch.float16, "bias_gelu"), (torch.bfloat16, "none")):
        options = {"dtype": types[0], "rhs_dtype": types[1], "out_dtype": out_dtype, "scaling": scaling}
        assert run_all(rounded_once(*sizes, epilogue=epilogue, **options)) == TILES


@on_hopper
@pytest.mark.parametrize("strides", [(0, 24), (24, 0), (8, 272), (272, 16)], ids=str)
@pytest.mark.parametrize("n", [8, 72, 136, 168, 200, 224, 232, 256, 424])
def test_rows_of_the_residual_are_as_far_apart_as_they_like(n, strides):
    """Nothing is written but the result, and nothing read around the residual: NaN surrounds both."""
    for m in (1, 8, 136, 328):
        case = rounded_once(m, n, 328, dtype=torch.bfloat16, epilogue="bias")
        frames = [torch.full((m + 2, n + gap), float("nan"), dtype=torch.bfloat16, device="cuda") for gap in strides]
        out, residual = (frame[1:-1, gap : gap + n] for frame, gap in zip(frames, strides, strict=True))
        between(case, out, residual)
        kernels = custom_gemm_kernels(case.args)
        assert kernels == TILES
        for kernel in kernels:
            frames[0].fill_(float("nan"))
            run_custom_gemm_kernel(case.args, kernel)
            torch.cuda.synchronize()
            case.check()
            for frame in frames:
                assert frame.isnan().sum() == frame.numel() - m * n, kernel


@on_hopper
@pytest.mark.parametrize("n", [3, 161, 225])
@pytest.mark.parametrize("tuning", ["heuristic", "best"])
def test_rows_that_end_within_16_bytes(tuning, n):
    """TMA would also store the elements after them."""
    layer.set_gemm_tuning(tuning)
    case = case_of(136, n, 200, dtype=torch.bfloat16, residual=True, rounds_product=True)
    frame = torch.full((138, n + 8 + -n % 8), float("nan"), dtype=torch.bfloat16, device="cuda")
    out = frame[1:-1, :n]
    kept = case.args.residual.clone()
    for residual in (kept, out):
        between(case, out, residual)
        assert custom_gemm_kernels(case.args) == []
        for _ in range(2):
            out.copy_(kept)
            gemm(case.args)
            torch.cuda.synchronize()
            case.check()
            assert frame.isnan().sum() == frame.numel() - out.numel()


@on_hopper
def test_rows_of_the_residual_between_those_of_the_result():
    for n in (136, 424):
        case = rounded_once(328, n, 200, dtype=torch.bfloat16)
        rows = torch.empty(328, 2 * n, dtype=torch.bfloat16, device="cuda")
        out, residual = rows[:, n:], rows[:, :n]
        between(case, out, residual)
        kept = residual.clone()
        for kernel in custom_gemm_kernels(case.args):
            out.fill_(float("nan"))
            run_custom_gemm_kernel(case.args, kernel)
            torch.cuda.synchronize()
            case.check()
            assert torch.equal(residual, kept), kernel


@on_hopper
def test_a_residual_that_tensor_copies_do_not_read():
    """The stride of the rows is no multiple of 16 bytes, or they begin at no such multiple."""
    for wide, begin in ((137, 0), (144, 1)):
        case = case_of(264, 136, 200, dtype=torch.bfloat16, residual=True)
        frame = torch.empty(264, wide, dtype=torch.bfloat16, device="cuda")
        between(case, case.args.out, frame[:, begin : begin + 136])
        assert custom_gemm_kernels(case.args) == []
        for tuning in ("heuristic", "best"):
            layer.set_gemm_tuning(tuning)
            case.args.out.fill_(float("nan"))
            gemm(case.args)
            torch.cuda.synchronize()
            case.check()


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("scaling", [None, "current", "row", "mxfp8"])
@pytest.mark.parametrize("tuning", ["heuristic", "measured", "best"])
def test_all_epilogues(tuning, scaling, epilogue):
    """In place too, with new plans and with measured ones: the residual is added once."""
    layer.set_gemm_tuning(tuning)
    dtype = E4M3 if scaling else torch.bfloat16
    options = {"dtype": dtype, "scaling": scaling, "epilogue": epilogue, "residual": True}
    for out_dtype in (torch.bfloat16, torch.float32):
        for _ in range(3):
            case = case_of(520, 264, 640, out_dtype=out_dtype, **options)
            gemm(case.args)
            torch.cuda.synchronize()
            case.check()
            out = torch.empty_like(case.args.out)
            between(case, out, out)
            gemm(case.args)
            torch.cuda.synchronize()
            case.check()


@on_hopper
@pytest.mark.parametrize(
    ("scaling", "sizes"), [(None, (520, 1032, 776)), ("current", (520, 1040, 784)), ("row", (520, 1040, 784))]
)
def test_gelu_and_residual_are_one_kernel(scaling, sizes):
    """The library adds before its GELU: for 16-bit operands the tuning decides."""
    options = {"dtype": E4M3 if scaling else torch.bfloat16, "scaling": scaling, "residual": True}
    for tuning, composed in (("heuristic", 0 if scaling else 1), ("best", 0)):
        layer.set_gemm_tuning(tuning)
        layer.reset_gemm_statistics()
        case = case_of(*sizes, epilogue="bias_gelu", **options)
        gemm(case.args)
        torch.cuda.synchronize()
        case.check()
        assert gemm_statistics()["composed"] == composed, tuning


@on_hopper
def test_a_graph_with_changing_inputs():
    """Replays all kernels 100 times, which add to one matrix one after the other."""
    sizes = (2048, 1024, 1024)
    case = case_of(*sizes, dtype=torch.bfloat16, residual=True)
    out = torch.empty_like(case.args.out)
    between(case, out, out)
    kernels = custom_gemm_kernels(case.args)
    for kernel in kernels:
        run_custom_gemm_kernel(case.args, kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for kernel in kernels:
            run_custom_gemm_kernel(case.args, kernel)
    for _ in range(100):
        other = case_of(*sizes, dtype=torch.bfloat16, residual=True)
        for side in ("lhs", "rhs"):
            getattr(case.args, side).data.copy_(getattr(other.args, side).data)
        out.copy_(other.args.residual)
        graph.replay()
        eager = GemmArgs(other.args.lhs, other.args.rhs, other.args.residual, accumulate=True)
        for kernel in kernels:
            run_custom_gemm_kernel(eager, kernel)
        assert torch.equal(out, other.args.residual)
