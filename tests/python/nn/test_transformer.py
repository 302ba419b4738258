"""MLP, attention and block, compared with the same in plain torch, unsharded, in fp64."""

import functools

import pytest
import torch
import torch.nn.functional as F

from torch_overlap import nn as tnn
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
SIZES = [1, 2, 3, 4]
FEATURES, SEQUENCE, BATCH, HEADS, HIDDEN = 24, 12, 2, 12, 36


def part(tensor, dim, comm):
    return tensor if dim is None else tensor.detach().chunk(comm.get_size(), dim)[comm.get_rank()]


def close(got, want):
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-8, atol=1e-8)


def linear(state, x, name, index=""):
    return F.linear(x, state[f"{name}.weight{index}"], state.get(f"{name}.bias{index}"))


def mlp(state, x, activation, prefix=""):
    h = linear(state, x, f"{prefix}up", 0)
    if activation == "swiglu":
        return linear(state, F.silu(h) * linear(state, x, f"{prefix}up", 1), f"{prefix}down")
    return linear(state, F.gelu(h, approximate="tanh" if activation == "gelu_tanh" else "none"), f"{prefix}down")


def attention(state, x, *, heads, kv_heads, causal, dim, rotate=None, prefix=""):
    """Computes attention by the formula, head by head."""
    q, k, v = (linear(state, x, f"{prefix}qkv", i).unflatten(-1, (n, -1)) for i, n in
               enumerate((heads, kv_heads, kv_heads)))  # fmt: skip
    if rotate is not None:
        q, k = rotate(q), rotate(k)
    outputs = []
    for head in range(heads):
        mine = [t[..., h, :].transpose(0, 1) if dim == 0 else t[..., h, :]
                for t, h in ((q, head), (k, head * kv_heads // heads), (v, head * kv_heads // heads))]  # fmt: skip
        scores = mine[0] @ mine[1].mT / mine[0].size(-1) ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        y = scores.softmax(-1) @ mine[2]
        outputs.append(y.transpose(0, 1) if dim == 0 else y)
    return linear(state, torch.cat(outputs, -1), f"{prefix}out")


def block(state, x, *, norm, activation, **options):
    def normed(x, name):
        weight, bias = state[f"{name}.weight"], state.get(f"{name}.bias")
        if norm == "layer":
            return F.layer_norm(x, (FEATURES,), weight, bias, 1e-3)
        return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight

    x = x + attention(state, normed(x, "attention_norm"), prefix="attention.", **options)
    return x + mlp(state, normed(x, "mlp_norm"), activation, prefix="mlp.")


def randomize(module, seed):
    """Sets random parameters, the same model for any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    state = tnn.full_state_dict(module)
    tnn.load_full_state_dict(
        module, {key: torch.randn(value.shape, generator=generator, dtype=value.dtype) for key, value in state.items()}
    )


def compare(problem, seed, size, make, reference, *, sequence_parallel, dim):
    data = problem(seed)
    shape = (SEQUENCE, BATCH) if dim == 0 else (BATCH, SEQUENCE)
    x, factor = data(*shape, FEATURES), data(*shape, FEATURES)
    rows = dim if sequence_parallel else None

    def rank(comm):
        module = make(comm, sequence_parallel=sequence_parallel, sequence_dim=dim, dtype=torch.float64)
        randomize(module, seed)
        state = {key: t.clone().requires_grad_() for key, t in tnn.full_state_dict(module).items()}
        whole = x.clone().requires_grad_()
        want = reference(state, whole)
        (factor * want * want).sum().backward()

        mine = part(x, rows, comm).clone().requires_grad_()
        got = module(mine)
        close(got.detach(), part(want.detach(), rows, comm))
        (part(factor, rows, comm) * got * got).sum().backward()
        close(mine.grad, part(whole.grad, rows, comm))
        split = tnn.split_parameters(module)
        for name, parameter in module.named_parameters():
            close(parameter.grad, part(state[name].grad, split[name][1] if name in split else None, comm))

    run_ranks(rank, size, backend="local")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swiglu"])
@pytest.mark.parametrize(("sequence_parallel", "dim"), [(True, 0), (True, 1), (False, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_mlp(problem, seed, size, activation, sequence_parallel, dim, bias):
    make = functools.partial(tnn.ParallelMLP, FEATURES, HIDDEN, activation=activation, bias=bias)
    reference = functools.partial(mlp, activation=activation)
    compare(problem, seed, size, make, reference, sequence_parallel=sequence_parallel, dim=dim)


def scaled_by_position(dim):
    """A stand-in for a rotary embedding: it needs the whole sequence, in order."""

    def rotate(t):
        shape = [1] * t.dim()
        shape[dim] = SEQUENCE
        return t * torch.linspace(0.5, 1.5, SEQUENCE, dtype=t.dtype).view(shape)

    return rotate


class Rotated(tnn.ParallelSelfAttention):
    def forward(self, x):
        return super().forward(x, scaled_by_position(self.sequence_dim))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kv_heads", [12, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sequence_parallel", "dim"), [(True, 0), (True, 1), (False, 0), (False, 1)])
def test_attention(problem, seed, size, kv_heads, causal, sequence_parallel, dim):
    if kv_heads % size != 0:
        kv_heads = 12 // size * size
    make = functools.partial(Rotated, FEATURES, HEADS, kv_heads=kv_heads, causal=causal, bias=causal)
    reference = functools.partial(
        attention, heads=HEADS, kv_heads=kv_heads, causal=causal, dim=dim, rotate=scaled_by_position(dim)
    )
    compare(problem, seed, size, make, reference, sequence_parallel=sequence_parallel, dim=dim)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("norm", "activation", "bias"), [("layer", "gelu", True), ("layer", "gelu_tanh", False),
                                                          ("rms", "swiglu", False)])  # fmt: skip
@pytest.mark.parametrize(("sequence_parallel", "dim"), [(True, 0), (True, 1), (False, 1)])
def test_block(problem, seed, size, norm, activation, bias, sequence_parallel, dim):
    options = {"norm": norm, "activation": activation}
    make = functools.partial(tnn.ParallelTransformerBlock, FEATURES, HEADS, HIDDEN, kv_heads=HEADS, head_dim=3,
                             bias=bias, norm_eps=1e-3, **options)  # fmt: skip
    reference = functools.partial(block, heads=HEADS, kv_heads=HEADS, causal=True, dim=dim, **options)
    compare(problem, seed, size, make, reference, sequence_parallel=sequence_parallel, dim=dim)


class WithLoss(torch.nn.Module):
    """A block, a vocabulary-parallel head and its loss."""

    def __init__(self, comm, sequence_parallel):
        super().__init__()
        self.comm = comm
        self.block = tnn.ParallelTransformerBlock(FEATURES, HEADS, HIDDEN, comm, sequence_parallel=sequence_parallel)
        self.head = tnn.ColumnParallelLinear(FEATURES, 6, comm, sequence_parallel=sequence_parallel)

    def forward(self, x):
        logits = self.head(self.block(x))
        targets = torch.zeros(logits.shape[:-1], dtype=torch.int64)
        return tnn.vocabulary_parallel_cross_entropy(logits, targets, self.comm, label_smoothing=0.1)


def exported(comm, seed, sequence_parallel):
    """The exported program has the gradients of the module."""
    module = WithLoss(comm, sequence_parallel).double()
    randomize(module, seed)
    x = torch.randn(SEQUENCE, BATCH, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x = part(x, 0 if sequence_parallel else None, comm).clone()
    with torch.no_grad():
        torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), module(x))
    program = torch.export.export(module, (x,)).module()
    results = []
    for one in (module, program):
        leaf = x.clone().requires_grad_()
        loss = one(leaf)
        loss.backward()
        grads = {name: p.grad for name, p in one.named_parameters()}
        results.append({"loss": loss.detach(), "x": leaf.grad} | grads)
        one.zero_grad()
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_exported(seed, sequence_parallel):
    run_ranks(exported, 2, seed, sequence_parallel)


def compiled(comm, seed, sequence_parallel, autocast):
    torch._dynamo.reset()
    module = tnn.ParallelTransformerBlock(FEATURES, HEADS, HIDDEN, comm, activation="swiglu", kv_heads=4,
                                          sequence_parallel=sequence_parallel, algorithm="pipelined",
                                          require_fused=True)  # fmt: skip
    module = module if autocast else module.double()
    randomize(module, seed)
    run = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(SEQUENCE, BATCH, FEATURES, generator=torch.Generator().manual_seed(seed))
    x = x.to(module.mlp.up.weights[0].dtype)
    x = part(x, 0 if sequence_parallel else None, comm)
    results = []
    for one in (module, run):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = one(leaf)
        y.to(x.dtype).square().mean().backward()
        results.append({"y": y.detach(), "x": leaf.grad} | {name: p.grad for name, p in module.named_parameters()})
    # Ten roundings to bfloat16: eager and compiled code round at other places.
    tolerance = {"rtol": 4e-2, "atol": 4e-2} if autocast else {"rtol": 1e-9, "atol": 1e-9}
    wanted, found = results
    for name, want in wanted.items():
        got = found[name]
        assert got.dtype == want.dtype
        # A bias of the key changes nothing: its gradient is the rounding of that of the weight, summed.
        like = wanted["attention.qkv.weight1"] if name == "attention.qkv.bias1" else want
        scale = max(1.0, like.abs().max().item())
        torch.testing.assert_close(got / scale, want / scale, **tolerance)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_compile_fullgraph(seed, sequence_parallel, autocast):
    run_ranks(compiled, 2, seed, sequence_parallel, autocast, backend="gloo", timeout=280)


ERRORS = {
    "ParallelSelfAttention: expected heads divisible by the group size 2, got 3. A head stays whole on one rank: add":
        lambda c: tnn.ParallelSelfAttention(12, 3, c),
    "ParallelSelfAttention: expected kv_heads divisible by the group size 2, got 1. A head .* repeat heads of key":
        lambda c: tnn.ParallelSelfAttention(12, 4, c, kv_heads=1),
    "ParallelSelfAttention: expected heads divisible by kv_heads 4, got 6. Each head of key and value serves":
        lambda c: tnn.ParallelSelfAttention(12, 6, c, kv_heads=4),
    "ParallelSelfAttention: expected features divisible by heads 4 without head_dim, got 13. Pass head_dim":
        lambda c: tnn.ParallelSelfAttention(13, 4, c),
    "ParallelSelfAttention: expected sequence_dim 0 or 1, got 2":
        lambda c: tnn.ParallelSelfAttention(12, 4, c, sequence_dim=2),
    "ParallelMLP: expected hidden divisible by the group size 2, got 7": lambda c: tnn.ParallelMLP(4, 7, c),
    "ParallelMLP: expected activation to be one of gelu, gelu_tanh, swiglu, got 'relu'":
        lambda c: tnn.ParallelMLP(4, 8, c, activation="relu"),
    "ParallelTransformerBlock: expected norm to be one of layer, rms, got 'batch'":
        lambda c: tnn.ParallelTransformerBlock(4, 2, 8, c, norm="batch"),
}  # fmt: skip


@pytest.mark.parametrize("message", ERRORS)
def test_a_mistake_is_an_error_that_says_what_to_do(message):
    def rank(comm):
        with pytest.raises(ValueError, match=message):
            ERRORS[message](comm)

    run_ranks(rank, 2, backend="local")


def double(_, args, result=None):
    if result is None:
        return (2 * args[0],)
    assert isinstance(result, torch.Tensor)
    return 2 * result


def double_gradients(_, grads, result_grads):
    assert len(result_grads) == 1
    return tuple(2 * grad for grad in grads)


def patch(norm):
    norm.forward = torch.sin


CHANGES = {
    "forward_pre_hook": lambda norm: norm.register_forward_pre_hook(double),
    "forward_hook": lambda norm: norm.register_forward_hook(double),
    "full_backward_hook": lambda norm: norm.register_full_backward_hook(double_gradients),
    "global hook": lambda norm: torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, result: double(module, args, result) if module is norm else None
    ),
    "forward": patch,
}


@pytest.mark.parametrize("change", CHANGES)
def test_hooks_of_a_norm_see_what_those_of_torch_see(seed, change):
    def run(comm, is_ours):
        made = tnn.ParallelTransformerBlock(8, 2, 12, comm, norm="rms", norm_eps=1e-3, dtype=torch.float64)
        randomize(made, seed)
        if not is_ours:
            weight = made.mlp_norm.weight
            made.mlp_norm = torch.nn.RMSNorm(8, eps=1e-3, dtype=torch.float64)
            with torch.no_grad():
                made.mlp_norm.weight.copy_(weight)
        handle = CHANGES[change](made.mlp_norm)
        x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        y = made(x)
        y.square().sum().backward()
        if handle is not None:
            handle.remove()
        return y.detach(), x.grad

    def rank(comm):
        for got, want in zip(run(comm, True), run(comm, False), strict=True):
            close(got, want)

    run_ranks(rank, 1, backend="local")
