"""Our own products whose tiles are shared along k, on one GPU of sm_90. By itself:

torchrun --nproc_per_node 1 -m pytest tests/python/gpu/test_stream_k.py
"""

import os
import sys

import pytest
import torch

from torch_overlap import gemm as layer
from torch_overlap._gemm import own_gemm_kernels, run_own_gemm_kernel
from torch_overlap.gemm import gemm

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "gemm"))
from gemm_cases import E4M3
from gemm_gpu_cases import capability, case_of

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.skipif(not torch.cuda.is_available() or capability()[0] != 9, reason="the kernels are for sm_90"),
]

SHARED = "-stream-k"
BOTH = ["128x256-stream-k", "128x128-stream-k"]
# Fewer tiles than SMs, with 2 to 8 parts each; one wave and a part, three and a part; k of 129 and 17.1 stages.
SIZES = [
    *[(8, 8, 8192), (264, 136, 8200), (130, 2056, 4096), (64, 8192, 2048), (1000, 1032, 1096)],
    *[(2048, 3584, 4096), (4104, 2568, 1096), (2048, 1024, 4096)],
]


@pytest.fixture(autouse=True)
def draws(seed):
    torch.manual_seed(seed)
    yield
    layer.set_gemm_tuning("heuristic")


def shared_kernels(args):
    return [kernel for kernel in own_gemm_kernels(args) if kernel.endswith(SHARED)]


def bits(tensor):
    return tensor.contiguous().view(torch.int16).clone()


def run_all(case, times=2):
    """Every kernel that shares tiles, and the same bits each time."""
    kernels = shared_kernels(case.args)
    for kernel in kernels:
        results = []
        for _ in range(times):
            case.args.out.fill_(float("nan"))
            run_own_gemm_kernel(case.args, kernel)
            results.append(bits(case.args.out))
        torch.cuda.synchronize()
        case.check()
        assert all(torch.equal(results[0], other) for other in results), kernel
    return kernels


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_values(dtype, layout, sizes):
    for epilogue in ("none", "bias", "gelu", "bias_gelu"):
        assert run_all(case_of(*sizes, dtype=dtype, layout=layout, epilogue=epilogue))


@pytest.mark.parametrize("sizes", [(8, 16, 8192), (264, 136, 8208), (2048, 3584, 4096), (4104, 2568, 2192)], ids=str)
@pytest.mark.parametrize("scaling", ["current", "row"])
def test_8_bit_operands(scaling, sizes):
    for epilogue in ("none", "bias_gelu"):
        assert run_all(case_of(*sizes, dtype=E4M3, scaling=scaling, epilogue=epilogue))


@pytest.mark.parametrize("k", [64, 72, 200, 520, 584, 1032, 2056])
def test_few_stages(k):
    """One to a few stages for each block."""
    for m, n in [(4104, 2568), (2304, 2304), (520, 520)]:
        run_all(case_of(m, n, k, dtype=torch.bfloat16, epilogue="bias"))


@pytest.mark.parametrize("sms", [1, 2, 3, 16, 61, 100, 131])
def test_fewer_sms(sms):
    """sm_target: any number of blocks; results are those of the whole GPU but for the order of sums."""
    for sizes in [(520, 1032, 4096), (2048, 3584, 512)]:
        case = case_of(*sizes, dtype=torch.bfloat16, epilogue="bias_gelu", sm_target=sms)
        run_all(case)
        for kernel in own_gemm_kernels(case.args):
            case.args.out.fill_(float("nan"))
            run_own_gemm_kernel(case.args, kernel)
            torch.cuda.synchronize()
            case.check()


def test_a_workspace_that_is_too_small():
    sizes, options = (2048, 3584, 4096), {"dtype": torch.bfloat16}
    small = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert shared_kernels(case_of(*sizes, workspace=small, **options).args) == []
    large = torch.full(((40 << 20) + 1,), 255, dtype=torch.uint8, device="cuda")
    assert run_all(case_of(*sizes, workspace=large[1:], **options)) == BOTH
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert shared_kernels(case_of(*sizes, **options).args) == BOTH
        assert shared_kernels(case_of(8448, 2048, 512, **options).args) == []  # whole waves


@pytest.mark.parametrize("kernel", BOTH)
def test_the_same_bits_whatever_else_runs(kernel):
    """Blocks begin and end in any order beside other kernels; parts of a tile too."""
    for sizes in [(2048, 3584, 4096), (264, 136, 8200)]:
        case = case_of(*sizes, dtype=torch.bfloat16, epilogue="bias")
        run_own_gemm_kernel(case.args, kernel)
        torch.cuda.synchronize()
        case.check()
        expected = bits(case.args.out)
        other = torch.cuda.Stream(priority=-1)
        results = []
        for i in range(50):
            with torch.cuda.stream(other):
                x = torch.randn(512, 512 + 64 * (i % 9), device="cuda")
                for _ in range(i % 5):
                    x @ x.t()
            case.args.out.fill_(float("nan"))
            run_own_gemm_kernel(case.args, kernel)
            results.append(bits(case.args.out))
        torch.cuda.synchronize()
        assert all(torch.equal(expected, result) for result in results)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("sms", [16, 64, 120])
def test_blocks_that_begin_when_others_have_ended(sms, kernel):
    """A long kernel has some SMs to itself: the first blocks end before the last ones begin."""
    busy = case_of(2048, 2048, 32768, dtype=torch.bfloat16, sm_target=sms)
    cases = [
        case_of(*sizes, dtype=torch.bfloat16, epilogue="bias")
        for sizes in [(2048, 3584, 1024), (4104, 2568, 520), (2048, 1024, 1024), (130, 2056, 4096)]
    ]
    for case in cases:
        run_own_gemm_kernel(case.args, kernel)
    expected = [bits(case.args.out) for case in cases]
    other = torch.cuda.Stream(priority=-1)
    for _ in range(10):
        for case, result in zip(cases, expected, strict=True):
            case.args.out.fill_(float("nan"))
            torch.cuda.synchronize()
            with torch.cuda.stream(other):
                run_own_gemm_kernel(busy.args, "128x128")
            run_own_gemm_kernel(case.args, kernel)
            torch.cuda.synchronize()
            case.check()
            assert torch.equal(bits(case.args.out), result)
    busy.check()


@pytest.mark.parametrize("kernel", BOTH)
def test_a_graph_with_changing_inputs(kernel):
    def draw():
        return [
            case_of(*sizes, dtype=torch.bfloat16, epilogue="bias") for sizes in ((2048, 1024, 4096), (264, 136, 8200))
        ]

    captured, sets = draw(), [draw() for _ in range(4)]
    for case in captured:
        run_own_gemm_kernel(case.args, kernel)  # loads it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for case in captured:
            run_own_gemm_kernel(case.args, kernel)
    first = {}
    for i in range(100):
        for case, other in zip(captured, sets[i % 4], strict=True):
            for side in ("lhs", "rhs"):
                getattr(case.args, side).data.copy_(getattr(other.args, side).data)
            case.args.bias.copy_(other.args.bias)
            case.args.out.fill_(float("nan"))
            case.expected, case.allowed = other.expected, other.allowed
        graph.replay()
        for number, case in enumerate(captured):
            case.check()
            result = bits(case.args.out)
            assert torch.equal(first.setdefault((i % 4, number), result), result), (i, number)


@pytest.mark.parametrize("kernel", BOTH)
def test_streams_and_graphs_at_once(kernel):
    """Eager calls on two streams and replays on two others, each with sums and counts of its own."""
    cases = [case_of(2048, 1024 + 512 * i, 4096, dtype=torch.bfloat16) for i in range(4)]
    streams = [torch.cuda.Stream() for _ in cases]
    graphs = {}
    for i, (case, stream) in enumerate(zip(cases, streams, strict=True)):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run_own_gemm_kernel(case.args, kernel)
        torch.cuda.synchronize()
        if i >= 2:
            graphs[i] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[i], stream=stream):
                for _ in range(3):
                    run_own_gemm_kernel(case.args, kernel)
    expected = [bits(case.args.out) for case in cases]
    for _ in range(40):
        for i, (case, stream) in enumerate(zip(cases, streams, strict=True)):
            with torch.cuda.stream(stream):
                case.args.out.fill_(float("nan"))
                if i in graphs:
                    graphs[i].replay()
                else:
                    run_own_gemm_kernel(case.args, kernel)
        torch.cuda.synchronize()
        for case, result in zip(cases, expected, strict=True):
            case.check()
            assert torch.equal(bits(case.args.out), result)


def test_branches_of_one_graph():
    """Two products side by side in a capture."""
    one, other = (case_of(2048, 1024, 4096, dtype=torch.bfloat16) for _ in range(2))
    for case in (one, other):
        run_all(case, times=1)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream.wait_stream(torch.cuda.current_stream())
        for _ in range(5):
            run_own_gemm_kernel(one.args, BOTH[0])
        with torch.cuda.stream(stream):
            for _ in range(5):
                run_own_gemm_kernel(other.args, BOTH[0])
        torch.cuda.current_stream().wait_stream(stream)
    for _ in range(20):
        for case in (one, other):
            case.args.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for case in (one, other):
            case.check()


def test_the_end_of_a_graph_gives_its_counts_back():
    case = case_of(264, 136, 8200, dtype=torch.bfloat16)

    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                run_own_gemm_kernel(case.args, BOTH[0])
        graph.replay()
        torch.cuda.synchronize()
        graph.reset()
        torch.cuda.empty_cache()

    run_all(case)
    for _ in range(5):
        capture()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(120):  # 2400 of them would take 10 MiB
        capture()
    assert before - torch.cuda.mem_get_info()[0] < 4 << 20
    run_all(case)


def test_the_best_of_all_kernels():
    """Where one that shares tiles is the quickest, and in a capture, it computes."""
    layer.set_gemm_tuning("best")
    for sizes in [(2048, 3584, 4096), (130, 2056, 8192)]:
        case = case_of(*sizes, dtype=torch.bfloat16, epilogue="bias")
        for _ in range(2):
            case.args.out.fill_(float("nan"))
            gemm(case.args)
            torch.cuda.synchronize()
            case.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gemm(case.args)
        case.args.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        case.check()
