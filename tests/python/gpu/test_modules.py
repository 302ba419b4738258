"""The parallel modules over NCCL with every algorithm, eagerly and in graphs, against the same on one rank in fp64;
and layers on 8-bit floats against fp64 products of the values that they quantize."""

import pytest
import torch

import torch_overlap as to
from torch_overlap import nn as tnn
from torch_overlap import ops
from torch_overlap.ops.gemm import ScalingMode

pytestmark = pytest.mark.gpu(2)

FEATURES, HEADS, HIDDEN, SEQUENCE, BATCH = 1024, 16, 2048, 1024, 2
ALGORITHMS = ["sequential", "pipelined", "p2p", "bulk", "fused", "low_latency", "auto"]
MODULES = {
    "mlp": lambda comm, **options: tnn.ParallelMLP(FEATURES, HIDDEN, comm, activation="swiglu", **options),
    # The gradient of a key's bias is 0 except for rounding.
    "attention": lambda comm, **options: tnn.ParallelSelfAttention(
        FEATURES, HEADS, comm, kv_heads=8, bias=False, **options
    ),
    "block": lambda comm, **options: tnn.ParallelTransformerBlock(
        FEATURES, HEADS, HIDDEN, comm, norm="rms", activation="gelu_tanh", bias=False, **options
    ),
}


@pytest.fixture(scope="module")
def alone(comm):
    mine = comm.split([comm.get_rank()], "alone")
    yield mine
    mine.finalize()


class Problem:
    """A module, and the same unsharded in fp64; inputs change."""

    def __init__(self, comm, alone, kind, algorithm, seed, **options):
        self.comm, self.generator = comm, torch.Generator(device="cuda").manual_seed(seed)
        self.module = MODULES[kind](comm, dtype=torch.bfloat16, algorithm=algorithm, **options)
        self.whole = MODULES[kind](alone, dtype=torch.float64, algorithm="sequential")
        state = {
            name: self.draw(*value.shape) * value.shape[-1] ** -0.5
            for name, value in tnn.full_state_dict(self.module).items()
        }
        tnn.load_full_state_dict(self.module, {name: value.bfloat16() for name, value in state.items()})
        tnn.load_full_state_dict(self.whole, {name: value.bfloat16().double() for name, value in state.items()})
        for parameter in self.module.parameters():
            if options.get("gradient_accumulation_fusion") and parameter.dim() == 2:
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        self.x = torch.zeros(SEQUENCE // comm.get_size(), BATCH, FEATURES, dtype=torch.bfloat16, device="cuda")
        self.factor = torch.zeros_like(self.x)
        self.x.requires_grad_()

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator, device="cuda", dtype=torch.float64)

    def part(self, t, dim=0):
        return t if dim is None else t.chunk(self.comm.get_size(), dim)[self.comm.get_rank()]

    def fill(self):
        self.all_x, self.all_factor = (self.draw(SEQUENCE, BATCH, FEATURES).bfloat16() for _ in range(2))
        with torch.no_grad():
            self.x.copy_(self.part(self.all_x))
            self.factor.copy_(self.part(self.all_factor))

    def step(self):
        self.module.zero_grad(set_to_none=True)
        self.x.grad = None
        for parameter in self.module.parameters():
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()
        y = self.module(self.x)
        (y * self.factor).sum().backward()
        grads = {name: getattr(p, "main_grad", p.grad) for name, p in self.module.named_parameters()}
        return {"y": y.detach(), "x": self.x.grad, **grads}

    def expected(self):
        self.whole.zero_grad(set_to_none=True)
        x = self.all_x.double().requires_grad_()
        y = self.whole(x)
        (y * self.all_factor.double()).sum().backward()
        split = tnn.split_parameters(self.module)
        want = {"y": self.part(y.detach()), "x": self.part(x.grad)}
        for name, parameter in self.whole.named_parameters():
            want[name] = self.part(parameter.grad, split[name][1] if name in split else None)
        return want

    def check(self, got):
        """Fails on all ranks alike: if only one stopped, the others would wait for it. Errors scale with a row's
        elements: the first rows of causal attention are means of few values."""
        wrong = {}
        for name, want in self.expected().items():
            error, size = (got[name].double() - want).abs(), want.square().mean(-1, keepdim=True).sqrt()
            wrong[name] = int((~(error <= 0.1 * (want.abs() + size))).sum())
        agree(self.comm, wrong)


def agree(comm, wrong):
    count = torch.tensor(sum(wrong.values()), device="cuda")
    comm.all_reduce(count, to.ReduceOp.SUM, async_op=False)
    assert count.item() == 0, f"elements that are wrong here: {wrong}"


def eager_and_captured(problem):
    for _ in range(2):
        problem.fill()
        problem.check(problem.step())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = problem.step()
    for replay in range(4):
        problem.fill()
        for t in got.values():
            t.fill_(float("nan"))
        if problem.comm.get_rank() == replay % problem.comm.get_size():
            torch.cuda._sleep(5_000_000)  # one rank is late
        graph.replay()
        problem.check(got)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", list(MODULES))
def test_eager_and_captured(comm, alone, seed, kind, algorithm):
    eager_and_captured(Problem(comm, alone, kind, algorithm, seed))


@pytest.mark.parametrize("algorithm", ["sequential", "p2p", "auto"])
@pytest.mark.parametrize("kind", list(MODULES))
def test_gathered_rows_are_kept(comm, alone, seed, kind, algorithm):
    eager_and_captured(Problem(comm, alone, kind, algorithm, seed, keep_gathered=True))


@pytest.mark.parametrize("algorithm", ["sequential", "p2p", "bulk", "fused", "auto"])
@pytest.mark.parametrize("kind", list(MODULES))
def test_products_add_to_main_grad(comm, alone, seed, kind, algorithm):
    eager_and_captured(Problem(comm, alone, kind, algorithm, seed, gradient_accumulation_fusion=True))


# --- 8-bit floats -----------------------------------------------------------------------------------------------------

SIZES = [HIDDEN, FEATURES]  # of the outputs of one gather
LAYERS = {
    "column": lambda comm, **options: tnn.ColumnParallelLinear(FEATURES, SIZES, comm, bias=False, **options),
    "column, kept": lambda comm, **options: tnn.ColumnParallelLinear(
        FEATURES, SIZES, comm, bias=False, keep_gathered=True, **options
    ),
    "row": lambda comm, **options: tnn.RowParallelLinear(HIDDEN, FEATURES, comm, bias=False, **options),
}


# Modes of rows, and of weights. Each rank has whole blocks, so that the blocks of all ranks are those of the whole.
MODES = {"current": (ScalingMode.CURRENT_TENSOR_SCALING,) * 2, "delayed": (ScalingMode.CURRENT_TENSOR_SCALING,) * 2,
         "mxfp8": (ScalingMode.MXFP8_1D_SCALING,) * 2,
         "block": (ScalingMode.BLOCK_1D_SCALING, ScalingMode.BLOCK_2D_SCALING)}  # fmt: skip


class Float8Problem:
    """A layer on 8-bit floats, and its products in fp64 of the same 8-bit values; inputs change."""

    def __init__(self, comm, kind, scaling, algorithm, seed):
        self.comm, self.generator = comm, torch.Generator(device="cuda").manual_seed(seed)
        self.is_column = kind != "row"
        self.recipe = tnn.Float8Recipe(scaling)
        self.layer = LAYERS[kind](comm, dtype=torch.bfloat16, algorithm=algorithm, fp8=self.recipe)
        state = tnn.full_state_dict(self.layer)
        weights = [name for name in state if name.startswith("weight")]
        state |= {name: self.draw(*state[name].shape) for name in weights}
        tnn.load_full_state_dict(self.layer, state)
        self.weight = torch.cat([state[name] for name in weights])
        self.x = torch.zeros_like(self.own_x(self.draw(SEQUENCE, BATCH, self.weight.size(1)))).requires_grad_()
        self.factor = torch.zeros_like(self.own_y(self.draw(SEQUENCE, BATCH, self.weight.size(0))))

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator, device="cuda").bfloat16()

    def part(self, t, dim):
        return t.chunk(self.comm.get_size(), dim)[self.comm.get_rank()]

    def own_x(self, x):
        return self.part(x, 0 if self.is_column else -1)

    def own_features(self, t, dim):
        return torch.cat([self.part(one, dim) for one in t.split(SIZES, dim)], dim)

    def own_y(self, y):
        return self.own_features(y, -1) if self.is_column else self.part(y, 0)

    def own_weight(self, w):
        return self.own_features(w, 0) if self.is_column else self.part(w, 1)

    def fill(self):
        """The same, with the scales: those of delayed scaling change in a step."""
        self.all_x = self.draw(SEQUENCE, BATCH, self.weight.size(1))
        self.all_factor = self.draw(SEQUENCE, BATCH, self.weight.size(0))
        with torch.no_grad():
            self.x.copy_(self.own_x(self.all_x))
            self.factor.copy_(self.own_y(self.all_factor))
        state = self.layer.float8
        self.scales = [*state.forward_scale.clone().split(1), state.backward_scale.clone()] if state.started else None

    def step(self):
        self.layer.zero_grad(set_to_none=True)
        self.x.grad = None
        y = self.layer(self.x)
        y = torch.cat(y, -1) if self.is_column else y
        y.backward(self.factor)
        tnn.update_float8_scales(self.layer)
        weight_grad = torch.cat([w.grad for w in self.layer.parameters()])
        return {"y": y.detach(), "x": self.x.grad, "weight": weight_grad}

    def values(self, x, which):
        """Returns the values in fp64 that the quantized x [rows, k] represents. which: activations, weights or
        gradients."""
        dtype = self.recipe.backward_dtype if which == 2 else self.recipe.forward_dtype
        mode = MODES[self.recipe.scaling][which == 1]
        if self.scales is None:
            data, scale_inv, *_ = ops.quantize(x.contiguous(), mode, dtype)
        else:
            data, scale_inv, *_ = ops.quantize_delayed(x.contiguous(), self.scales[which], dtype)
        return ops.dequantize(data, scale_inv, mode).double()

    def expected(self):
        x, grad, weight = self.all_x.flatten(0, 1), self.all_factor.flatten(0, 1), self.weight
        y = self.values(x, 0) @ self.values(weight, 1).t()
        dx = self.values(grad, 2) @ self.values(weight.t(), 1).t()
        dw = self.values(grad.t(), 2) @ self.values(x.t(), 0).t()
        return {"y": self.own_y(y.view_as(self.all_factor)), "x": self.own_x(dx.view_as(self.all_x)),
                "weight": self.own_weight(dw)}  # fmt: skip

    def check(self, got):
        """The 8-bit values are the same, except that a last bit of the scale changes a few. Results are bfloat16,
        and so are the partial sums of a reduce-scatter: 2^-9 of each. Hopper accumulates forward products in about
        14 bits: 2^-13 of sum |a b|, which is 0.64 sqrt(k) < 30 times the result's mean square, in steps that may all
        err to one side. A scale of another block is wrong by a factor of 2; a row of another rank is entirely wrong."""
        wrong = {}
        for name, want in self.expected().items():
            error, size = (got[name].double() - want).abs(), want.square().mean(-1, keepdim=True).sqrt()
            wrong[name] = int((~(error <= 0.05 * (want.abs() + size))).sum())
        agree(self.comm, wrong)


@pytest.mark.parametrize("algorithm", ["sequential", "pipelined", "p2p", "bulk", "auto"])
@pytest.mark.parametrize("scaling", list(MODES))
@pytest.mark.parametrize("kind", list(LAYERS))
def test_8_bit_layers_eager_and_captured(comm, seed, kind, scaling, algorithm):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs tensor cores of 8-bit floats")
    eager_and_captured(Float8Problem(comm, kind, scaling, algorithm, seed))
