"""Many replays of our own products for Hopper on one GPU: operands, tiles and comparison are in the graph.
Standalone:

torchrun --nproc_per_node 1 -m pytest tests/python/gpu/test_own_gemm_soak.py
"""

import os
import random
import sys

import pytest
import torch

from torch_overlap._gemm import custom_gemm_kernels, run_custom_gemm_kernel
from torch_overlap.gemm import GemmArgs, GemmOperand

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "gemm"))
from gemm_cases import E4M3, E5M2, SCALINGS
from gemm_gpu_cases import TILES, on_hopper

pytestmark = [pytest.mark.gpu(1), pytest.mark.usefixtures("gemm_draws"), on_hopper]

# The types of both operands and of the result, and the scaling.
KINDS = {
    "bf16": (torch.bfloat16, torch.bfloat16, torch.bfloat16, None),
    "fp16": (torch.float16, torch.float16, torch.float16, None),
    "e4m3": (E4M3, E4M3, torch.bfloat16, "current"),
    "e5m2 rows": (E5M2, E4M3, torch.float16, "row"),
}
GRID = [(kind, residual) for kind in KINDS for residual in (False, True)]
EACH = pytest.mark.parametrize(("kind", "residual"), GRID, ids=str)
SIZES = [(264, 136, 208), (520, 392, 144), (1, 8, 16)]
STEPS = 64  # operands repeat after these


class Products:
    """Small integers times powers of two, with every tile: sums are exact, and rounded once. Results are NaN before."""

    def __init__(self, kind, residual, sizes, device="cuda"):
        m, n, k = sizes
        lhs, rhs, out, self.scaling = KINDS[kind]
        self.bases = [torch.randint(1 << 20, shape, device=device) for shape in ((m, k), (n, k), (m, n), (1, n))]
        self.data = [base.to(dtype) for base, dtype in zip(self.bases, (lhs, rhs, out, out), strict=True)]
        self.scales = [torch.full((1,), scale, device=device) for scale in (0.5, 2.0)]
        if self.scaling == "row":
            self.scales = [2.0 ** (base[:, :1] % 3 - 1) for base in self.bases[:2]]
        self.out = torch.empty(m, n, dtype=out, device=device)
        self.has_residual = residual
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def args(self):
        modes = SCALINGS[self.scaling] if self.scaling else (None, None)
        options = [{} if mode is None else {"scaling": mode, "scale_inv": scale}
                   for mode, scale in zip(modes, self.scales, strict=True)]  # fmt: skip
        operands = [GemmOperand(self.data[i], i == 1, **options[i]) for i in range(2)]
        more = {"residual": self.data[2]} if self.has_residual else {}
        return GemmArgs(*operands, self.out, bias=self.data[3][0], **more)

    def fill(self):
        self.step.add_(1).remainder_(STEPS)
        for i, (base, data) in enumerate(zip(self.bases, self.data, strict=True)):
            data.copy_((base + (base // 13 + i) * self.step) % 5 - 2)

    def want(self):
        lhs, rhs, residual, bias = (data.double() for data in self.data)
        product = (lhs * self.scales[0].double()) @ (rhs * self.scales[1].double()).t() + bias
        return (product + residual if self.has_residual else product).to(self.out.dtype)

    def run(self):
        self.fill()
        args, want = self.args(), self.want()
        kernels = custom_gemm_kernels(args)
        assert kernels == TILES
        for kernel in kernels:
            self.out.fill_(float("nan"))
            run_custom_gemm_kernel(args, kernel)
            self.wrong += (self.out != want).sum()

    def capture(self, stream=None):
        self.run()  # kernels and libraries are loaded
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.run()
        return graph


@EACH
def test_graphs_on_two_streams_and_eager_calls(seed, kind, residual):
    """Replays each one concurrently with another's; nothing orders them."""
    draw = random.Random(seed)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for sizes in SIZES:
        both = [Products(kind, residual, sizes), Products(*draw.choice(GRID), draw.choice(SIZES))]
        graphs = [products.capture(stream) for products, stream in zip(both, streams, strict=True)]
        torch.cuda.synchronize()
        for _ in range(100):
            for products, graph, stream in zip(both, graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    products.run() if draw.random() < 0.1 else graph.replay()
        torch.cuda.synchronize()
        assert [products.wrong.item() for products in both] == [0, 0], sizes


@pytest.mark.slow
@EACH
def test_ten_thousand_replays(kind, residual):
    products = Products(kind, residual, SIZES[0])
    graph = products.capture()
    for i in range(10_000):
        graph.replay()
        if i % 1000 == 999:
            assert products.wrong.item() == 0, i
