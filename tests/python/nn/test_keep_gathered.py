"""keep_gathered: the same values and gradients without the second gather."""

import copy

import pytest
import torch

import torch_overlap.nn as tnn
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
FP8 = [None, "current", "delayed", "mxfp8", "block"]


def recipe(fp8):
    return None if fp8 is None else tnn.Float8Recipe(fp8)


def noted(comm, names):
    comm.register_pre_hook(lambda name, *_: names.append(name.name))


def step(layer, x, used):
    """Returns the outputs, and the gradients of their loss over `used`."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    outputs = layer(leaf)
    sum(outputs[i].square().mean() for i in used).backward()
    return [*[y.detach() for y in outputs], leaf.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["sequential", "pipelined", "auto"])
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dim", [0, 1])
def test_values_and_gradients_are_the_same(seed, size, algorithm, fp8, dim):
    shape, dtype = (16, 2, 32) if dim == 0 else (2, 16, 32), torch.float32 if fp8 else torch.float64

    def rank(comm):
        drops = tnn.ColumnParallelLinear(32, [32 * size, 96 * size], comm, gather_dim=dim, algorithm=algorithm,
                                         fp8=recipe(fp8), dtype=dtype)  # fmt: skip
        keeps = copy.deepcopy(drops)
        keeps.keep_gathered = True
        generator = torch.Generator().manual_seed(seed + comm.get_rank())
        with torch.no_grad():
            for p in drops.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=dtype))
        keeps.load_state_dict(drops.state_dict())
        x = torch.randn(*shape, generator=generator, dtype=dtype)
        for used in ((0, 1), (1,), (0,)):
            wanted, got = step(drops, x, used), step(keeps, x, used)
            for want, value in zip(wanted, got, strict=True):
                assert (want is None) == (value is None)
                if want is not None:
                    torch.testing.assert_close(value, want, rtol=1e-6, atol=1e-6)

    run_ranks(rank, size, backend="local")


class Drop(torch.autograd.Function):
    """The identity, without a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("fp8", FP8)
def test_no_gradient_comes_back(seed, fp8):
    def rank(comm):
        layer = tnn.ColumnParallelLinear(32, [64], comm, keep_gathered=True, fp8=recipe(fp8))
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        Drop.apply(layer(x)[0]).sum().backward()
        assert all(grad is None or not grad.any() for grad in (x.grad, *(p.grad for p in layer.parameters())))

    run_ranks(rank, 2, backend="local")


@pytest.mark.parametrize("fp8", [None, "current", "delayed"])
def test_one_gather_less(seed, fp8):
    def rank(comm):
        names = []
        noted(comm, names)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
        counts = []
        for keep in (False, True):
            layer = tnn.ColumnParallelLinear(32, [96], comm, keep_gathered=keep, algorithm="sequential",
                                             fp8=recipe(fp8))  # fmt: skip
            step(layer, x, (0,))
            names.clear()
            step(layer, x, (0,))
            counts.append((names.count("all_gather_single"), names.count("reduce_scatter_single")))
        assert counts == [(2, 1), (1, 1)]

    run_ranks(rank, 2, backend="local")


@pytest.mark.parametrize("scaling", ["mxfp8", "block"])
def test_columns_of_blocks_are_gathered_forward(seed, scaling):
    """Gathers data and scales of the rows, and of the columns: in forward if they are kept, otherwise half of them
    in backward."""

    def rank(comm):
        names = []
        noted(comm, names)
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        counts = []
        for keep in (False, True):
            layer = tnn.ColumnParallelLinear(32, 64, comm, keep_gathered=keep, algorithm="sequential",
                                             fp8=recipe(scaling))  # fmt: skip
            names.clear()
            y = layer(x)
            forward = names.count("all_gather_single")
            y.sum().backward()
            counts.append((forward, names.count("all_gather_single") - forward))
        assert counts == [(2, 2), (4, 0)]

    run_ranks(rank, 2, backend="local")


def test_nothing_is_kept_for_weights_without_gradients(seed):
    def rank(comm):
        layer = tnn.ColumnParallelLinear(32, 96, comm, keep_gathered=True, algorithm="sequential").requires_grad_(False)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            layer(x)
        assert (32, 32) not in saved

    run_ranks(rank, 2, backend="local")


def compiled(comm, seed, fp8):
    torch._dynamo.reset()
    torch.manual_seed(seed)
    module = tnn.ParallelTransformerBlock(64, 2, 64, comm, keep_gathered=True, fp8=recipe(fp8))
    twin = copy.deepcopy(module)
    run = torch.compile(twin, backend="aot_eager", fullgraph=True)
    x = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(seed + comm.get_rank()))
    results = []
    for one, parameters in ((module, module), (run, twin)):
        leaf = x.clone().requires_grad_()
        y = one(leaf)
        y.square().mean().backward()
        results.append([y.detach(), leaf.grad, *(p.grad for p in parameters.parameters())])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fp8", [None, "current", "block"])  # "mxfp8" is compiled by test_float8_state
def test_compile_fullgraph(seed, fp8):
    run_ranks(compiled, 2, seed, fp8, backend="gloo", timeout=280)
