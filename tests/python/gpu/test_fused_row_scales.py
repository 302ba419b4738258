"""The fused Hopper kernels of 8-bit operands with a scale for each row, which the all-gather gathers too."""

import pytest
import torch
from test_fused import comm_gather, poison, replay, soak
from test_fused_scaled import FULL, LARGE, PIECES, SHAPES, SOAKED, TYPES, WIDE, Scaled

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.quantize import ScalingMode as Mode

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="the kernels are for sm_90"
    ),
]

MODE = int(Mode.ROW_SCALING)


class Rows(Scaled):
    """Rows whose magnitudes differ, so that a misplaced scale is detected."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.of_x, self.of_weight = (torch.empty(t.shape[0], 1, device="cuda") for t in (self.x, self.weight))

    def fill(self):
        super().fill()
        for scales in (self.of_x, self.of_weight):
            scales.uniform_(-1, 1).exp_()


class RowGather(Rows):
    def run(self, algorithm="fused"):
        products, whole, scales = ops.scaled_all_gather_matmul(
            self.x, self.of_x, [self.weight], [self.of_weight], self.comm, [self.bias], out_dtype=self.out_dtype,
            return_gathered=True, scaling_mode=MODE, algorithm=algorithm,
        )  # fmt: skip
        return [products[0], whole, scales]

    def check(self, outs):
        x = torch.cat(self.values(self.x, self.of_x))
        w = self.weight.double() * self.of_weight.double()
        self.close(outs[0], x @ w.t(), x.abs() @ w.abs().t(), self.bias)
        assert torch.equal(outs[1].view(torch.uint8), torch.cat(comm_gather(self.comm, self.x.view(torch.uint8))))
        assert torch.equal(outs[2], torch.cat(comm_gather(self.comm, self.of_x)))


class RowScatter(Rows):
    def __init__(self, comm, rows, *args, **options):
        super().__init__(comm, rows * comm.get_size(), *args, **options)

    def run(self, algorithm="fused"):
        return [
            ops.scaled_matmul_reduce_scatter(
                self.x, self.of_x, self.weight, self.of_weight, self.comm, self.bias, out_dtype=self.out_dtype,
                scaling_mode=MODE, algorithm=algorithm,
            )
        ]  # fmt: skip

    def check(self, outs):
        xs = [x.chunk(self.size)[self.rank] for x in self.values(self.x, self.of_x)]
        ws = self.values(self.weight, self.of_weight)
        want = sum(x @ w.t() for x, w in zip(xs, ws, strict=True))
        self.close(outs[0], want, sum(x.abs() @ w.abs().t() for x, w in zip(xs, ws, strict=True)), self.bias)


kinds = pytest.mark.parametrize("kind", [RowGather, RowScatter], ids=lambda kind: kind.__name__)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("types", list(TYPES))
@pytest.mark.parametrize("shape", [*SHAPES, LARGE, WIDE, PIECES], ids=str)
@kinds
def test_values(comm, kind, shape, types, out_dtype):
    case = kind(comm, *shape, types=TYPES[types], out_dtype=out_dtype, bias=True)
    for _ in range(3):
        case.fill()
        case.check(case.run())


@pytest.mark.parametrize("shape", FULL, ids=str)
@kinds
def test_full_shapes(comm, kind, shape):
    case = kind(comm, *shape, types=TYPES["4x4"], out_dtype=torch.bfloat16, bias=False)
    case.fill()
    case.check(case.run())


@kinds
def test_replays_with_changing_inputs_late_ranks_and_eager_calls(comm, seed, kind):
    shapes = [(200, 272, 520), (512, 1024, 1032), LARGE, WIDE, PIECES]
    replay(comm, seed, [kind(comm, *s, types=TYPES["4x4"], out_dtype=torch.bfloat16, bias=True) for s in shapes])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [(RowGather, SOAKED), (RowScatter, SOAKED), (RowScatter, PIECES)],
    ids=["RowGather", "RowScatter", "RowScatter in pieces"],
)
def test_ten_thousand_replays(comm, kind, shape):
    """No rank is delayed; results are compared with the copy engines' algorithm within the graph, and written memory
    holds NaN before."""
    case = kind(comm, *shape, types=TYPES["4x4"], out_dtype=torch.bfloat16, bias=True)
    case.fill()
    source = torch.randn(case.x.shape, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    case.run("p2p")

    def step():
        source.mul_(1.7).add_(0.3).cos_()
        case.x.copy_(source)
        case.of_x.copy_(source[:, :1].exp())
        poison(case, case.run)
        got, want = case.run()[0].float(), case.run("p2p")[0].float()
        wrong.add_((~((got - want).abs() <= 0.02 * want.abs() + 0.01 * want.abs().amax())).sum())

    soak(step, wrong)


def test_explain(comm):
    case = RowScatter(comm, 128, 256, 256, types=TYPES["4x4"], out_dtype=torch.bfloat16, bias=False)
    case.fill()
    arguments = (case.x, case.of_x, case.weight, case.of_weight, comm)
    found = to.explain("scaled_matmul_reduce_scatter", *arguments, scaling_mode=MODE, algorithm="fused")
    assert found.algorithm == "fused"
