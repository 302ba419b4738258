"""Products to which a matrix is added, on one GPU. By itself:

torchrun --nproc_per_node 1 -m pytest tests/python/gpu/test_residual.py
"""

import os
import sys

import pytest
import torch

from torch_overlap import gemm as layer
from torch_overlap._gemm import own_gemm_kernels, run_own_gemm_kernel
from torch_overlap.gemm import GemmArgs, gemm, gemm_statistics

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "gemm"))
from gemm_cases import E4M3, E5M2, EPILOGUES
from gemm_gpu_cases import capability, case_of

pytestmark = pytest.mark.gpu(1)
on_hopper = pytest.mark.skipif(not torch.cuda.is_available() or capability()[0] != 9, reason="kernels for sm_90")

FUSED = ("none", "bias", "gelu", "bias_gelu")
PARTS = ("bias", "gelu", "pre_gelu_out", "gelu_input", "bias_grad")
# Fewer tiles than SMs, waves and parts of waves; one to several stages of k.
SIZES = [
    *[(8, 8, 8), (264, 136, 200), (1000, 1032, 520), (130, 2056, 4096), (64, 8192, 2048), (2048, 3584, 1024)],
    *[(4104, 2568, k) for k in (64, 72, 192, 1096)],
]


@pytest.fixture(autouse=True)
def draws(seed):
    torch.manual_seed(seed)
    layer.reset_gemm_statistics()
    yield
    layer.set_gemm_tuning("heuristic")


def rounded_once(*sizes, **options):
    """Our kernels add before they round."""
    return case_of(*sizes, rounds_before_accumulate=False, **options)


def in_place(case):
    """The same with the residual where the result comes, and a copy of the residual."""
    args = case.args
    more = {name: getattr(args, name) for name in PARTS}
    out = args.residual.clone()
    case.args = GemmArgs(args.lhs, args.rhs, out, residual=out, **more)
    return args.residual


def run_all(case):
    """Every kernel twice, apart from the residual and in its place: the same bits."""
    kernels = own_gemm_kernels(case.args)
    results = {}
    for kernel in kernels:
        for _ in range(2):
            case.args.out.fill_(float("nan"))
            run_own_gemm_kernel(case.args, kernel)
        torch.cuda.synchronize()
        case.check()
        results[kernel] = case.args.out.clone()
    residual = in_place(case)
    for kernel, result in results.items():
        case.args.out.copy_(residual)
        run_own_gemm_kernel(case.args, kernel)
        torch.cuda.synchronize()
        case.check()
        assert torch.equal(case.args.out, result), kernel
    return kernels


@on_hopper
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_our_own_kernels(dtype, layout, sizes):
    for epilogue in FUSED:
        kernels = run_all(rounded_once(*sizes, dtype=dtype, layout=layout, epilogue=epilogue, residual=True))
        assert kernels[:2] == ["128x256", "128x128"]
    run_all(rounded_once(*sizes, dtype=dtype, layout=layout, residual=True, padded=True))


@on_hopper
@pytest.mark.parametrize("sizes", [(8, 16, 16), (264, 136, 8208), (2048, 3584, 2048), (4104, 2568, 144)], ids=str)
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3)], ids=["4x4", "5x4"])
@pytest.mark.parametrize("scaling", ["current", "row"])
def test_our_own_kernels_of_8_bits(scaling, types, sizes):
    for out_dtype, epilogue in ((torch.float16, "bias_gelu"), (torch.bfloat16, "none")):
        options = {"dtype": types[0], "rhs_dtype": types[1], "out_dtype": out_dtype, "scaling": scaling}
        assert run_all(rounded_once(*sizes, epilogue=epilogue, residual=True, **options))


@on_hopper
@pytest.mark.parametrize("sms", [2, 50, 131])
def test_fewer_sms(sms):
    for sizes in [(2048, 3584, 512), (520, 1032, 4096)]:
        run_all(rounded_once(*sizes, dtype=torch.bfloat16, epilogue="bias", residual=True, sm_target=sms))


@on_hopper
def test_a_residual_that_tensor_copies_do_not_read():
    case = case_of(264, 136, 200, dtype=torch.bfloat16, residual=True)
    wide = torch.empty(264, 137, dtype=torch.bfloat16, device="cuda")
    wide[:, 1:].copy_(case.args.residual)
    case.args = GemmArgs(case.args.lhs, case.args.rhs, case.args.out, residual=wide[:, 1:])
    assert own_gemm_kernels(case.args) == []
    gemm(case.args)
    case.check()


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("scaling", [None, "current", "row", "mxfp8"])
@pytest.mark.parametrize("tuning", ["heuristic", "best"])
def test_all_epilogues(tuning, scaling, epilogue):
    """In place too, in new plans and in those that were measured: the residual is added once."""
    layer.set_gemm_tuning(tuning)
    for out_dtype in (torch.bfloat16, torch.float32):
        dtype = E4M3 if scaling else torch.bfloat16
        for _ in range(3):
            case = case_of(
                520, 264, 640, dtype=dtype, scaling=scaling, out_dtype=out_dtype, epilogue=epilogue, residual=True
            )
            gemm(case.args)
            case.check()
            in_place(case)
            gemm(case.args)
            case.check()


@on_hopper
def test_gelu_and_residual_are_one_kernel_in_the_best_tuning():
    """The library adds before its GELU."""
    for tuning, composed in (("heuristic", 1), ("best", 0)):
        layer.set_gemm_tuning(tuning)
        layer.reset_gemm_statistics()
        case = case_of(520, 1032, 776, dtype=torch.bfloat16, epilogue="bias_gelu", residual=True)
        gemm(case.args)
        case.check()
        assert gemm_statistics()["composed"] == composed, tuning


@on_hopper
def test_a_graph_with_changing_inputs():
    """100 replays that add to one matrix, by kernels that share tiles and ones that do not."""
    sizes = (2048, 1024, 1024)
    case = rounded_once(*sizes, dtype=torch.bfloat16, residual=True)
    kernels = own_gemm_kernels(case.args)
    in_place(case)
    for kernel in kernels:
        run_own_gemm_kernel(case.args, kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for kernel in kernels:
            run_own_gemm_kernel(case.args, kernel)
    for _ in range(100):
        other = rounded_once(*sizes, dtype=torch.bfloat16, residual=True)
        for side in ("lhs", "rhs"):
            getattr(case.args, side).data.copy_(getattr(other.args, side).data)
        case.args.out.copy_(other.args.residual)
        graph.replay()
        result = case.args.out.clone()
        eager = GemmArgs(other.args.lhs, other.args.rhs, other.args.residual, accumulate=True)
        for kernel in kernels:
            run_own_gemm_kernel(eager, kernel)
        assert torch.equal(result, other.args.residual)
