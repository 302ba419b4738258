"""The fused Hopper kernels of 8-bit operands: every pair of types, odd shapes, graphs, late ranks."""

import pytest
import torch
from graph_nodes import nodes_of
from shared_gpus import SHARES_GPU
from test_fused import comm_gather, gather_tiles, poison, replay, soak

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.quantize import ScalingMode as Mode

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="the kernels are for sm_90"
    ),
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TYPES = {"4x4": (E4M3, E4M3), "5x4": (E5M2, E4M3), "4x5": (E4M3, E5M2)}
# Rows of a rank, input and output features. A stage of k is 128 elements.
SHAPES = [(1, 16, 8), (24, 64, 136), (128, 256, 256), (200, 144, 1000), (257, 1104, 520), (512, 2048, 1024)]
FULL = [(4096, 4096, 7168), (1024, 4096, 2048)]
LARGE = (2048, 272, 4160)
PIECES = (4200, 144, 2056)  # see test_fused.py
SOAKED = (192, 336, 528)
WIDE = (500, 272, 7112)  # the gather uses tiles of 128 x 224; the last ones are partial in both dimensions
FAST_SUMS = 2.0**-10  # relative to sum |lhs||rhs|: tensor cores keep about 14 bits of partial sums


class Scaled:
    """A rank's 8-bit x and weight, whose magnitudes differ by rank and call."""

    def __init__(self, comm, rows, features_in, features_out, types, out_dtype, bias):
        self.comm, self.rank, self.size, self.out_dtype = comm, comm.get_rank(), comm.get_size(), out_dtype
        self.x = torch.empty(rows, features_in, device="cuda").to(types[0])
        self.weight = torch.empty(features_out, features_in, device="cuda").to(types[1])
        self.scales = torch.empty(2, 1, device="cuda")
        self.bias = torch.empty(features_out, dtype=out_dtype, device="cuda") if bias else None

    def fill(self):
        for data in (self.x, self.weight):
            data.copy_(torch.randn(data.shape, device="cuda") * 3)
        # Each rank has others; sums of eight of them are in the range of fp16.
        self.scales.uniform_(0.05, 2).mul_((self.rank + 1) / self.size)
        if self.bias is not None:
            self.bias.normal_()

    def values(self, data, scale):
        """Returns the values of every rank, in float64."""
        parts = comm_gather(self.comm, data.view(torch.uint8))
        factors = comm_gather(self.comm, scale)
        return [p.view(data.dtype).double() * f.double() for p, f in zip(parts, factors, strict=True)]

    def close(self, got, want, magnitude, bias):
        step = torch.finfo(self.out_dtype).eps
        bias = bias.double() if bias is not None else 0
        # Partial sums of every rank are rounded, and so is the result.
        bound = step * (want + bias).abs() + (FAST_SUMS + step) * magnitude + 1e-5
        assert torch.isfinite(got).all()
        worst = ((got.double() - want - bias).abs() / bound).max().item() if got.numel() else 0
        assert worst <= 1, f"{worst} times the bound"


class Gather(Scaled):
    """The x of all ranks have one factor."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.factor = torch.empty(1, device="cuda")
        self.weights = [self.weight, self.weight[: self.weight.shape[0] // 16 * 8 or 8]]

    def run(self, algorithm="fused"):
        count = len(self.weights)
        products, whole, _ = ops.scaled_all_gather_matmul(
            self.x, self.factor, self.weights, [self.scales[1]] * count, self.comm, [self.bias, None][:count],
            out_dtype=self.out_dtype, algorithm=algorithm, return_gathered=True,
        )  # fmt: skip
        return [*products, whole]

    def fill(self):
        super().fill()
        self.factor.copy_(self.scales[0])
        self.comm.broadcast(self.factor, 0, async_op=False)

    def check(self, outs):
        x = torch.cat(self.values(self.x, self.factor))
        *products, whole = outs
        for product, weight, bias in zip(products, self.weights, [self.bias, None], strict=False):
            w = weight.double() * self.scales[1].double()
            self.close(product, x @ w.t(), x.abs() @ w.abs().t(), bias)
        assert torch.equal(whole.view(torch.uint8), torch.cat(comm_gather(self.comm, self.x.view(torch.uint8))))


class GatherOfOne(Gather):
    """An all-gather with one product: its kernel brings the rows itself if they are few."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.weights = self.weights[:1]


class Scatter(Scaled):
    op = "sum"

    def __init__(self, comm, rows, *args, **options):
        super().__init__(comm, rows * comm.get_size(), *args, **options)

    def run(self, algorithm="fused"):
        return [
            self.operator(
                self.x, self.scales[0], self.weight, self.scales[1], self.comm, self.bias, op=self.op,
                out_dtype=self.out_dtype, algorithm=algorithm,
            )
        ]  # fmt: skip

    def operator(self, *args, **options):
        return ops.scaled_matmul_reduce_scatter(*args, **options)

    def mine(self, rows):
        return rows.chunk(self.size)[self.rank]

    def check(self, outs):
        xs = [self.mine(x) for x in self.values(self.x, self.scales[0])]
        ws = self.values(self.weight, self.scales[1])
        want = sum(x @ w.t() for x, w in zip(xs, ws, strict=True))
        magnitude = sum(x.abs() @ w.abs().t() for x, w in zip(xs, ws, strict=True))
        if self.op == "avg":
            want, magnitude = want / self.size, magnitude / self.size
        self.close(outs[0], want, magnitude, self.bias)


class Mean(Scatter):
    op = "avg"


class AllReduce(Scatter):
    def operator(self, *args, **options):
        return ops.scaled_matmul_all_reduce(*args, **options)

    def mine(self, rows):
        return rows


KINDS = [Gather, GatherOfOne, Scatter, Mean, AllReduce]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("types", list(TYPES))
@pytest.mark.parametrize("shape", [*SHAPES, LARGE, WIDE, PIECES], ids=str)
@kinds
def test_values(comm, kind, shape, types, out_dtype, bias):
    case = kind(comm, *shape, types=TYPES[types], out_dtype=out_dtype, bias=bias)
    for _ in range(3):
        case.fill()
        case.check(case.run())


@pytest.mark.parametrize("types", list(TYPES))
def test_tiles_of_the_gather(comm, types):
    case = Gather(comm, *WIDE, types=TYPES[types], out_dtype=torch.bfloat16, bias=True)
    case.fill()
    case.run()  # memory is shared before the capture
    assert gather_tiles(case)[0] == (128, 224)  # of the whole weight


def has_kernel(case, name):
    kernels, _ = nodes_of(case.run)
    return any(name in kernel.name for kernel in kernels)


@pytest.mark.skipif(SHARES_GPU, reason="there one kernel sends all tiles")
@pytest.mark.parametrize("types", list(TYPES))
@pytest.mark.parametrize("shape", [LARGE, PIECES], ids=str)
def test_sums_of_pieces_that_copy_engines_bring(comm, shape, types):
    case = Scatter(comm, *shape, types=TYPES[types], out_dtype=torch.bfloat16, bias=True)
    case.fill()
    case.run()
    assert has_kernel(case, "fused_reduce_scatter_sum_kernel")
    assert not has_kernel(case, "fused_reduce_scatter_kernel")


@pytest.mark.parametrize("types", list(TYPES))
def test_a_gather_of_one_product_begins_in_its_kernel(comm, types):
    case = GatherOfOne(comm, *SOAKED, types=TYPES[types], out_dtype=torch.bfloat16, bias=True)
    case.fill()
    case.run()
    assert has_kernel(case, "fused_gather_kernel")
    assert not has_kernel(case, "begin_kernel")


@pytest.mark.parametrize("shape", FULL, ids=str)
@kinds
def test_full_shapes(comm, kind, shape):
    case = kind(comm, *shape, types=(E4M3, E4M3), out_dtype=torch.bfloat16, bias=True)
    case.fill()
    case.check(case.run())


@pytest.mark.parametrize("shape", [(300, 528, 1032), LARGE], ids=str)
@kinds
def test_the_same_bits_every_time(comm, shape, kind):
    case = kind(comm, *shape, types=(E4M3, E4M3), out_dtype=torch.bfloat16, bias=True)
    case.fill()
    first = [t.clone() for t in case.run()]
    for _ in range(5):
        for got, want in zip(case.run(), first, strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@kinds
def test_replays_with_changing_inputs_late_ranks_and_eager_calls(comm, seed, kind):
    shapes = [(200, 272, 520), (512, 1024, 1032), LARGE, WIDE, PIECES]
    pairs = zip(shapes, [*TYPES.values(), TYPES["4x4"], TYPES["4x5"]], strict=True)
    replay(comm, seed, [kind(comm, *s, types=types, out_dtype=torch.bfloat16, bias=True) for s, types in pairs])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "out_dtype"), [("4x4", torch.bfloat16), ("5x4", torch.float16), ("4x5", torch.bfloat16)], ids=str
)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [*((kind, SOAKED) for kind in KINDS), (Scatter, PIECES)],
    ids=[*(kind.__name__ for kind in KINDS), "Scatter in pieces"],
)
def test_ten_thousand_replays(comm, kind, shape, types, out_dtype):
    """No rank is delayed. Within the graph, inputs are made, the memory that the operator writes is poisoned, and
    results are compared with those of the copy engines' algorithm."""
    case = kind(comm, *shape, types=TYPES[types], out_dtype=out_dtype, bias=True)
    case.fill()
    source = torch.randn(case.x.shape, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    case.run()

    def step():
        source.mul_(1.7).add_(0.3).cos_()
        case.x.copy_(source)
        poison(case, case.run)
        got, want = case.run()[0].float(), case.run("p2p")[0].float()
        wrong.add_((~((got - want).abs() <= 0.02 * want.abs() + 0.01 * want.abs().amax())).sum())

    soak(step, wrong)


def test_what_it_cannot_do_is_an_error(comm):
    case = Scatter(comm, 128, 256, 256, types=(E4M3, E4M3), out_dtype=torch.bfloat16, bias=False)
    case.fill()
    x, w, one = case.x, case.weight, case.scales[0]

    def scatter(*args, **options):
        return ops.scaled_matmul_reduce_scatter(*args, comm, algorithm="fused", **options)

    with pytest.raises(to.UnsupportedError, match="use_split_accumulator=False"):
        scatter(x, one, w, one, use_split_accumulator=True)
    with pytest.raises(to.UnsupportedError, match=r"into torch\.float32"):
        scatter(x, one, w, one, out_dtype=torch.float32)
    blocks = Mode.BLOCK_1D_SCALING
    quantized = [ops.quantize(t.float(), blocks, E4M3)[:2] for t in (x, w)]
    with pytest.raises(to.UnsupportedError, match="one factor for each 8-bit operand"):
        scatter(*quantized[0], *quantized[1], scaling_mode=int(blocks))
    arguments = (x, one, w, one, comm)
    assert to.explain("scaled_matmul_reduce_scatter", *arguments, algorithm="fused").algorithm == "fused"
