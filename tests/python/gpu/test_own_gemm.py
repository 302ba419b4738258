"""Our own products for Hopper on one GPU: every kernel, nothing written outside of the result. Standalone:

torchrun --nproc_per_node 1 -m pytest tests/python/gpu/test_own_gemm.py
"""

import os
import subprocess
import sys
from itertools import product

import pytest
import torch

import torch_overlap as to
from torch_overlap import gemm as layer
from torch_overlap._gemm import custom_gemm_kernels, run_custom_gemm_kernel
from torch_overlap.gemm import GemmArgs, GemmOperand, gemm, gemm_statistics

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "gemm"))
from gemm_cases import E4M3, E5M2, EPILOGUES, LAYOUTS
from gemm_gpu_cases import OWN_LAYOUTS, TILES, capability, case_of, on_hopper, run_twice, tiles_of

pytestmark = [pytest.mark.gpu(1), pytest.mark.usefixtures("gemm_draws")]


@on_hopper
@pytest.mark.parametrize(
    "sizes",
    [
        *[(8, 8, 8), (264, 136, 200), (1000, 1032, 520), (130, 2056, 4096), (64, 8192, 2048)],
        # Several tiles of each kind per block, with one to five and more stages of k.
        *[(4104, 2568, k) for k in (64, 72, 192, 256, 320, 1096)],
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_our_own_kernels(dtype, layout, sizes):
    """Runs each tile with every epilogue that the kernels support."""
    fused = ("none", "bias", "gelu", "bias_gelu")
    for epilogue in EPILOGUES:
        if "bgrad" in epilogue:
            continue  # the caller's part
        case = case_of(*sizes, dtype=dtype, layout=layout, epilogue=epilogue)
        kernels = custom_gemm_kernels(case.args)
        assert kernels == (tiles_of(layout, sizes[0]) if epilogue in fused else [])
        for kernel in kernels:
            run_twice(case, kernel)


def in_wider_rows(matrix):
    """Returns the same matrix in rows that begin at multiples of 16 bytes, with NaN after each row."""
    rows, columns = matrix.shape
    wide = torch.full((rows, columns + 8 + -columns % 8), float("nan"), dtype=matrix.dtype, device="cuda")
    wide[:, :columns] = matrix
    return wide[:, :columns]


def check_in_a_frame(case, kernels):
    """Runs each kernel, or gemm() if there is none, into a part of a larger matrix, whose rest stays unchanged."""
    args = case.args
    m, n = args.out.shape
    frame = torch.empty(m + 32, n + 272 + -n % 8, dtype=args.out.dtype, device="cuda")
    out = frame[16 : 16 + m, 16 : 16 + n]
    case.args = GemmArgs(args.lhs, args.rhs, out, bias=args.bias, gelu=args.gelu)
    assert custom_gemm_kernels(case.args) == kernels
    for kernel in kernels or [None]:
        frame.fill_(float("nan"))
        if kernel:
            run_custom_gemm_kernel(case.args, kernel)
        else:
            gemm(case.args)
        torch.cuda.synchronize()
        case.check()
        assert frame.isnan().sum() == frame.numel() - m * n, kernel


@on_hopper
@pytest.mark.parametrize("n", [8, 56, 72, 136, 160, 168, 192, 200, 216, 224, 232, 384, 424, 448, 456])
@pytest.mark.parametrize("layout", OWN_LAYOUTS)
def test_our_own_kernels_write_nothing_beside_the_result(layout, n):
    """Tiles are cut off at every kind of column."""
    for m in (8, 136, 328):
        for epilogue in ("none", "bias_gelu"):
            check_in_a_frame(case_of(m, n, 328, dtype=torch.bfloat16, layout=layout, epilogue=epilogue), TILES)


def with_wider_operands(case):
    lhs, rhs = (GemmOperand(in_wider_rows(x.data), x.transposed) for x in (case.args.lhs, case.args.rhs))
    case.args = GemmArgs(lhs, rhs, case.args.out, bias=case.args.bias, gelu=case.args.gelu)
    return case


@on_hopper
@pytest.mark.parametrize("sizes", [(2, 8, 5), (65, 56, 65), (129, 168, 127), (131, 232, 191), (300, 456, 333)], ids=str)
@pytest.mark.parametrize("layout", OWN_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_our_own_kernels_of_odd_sizes(dtype, layout, sizes):
    """Rows begin at multiples of 16 bytes, those of operands end anywhere; memory after them is not read."""
    for epilogue in ("none", "bias_gelu"):
        check_in_a_frame(with_wider_operands(case_of(*sizes, dtype=dtype, layout=layout, epilogue=epilogue)), TILES)


@on_hopper
@pytest.mark.parametrize("n", [1, 3, 63, 161, 225, 451])
@pytest.mark.parametrize("tuning", ["heuristic", "best"])
def test_rows_that_end_within_16_bytes(tuning, n):
    """TMA would also store the elements after them."""
    layer.set_gemm_tuning(tuning)
    for layout, m in product(["NN", "NT"], (1, 2, 130)):
        case = with_wider_operands(case_of(m, n, 40, dtype=torch.bfloat16, layout=layout))
        check_in_a_frame(case, [])


@on_hopper
@pytest.mark.parametrize("layout", OWN_LAYOUTS)
def test_our_own_kernels_give_the_same_bits_each_time(layout):
    """Several tiles per block, without state of the previous run."""
    case = case_of(4104, 2568, 584, dtype=torch.bfloat16, layout=layout, epilogue="bias_gelu")
    out = case.args.out
    for kernel in custom_gemm_kernels(case.args):
        run_custom_gemm_kernel(case.args, kernel)
        first = out.clone()
        case.check()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(200):
            out.fill_(float("nan"))
            run_custom_gemm_kernel(case.args, kernel)
            wrong += (out != first).sum()
        assert wrong == 0, kernel


@on_hopper
def test_matrices_that_begin_at_one_address():
    """The same memory is used for operands and results of other sizes, types, and row strides, in turns."""
    memory = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(3)]
    shapes = [(136, 200, 272), (272, 136, 208), (200, 272, 144)]
    kinds = [
        {"dtype": torch.bfloat16, "layout": "NN"},
        {"dtype": torch.bfloat16, "layout": "NT"},
        {"dtype": torch.bfloat16, "layout": "TN"},
        {"dtype": E4M3, "layout": "NT", "scaling": "current"},  # maps that differ from the previous one only by type
        {"dtype": torch.float16, "layout": "NT"},
    ]
    for _ in range(3):
        for sizes, gap, kind in product(shapes, (0, 16), kinds):
            case = case_of(*sizes, **kind)

            def placed(at, like, gap=gap):
                rows, columns = like.shape
                flat = memory[at].view(like.dtype)[: rows * (columns + gap)]
                return flat.view(rows, columns + gap)[:, :columns].copy_(like)

            operands = (
                GemmOperand(placed(i, x.data), x.transposed, scaling=x.scaling, scale_inv=x.scale_inv)
                for i, x in enumerate((case.args.lhs, case.args.rhs))
            )
            case.args = GemmArgs(*operands, placed(2, case.args.out))
            for kernel in TILES:
                run_twice(case, kernel)


@on_hopper
def test_more_matrices_than_tensor_maps_are_kept():
    case = case_of(8, 8, 64, dtype=torch.bfloat16)
    frame = torch.empty(2500, 8, 8, dtype=torch.bfloat16, device="cuda")
    for _ in range(2):
        frame.fill_(float("nan"))
        for out in frame:
            run_custom_gemm_kernel(GemmArgs(case.args.lhs, case.args.rhs, out), "64x256")
        assert ((frame.double() - case.expected["out"]).abs() <= case.allowed["out"]).all()


@on_hopper
@pytest.mark.parametrize(
    "sizes",
    [(8, 8, 16), (264, 136, 208), (130, 2056, 4096), *[(4104, 2568, k) for k in (128, 144, 384, 512, 2192)]],
    ids=str,
)
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=["4x4", "5x4", "4x5"])
@pytest.mark.parametrize("scaling", ["current", "row"])
def test_our_own_kernels_of_8_bits(scaling, types, out_dtype, sizes):
    options = {"dtype": types[0], "rhs_dtype": types[1], "out_dtype": out_dtype, "scaling": scaling}
    for epilogue in ("none", "bias", "gelu", "bias_gelu"):
        case = case_of(*sizes, epilogue=epilogue, **options)
        kernels = custom_gemm_kernels(case.args)
        assert kernels == TILES
        for kernel in kernels:
            run_twice(case, kernel)
    split = case_of(*sizes, use_split_accumulator=True, **options)
    assert custom_gemm_kernels(split.args) == []


def test_the_best_of_all_kernels():
    layer.set_gemm_tuning("best")
    for sizes in [(256, 512, 512), (200, 264, 136)]:
        case = case_of(*sizes, dtype=torch.bfloat16, epilogue="bias", layout="NT")
        for _ in range(2):
            case.args.out.fill_(float("nan"))
            gemm(case.args)
            torch.cuda.synchronize()
            case.check()
    assert gemm_statistics()["measured"] >= 4
    if capability()[0] == 9:
        with pytest.raises(to.UnsupportedError, match="expected one of our kernels"):
            run_custom_gemm_kernel(case.args, "1x1")


FIRST_CALL = """
import sys
sys.path[:0] = {paths!r}
import torch
from gemm_gpu_cases import case_of
from torch_overlap.gemm import GemmArgs, gemm, gemm_statistics

torch.cuda.set_device({device})
torch.manual_seed({seed})
options = {{"dtype": torch.float8_e4m3fn, "scaling": "current", "epilogue": "bias_gelu", "residual": True}}
case = case_of(520, 264, 640, **options)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    gemm(case.args)
for _ in range(2):
    case.args.out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    case.check()
assert gemm_statistics()["composed"] == 0
"""


@on_hopper
def test_the_first_call_of_a_process_may_be_captured(seed):
    """The problem is one that only our kernels compute."""
    here = os.path.dirname(__file__)
    paths = [here, os.path.join(os.path.dirname(here), "gemm")]
    program = FIRST_CALL.format(paths=paths, device=torch.cuda.current_device(), seed=seed)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr
