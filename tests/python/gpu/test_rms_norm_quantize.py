"""all_reduce with a residual, an RMSNorm and its quantization, in one kernel or several: the bits of `quantize`."""

import pytest
import torch
from norm_cases import DTYPES, EPS, MODES, SHAPES, Problem, draw, same_everywhere

from torch_overlap import ops
from torch_overlap.quantize import ScalingMode

pytestmark = pytest.mark.gpu(2)
IN_KERNELS = [ScalingMode.DELAYED_TENSOR_SCALING, ScalingMode.ROW_SCALING, ScalingMode.BLOCK_1D_SCALING]
ALL = [mode for mode in ScalingMode.__members__.values() if mode != ScalingMode.NO_SCALING]


@pytest.fixture(scope="module")
def by_mode(make_comm):
    return {mode: make_comm(f"norm8_{mode}", hints={"custom_collectives": mode}) for mode in MODES}


class Quantized(Problem):
    def __init__(self, comm, seed, shape, dtype, scaling, has_bias=True):
        super().__init__(comm, seed, shape, dtype, has_bias)
        self.scaling = scaling
        self.scale = torch.full((1,), 23.0, device="cuda") if scaling == ScalingMode.DELAYED_TENSOR_SCALING else None

    def run(self, return_norm=True):
        return ops.all_reduce_rms_norm_quantize(
            self.x, self.residual, self.weight, self.comm, self.bias, scaling_mode=self.scaling, scale=self.scale,
            eps=EPS, return_norm=return_norm,
        )  # fmt: skip

    def quantized(self, norm):
        if self.scale is not None:
            return ops.quantize_delayed(norm, self.scale)[:2]
        return ops.quantize(norm, self.scaling)[:2]

    def check(self, results):
        data, scale_inv, hidden, norm = results
        super().check((norm, hidden))
        check_bits((data, scale_inv), self.quantized(norm))


def check_bits(got, wanted):
    assert torch.equal(got[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert got[1].stride() == wanted[1].stride()
    assert torch.equal(got[1].float(), wanted[1].float())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_shape(by_mode, seed, dtype, mode):
    for i, shape in enumerate(SHAPES):
        for scaling in IN_KERNELS if i % 4 else ALL:
            if scaling == ScalingMode.MXFP8_1D_SCALING and shape[-1] % 32:
                continue
            problem = Quantized(by_mode[mode], seed + i, shape, dtype, scaling, has_bias=i % 2 == 0)
            results = problem.run()
            problem.check(results)
            same_everywhere(by_mode[mode], [results[0].view(torch.uint8), results[1].float().flatten(), *results[2:]])
            again = problem.run(return_norm=False)
            assert again[3].shape == (0,)
            check_bits(again, results)
            assert torch.equal(again[2], results[2])


@pytest.mark.parametrize("scaling", IN_KERNELS, ids=str)
@pytest.mark.parametrize("mode", ["ll", "ll128", "simple", "off"])
def test_any_alignment_on_one_rank(by_mode, seed, mode, scaling):
    comm = by_mode[mode]
    for offset, shape in ((1, (12, 1000)), (2, (5, 4096)), (4, (3, 1003))):
        problem = Quantized(comm, seed, shape, torch.bfloat16, scaling)
        if comm.get_rank() == 0:
            for name in ("x", "residual", "weight", "bias"):
                whole = torch.empty(getattr(problem, name).numel() + offset, dtype=torch.bfloat16, device="cuda")
                inside = whole[offset:].view(getattr(problem, name).shape)
                setattr(problem, name, inside.copy_(getattr(problem, name)))
        problem.check(problem.run())


@pytest.mark.parametrize("scaling", IN_KERNELS, ids=str)
@pytest.mark.parametrize("mode", ["ll", "ll128", "simple", "off"])
def test_special_values(by_mode, seed, mode, scaling):
    for number in (float("nan"), float("inf"), 0.0, 3e38):
        problem = Quantized(by_mode[mode], seed, (6, 4096), torch.bfloat16, scaling)
        for x in problem.every:
            x[1, 100] = number
            x[2] = number
            x[4] *= 0
        if number == 0:
            problem.residual[2] = 0
        data, scale_inv, _, norm = problem.run()
        wanted = problem.quantized(norm)
        assert torch.equal(data.float().isnan(), norm.isnan())
        check_bits((data, scale_inv.nan_to_num(5.0)), (wanted[0], wanted[1].nan_to_num(5.0)))


@pytest.mark.parametrize("scaling", IN_KERNELS, ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 4096), (16, 8192), (64, 8192), (33, 7168), (300, 4096)])
def test_graphs_with_changing_inputs(by_mode, seed, rows, n, scaling):
    """Two norms and their values in one graph, one rank late, results poisoned."""
    comm = by_mode["auto"]
    problems = [Quantized(comm, seed + i, (rows, n), torch.bfloat16, scaling) for i in range(2)]
    for problem in problems:
        problem.run()
    generator = torch.Generator("cuda").manual_seed(seed + 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [problem.run() for problem in problems]
    for replay in range(6):
        for problem in problems:
            for t in (*problem.every, problem.residual, problem.weight, problem.bias):
                t.copy_(draw(generator, *t.shape, dtype=t.dtype) * 10 ** (replay - 3))
        for t in torch.utils._pytree.tree_leaves(captured):
            t.view(torch.uint8).fill_(0x7F) if t.is_contiguous() else t.fill_(float("nan"))
        if comm.get_rank() == replay % comm.get_size():
            torch.cuda._sleep(5_000_000)
        graph.replay()
        for problem, results in zip(problems, captured, strict=True):
            problem.check(results)


@pytest.mark.parametrize("mode", ["auto", "ll", "simple", "off"])
def test_no_rows(by_mode, seed, mode):
    for shape in ((0, 8), (2, 0, 256), (3, 0)):
        for scaling in IN_KERNELS:
            problem = Quantized(by_mode[mode], seed, shape, torch.bfloat16, scaling)
            problem.check(problem.run())


@pytest.mark.parametrize("algorithm", ["sequential", "pipelined", "p2p", "low_latency", "auto"])
@pytest.mark.parametrize("rows", [1, 16, 100])
def test_products(comm, seed, rows, algorithm):
    generator = torch.Generator("cuda").manual_seed(seed)
    rank, size, k, n = comm.get_rank(), comm.get_size(), 256, 2048
    xs = [draw(generator, rows, k, dtype=torch.bfloat16) for _ in range(size)]
    ws = [draw(generator, n, k, dtype=torch.bfloat16) for _ in range(size)]
    residual, gain, bias = (draw(generator, *s, dtype=torch.bfloat16) for s in ((rows, n), (n,), (n,)))
    exact = residual.double() + bias.double() + sum(x.double() @ w.double().t() for x, w in zip(xs, ws, strict=True))
    for scaling in IN_KERNELS:
        scale = torch.full((1,), 23.0, device="cuda") if scaling == ScalingMode.DELAYED_TENSOR_SCALING else None

        def run(scaling=scaling, scale=scale):
            return ops.matmul_all_reduce_rms_norm_quantize(
                xs[rank], ws[rank], residual, gain, comm, bias, scaling_mode=scaling, scale=scale, eps=EPS,
                return_norm=True, algorithm=algorithm,
            )  # fmt: skip

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        graph.replay()
        for data, scale_inv, hidden, norm in (run(), captured):
            size_of = exact.square().mean().sqrt()
            assert ((hidden.double() - exact).abs() <= 0.02 * (exact.abs() + size_of)).all()
            wide = hidden.double()
            normed = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * gain.double()
            assert ((norm.double() - normed).abs() <= 0.01 * normed.abs() + 1e-6).all()
            wanted = ops.quantize(norm, scaling)[:2] if scale is None else ops.quantize_delayed(norm, scale)[:2]
            check_bits((data, scale_inv), wanted)
