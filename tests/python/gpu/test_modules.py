"""The parallel modules over NCCL by every algorithm, eagerly and in graphs: against the same on one rank in fp64."""

import pytest
import torch

import torch_overlap as to
from torch_overlap import nn as tnn

pytestmark = pytest.mark.gpu(2)

FEATURES, HEADS, HIDDEN, SEQUENCE, BATCH = 1024, 16, 2048, 1024, 2
ALGORITHMS = ["sequential", "chunked", "ring", "bulk", "fused", "auto"]
MODULES = {
    "mlp": lambda comm, **options: tnn.ParallelMLP(FEATURES, HIDDEN, comm, activation="swiglu", **options),
    # The gradient of a key's bias is 0 but for roundings.
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
    """A module, and the same whole in fp64; inputs that change."""

    def __init__(self, comm, alone, kind, algorithm, seed):
        self.comm, self.generator = comm, torch.Generator(device="cuda").manual_seed(seed)
        self.module = MODULES[kind](comm, dtype=torch.bfloat16, algorithm=algorithm)
        self.whole = MODULES[kind](alone, dtype=torch.float64, algorithm="sequential")
        state = {
            name: self.draw(*value.shape) * value.shape[-1] ** -0.5
            for name, value in tnn.full_state_dict(self.module).items()
        }
        tnn.load_full_state_dict(self.module, {name: value.bfloat16() for name, value in state.items()})
        tnn.load_full_state_dict(self.whole, {name: value.bfloat16().double() for name, value in state.items()})
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
        y = self.module(self.x)
        (y * self.factor).sum().backward()
        tnn.sync_replicated_grads(self.module)
        return {"y": y.detach(), "x": self.x.grad, **{name: p.grad for name, p in self.module.named_parameters()}}

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
        """On all ranks alike: who stopped alone would leave the others waiting. Errors scale with a row's elements:
        the first rows of causal attention are means of few values."""
        wrong = {}
        for name, want in self.expected().items():
            error, size = (got[name].double() - want).abs(), want.square().mean(-1, keepdim=True).sqrt()
            wrong[name] = int((~(error <= 0.1 * (want.abs() + size))).sum())
        count = torch.tensor(sum(wrong.values()), device="cuda")
        self.comm.all_reduce(count, to.ReduceOp.SUM, async_op=False)
        assert count.item() == 0, f"elements that are wrong here: {wrong}"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", list(MODULES))
def test_eager_and_captured(comm, alone, seed, kind, algorithm):
    problem = Problem(comm, alone, kind, algorithm, seed)
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
        if comm.get_rank() == replay % comm.get_size():
            torch.cuda._sleep(5_000_000)  # one rank is late
        graph.replay()
        problem.check(got)
