"""Products on one GPU: values, plans, graphs, streams. Standalone:

    torchrun --nproc_per_node 1 -m pytest tests/python/gpu/test_gemm.py

8-bit operands are skipped if the tensor cores do not support them.
"""

import os
import sys
import threading

import pytest
import torch

import torch_overlap as to
from torch_overlap import gemm as layer
from torch_overlap.gemm import GemmArgs, GemmOperand, gemm, gemm_statistics, grouped_gemm

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "gemm"))
from gemm_cases import E4M3, E5M2, EPILOGUES, LAYOUTS, SCALINGS
from gemm_gpu_cases import DEQUANTIZED, capability, case_of

pytestmark = pytest.mark.gpu(1)

PLAIN = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def draws(gemm_draws):
    yield
    layer.set_gemm_mxfp8("dequantize")


def run(case):
    gemm(case.args)
    torch.cuda.synchronize()
    case.check()


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
@pytest.mark.parametrize("added", [{}, {"accumulate": True}, {"residual": True}], ids=str)
def test_unscaled(dtype, layout, epilogue, added):
    run(case_of(264, 136, 200, dtype=dtype, layout=layout, epilogue=epilogue, padded=True, **added))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("sizes", [(33, 41, 57), (1, 8, 3), (7, 1, 5), (1, 1, 1), (5, 3, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_sizes(dtype, sizes, epilogue):
    """Rows begin at addresses that are no multiples of 16 bytes."""
    run(case_of(*sizes, dtype=dtype, epilogue=epilogue, layout="NN", rounds_product=True))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_operands_float32_result(dtype, epilogue):
    run(case_of(128, 136, 256, dtype=dtype, out_dtype=torch.float32, epilogue=epilogue, accumulate=True))


def test_mixed_types_of_the_epilogue():
    for epilogue in EPILOGUES:
        run(case_of(64, 72, 128, dtype=torch.bfloat16, extra_dtype=torch.float32, epilogue=epilogue))
        run(case_of(64, 72, 128, dtype=torch.float16, extra_dtype=torch.bfloat16, epilogue=epilogue))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", [*SCALINGS, "mxfp8 swizzled"])
def test_scaled(scaling, layout, epilogue):
    scaling, _, swizzled = scaling.partition(" ")
    for k in (512, 640):  # 4 and 5 blocks: the padding of their scales
        run(
            case_of(264, 400, k, dtype=E4M3, scaling=scaling, layout=layout, epilogue=epilogue, swizzled=bool(swizzled))
        )


@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=["4x4", "5x4", "4x5"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_types(scaling, out_dtype, types):
    lhs, rhs = types
    options = {"scaling": scaling, "out_dtype": out_dtype, "accumulate": True, "padded": True}
    run(case_of(136, 256, 384, dtype=lhs, rhs_dtype=rhs, use_split_accumulator=True, **options))


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaling", ["current", "row"])
def test_8_bit_operands_of_few_rows(scaling, out_dtype):
    """One, two and four blocks that share a tile along k, with uneven parts; blocks of whole and narrow tiles."""
    options = {"dtype": E4M3, "scaling": scaling, "out_dtype": out_dtype}
    for rows in (1, 7, 16, 17, 32, 33, 63, 64, 65):
        for n, k in ((8, 16), (1000, 4096), (3072, 4096), (4104, 2064), (9000, 272), (14336, 512), (30008, 128)):
            run(case_of(rows, n, k, **options))
    run(case_of(24, 2056, 640, padded=True, **options))
    if capability()[0] == 9:
        names = []
        for rows in (1, 64, 65):
            case = case_of(rows, 3072, 4096, **options)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
                run(case)
            names.append(any("small_m_kernel" in event.name for event in recorded.events()))
        assert names == [True, True, False]


@pytest.mark.parametrize("split", [False, True], ids=["fast", "split"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaling", ["current", "row"])
def test_8_bit_operands_of_sizes_that_the_library_does_not_take(scaling, out_dtype, split):
    options = {"scaling": scaling, "out_dtype": out_dtype, "use_split_accumulator": split}
    for epilogue in EPILOGUES:
        for sizes in [(192, 520, 336), (9, 8, 16), (1, 24, 48)]:
            run(case_of(*sizes, dtype=E4M3, epilogue=epilogue, product_error=DEQUANTIZED, **options))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("out_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scaling", [None, *SCALINGS])
def test_8_bit_result(scaling, out_dtype, epilogue):
    run(
        case_of(
            136,
            256,
            384,
            dtype=E4M3 if scaling else torch.bfloat16,
            scaling=scaling,
            out_dtype=out_dtype,
            epilogue=epilogue,
        )
    )


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_epilogues_are_fused(dtype, epilogue):
    if capability()[0] < 9:
        pytest.skip("what cuBLASLt fuses on older GPUs is another list")
    layout = "TN" if epilogue == "bgrad" else "NT"  # layouts of the gradient of a weight, and of the forward pass
    run(case_of(256, 512, 384, dtype=dtype, layout=layout, epilogue=epilogue))
    assert gemm_statistics()["composed"] == 0, f"{epilogue} of {dtype} ran as operators of torch"


@pytest.mark.parametrize("epilogue", ["none", "bias", "bias_gelu_aux"])
def test_8_bit_operands_are_multiplied_as_they_are(epilogue):
    for scaling in ("current", "block_1x2"):
        if scaling != "current" and epilogue == "bias_gelu_aux":
            continue
        run(case_of(256, 512, 384, dtype=E4M3, scaling=scaling, epilogue=epilogue))
    assert gemm_statistics()["composed"] == 0, gemm_statistics()


def test_mxfp8_native_or_a_clear_error():
    layer.set_gemm_mxfp8("native")
    case = case_of(256, 256, 256, dtype=E4M3, scaling="mxfp8", swizzled=True)
    if capability()[0] in (10, 11):
        run(case)
        return
    with pytest.raises(to.UnsupportedError, match=r"tensor cores read MXFP8 \(sm_100 or sm_110\), got sm_\d+; call"):
        gemm(case.args)


def test_tf32_follows_torch():
    case = case_of(256, 256, 2048)
    run(case)
    exact = case.args.out.clone()
    torch.backends.cuda.matmul.allow_tf32 = True
    gemm(case.args)
    assert not torch.equal(case.args.out, exact)
    torch.testing.assert_close(case.args.out, exact, rtol=0, atol=float(exact.abs().max()) * 1e-2)


@pytest.mark.parametrize("axis", ["rows", "columns"])
@pytest.mark.parametrize("scaling", [None, *SCALINGS, "mxfp8 swizzled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_equal_the_whole(layout, scaling, axis):
    swizzled = scaling is not None and scaling.endswith("swizzled")
    scaling = scaling and scaling.partition(" ")[0]
    dtype = E4M3 if scaling else torch.bfloat16
    case = case_of(
        392, 400, 640, dtype=dtype, scaling=scaling, layout=layout, epilogue="bias_gelu_aux", swizzled=swizzled
    )
    size = case.args.out.size(0 if axis == "rows" else 1)
    for begin, end in ((0, 128), (128, 256), (256, size)):
        gemm(getattr(case.args, axis)(begin, end - begin))
    torch.cuda.synchronize()
    case.check()


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_repeated_call_makes_no_plan_and_asks_nothing(epilogue):
    def again():
        return case_of(192, 320, 256, dtype=torch.bfloat16, epilogue=epilogue, layout="NT")

    run(again())
    before = gemm_statistics()
    for _ in range(5):
        run(again())  # other tensors, at addresses aligned alike
    after = gemm_statistics()
    assert after["calls"] == before["calls"] + 5
    assert (after["plans"], after["queries"]) == (before["plans"], before["queries"])


def test_plans_differ_where_they_must():
    base = {"dtype": torch.bfloat16, "layout": "NT"}
    run(case_of(192, 328, 264, **base))
    for change in (
        {"layout": "NN"},
        {"dtype": torch.float16},
        {"out_dtype": torch.float32},
        {"epilogue": "bias"},
        {"accumulate": True},
        {"padded": True},
        {"sm_target": 64},
        {"workspace": torch.empty(1 << 20, dtype=torch.uint8, device="cuda")},
    ):
        before = gemm_statistics()["plans"]
        run(case_of(192, 328, 264, **{**base, **change}))
        assert gemm_statistics()["plans"] > before, f"{change} shares a plan"


def test_workspaces():
    memory = torch.empty((1 << 22) + 1, dtype=torch.uint8, device="cuda")
    for workspace in (memory[1:], memory[:100], memory[:0], torch.empty(1 << 20, device="cuda")):
        run(case_of(128, 128, 8192, dtype=torch.bfloat16, workspace=workspace))


def test_misaligned_views():
    """Operands and results begin one element after an aligned address."""
    wide = {side: torch.randn(65, 65, device="cuda") for side in ("lhs", "rhs")}
    for dtype in (torch.float32, torch.bfloat16):
        lhs, rhs = (x.to(dtype)[1:, 1:] for x in wide.values())
        out = torch.full((65, 65), float("nan"), dtype=dtype, device="cuda")
        gemm(GemmArgs(GemmOperand(lhs), GemmOperand(rhs), out[1:, 1:]))
        expected = lhs.double() @ rhs.double()
        error = (out[1:, 1:].double() - expected).abs().max().item()
        assert error <= 0.2 if dtype == torch.bfloat16 else error <= 1e-4, f"{dtype}: largest error {error}"
        assert out[0].isnan().all()
        assert out[:, 0].isnan().all()


def test_a_result_at_an_address_that_tensor_copies_refuse():
    """The stride of its rows is a multiple of 16 bytes, but they begin 8 bytes after such an address."""
    layer.set_gemm_tuning("best")
    lhs, rhs = (torch.randn(512, 1024, device="cuda").bfloat16() for _ in range(2))
    out = torch.full((512, 520), float("nan"), dtype=torch.bfloat16, device="cuda")
    for _ in range(2):  # the second is not measured
        gemm(GemmArgs(GemmOperand(lhs), GemmOperand(rhs, transposed=True), out[:, 4:516]))
        torch.testing.assert_close(out[:, 4:516].double(), lhs.double() @ rhs.double().t(), rtol=2**-7, atol=0.25)
        assert out[:, :4].isnan().all()
        assert out[:, 516:].isnan().all()


def test_products_of_a_group_share_a_workspace():
    """Each product splits k and uses the workspace: tall in k, few tiles."""
    workspace = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
    cases = [case_of(64, 64, 65536, dtype=torch.bfloat16, workspace=workspace) for _ in range(6)]
    for _ in range(20):
        grouped_gemm([case.args for case in cases])
    for case in cases:
        case.check()


@pytest.mark.parametrize("scaling", [None, "current", "block_1x2", "mxfp8"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_graphs_with_changing_inputs(scaling, warm):
    dtype = E4M3 if scaling else torch.bfloat16

    def draw(epilogue="bias_gelu_aux"):
        return case_of(264, 400, 640, dtype=dtype, scaling=scaling, epilogue=epilogue)

    case = draw()
    # Handles and kernels of a library cannot be loaded during a capture.
    run(draw() if warm else draw("none"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(case.args)
        gemm(case.args)
    for _ in range(3):
        other = draw()
        for side in ("lhs", "rhs"):
            getattr(case.args, side).data.copy_(getattr(other.args, side).data)
            if scaling:
                getattr(case.args, side).scale_inv.copy_(getattr(other.args, side).scale_inv)
        case.args.bias.copy_(other.args.bias)
        case.args.out.fill_(float("nan"))
        case.args.pre_gelu_out.fill_(float("nan"))
        eager = draw()
        graph.replay()
        gemm(eager.args)  # concurrently with the replay, on the same stream
        torch.cuda.synchronize()
        eager.check()
        case.expected, case.allowed = other.expected, other.allowed
        case.check()


def test_a_graph_and_eager_calls_on_two_streams_share_no_workspace():
    captured, eager = (case_of(128, 128, 16384, dtype=torch.bfloat16) for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        gemm(captured.args)  # the stream has a cached workspace before the capture
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        gemm(captured.args)
    for _ in range(20):
        graph.replay()
        with torch.cuda.stream(stream):
            gemm(eager.args)
    torch.cuda.synchronize()
    captured.check()
    eager.check()


GROUP = [
    {"sizes": (264, 400, 640), "epilogue": "bias"},
    {"sizes": (0, 400, 640), "epilogue": "bias"},
    {"sizes": (8, 400, 640), "epilogue": "bias_gelu_aux"},
    {"sizes": (128, 400, 0), "epilogue": "bias"},
    {"sizes": (1000, 400, 640)},
    {"sizes": (40, 400, 640), "epilogue": "dgelu_bgrad"},
]


def make_group(scaling):
    """Returns the problems of a group; with 8 bits only those that are not empty."""
    options = {"dtype": E4M3 if scaling else torch.bfloat16, "scaling": scaling}
    group = [(one["sizes"], one.get("epilogue", "none")) for one in GROUP]
    return [case_of(*sizes, epilogue=epilogue, **options) for sizes, epilogue in group if 0 not in sizes or not scaling]


@pytest.mark.parametrize("scaling", [None, "current", "block_1x2", "mxfp8"])
def test_groups(scaling):
    for _ in range(3):
        cases = make_group(scaling)
        torch.cuda._sleep(1_000_000)  # the fork waits for earlier work of the stream
        copies = [case.args.out.clone() for case in cases]
        grouped_gemm([case.args for case in cases])
        results = [case.args.out.clone() for case in cases]  # and the stream for the join
        torch.cuda.synchronize()
        for case, copy, result in zip(cases, copies, results, strict=True):
            case.check()
            assert torch.equal(result.view(torch.uint8), case.args.out.view(torch.uint8))
            assert copy.isnan().all()
    grouped_gemm([])


def test_groups_in_a_graph():
    cases = make_group(None)
    grouped_gemm([case.args for case in cases])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm([case.args for case in cases])
        grouped_gemm([case.args for case in cases])
    eager = make_group(None)
    for _ in range(3):
        for case in cases:
            case.args.out.fill_(float("nan"))
        graph.replay()
        grouped_gemm([case.args for case in eager])
        torch.cuda.synchronize()
        for case in cases + eager:
            case.check()


def test_measured_tuning():
    layer.set_gemm_tuning("measured")
    case = case_of(520, 1032, 776, dtype=torch.bfloat16, epilogue="bias_gelu_aux", accumulate=False)
    run(case)
    first = gemm_statistics()
    assert first["measured"] >= 2
    run(case_of(520, 1032, 776, dtype=torch.bfloat16, epilogue="bias_gelu_aux"))
    assert gemm_statistics()["measured"] == first["measured"]
    added = case_of(520, 1032, 776, dtype=torch.bfloat16, accumulate=True)
    run(added)  # measured on scratch memory: out is accumulated into once


def test_nothing_is_measured_in_a_capture():
    run(case_of(128, 136, 264, dtype=torch.bfloat16))
    layer.set_gemm_tuning("measured")
    case = case_of(72, 136, 264, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(case.args)
    assert gemm_statistics()["measured"] == 0
    graph.replay()
    torch.cuda.synchronize()
    case.check()
    run(case)
    assert gemm_statistics()["measured"] >= 1


def test_threads_share_plans():
    cases = [[case_of(136, 264, 520, dtype=torch.bfloat16, epilogue="bias") for _ in range(8)] for _ in range(6)]
    torch.cuda.synchronize()
    device = torch.cuda.current_device()
    failures = []

    def body(mine):
        try:
            torch.cuda.set_device(device)
            with torch.cuda.stream(torch.cuda.Stream()):
                for case in mine:
                    gemm(case.args)
                torch.cuda.current_stream().synchronize()
            for case in mine:
                case.check()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(mine,)) for mine in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_the_same_checks_as_on_the_cpu():
    case = case_of(16, 32, 48)
    with pytest.raises(ValueError, match="output buffer size is incorrect"):
        gemm(GemmArgs(case.args.lhs, case.args.rhs, case.args.out[:, :8]))
    with pytest.raises(TypeError, match=r"expected bias on cuda:.*, the device of lhs, got cpu"):
        gemm(GemmArgs(case.args.lhs, case.args.rhs, case.args.out, bias=torch.zeros(32)))
