"""Sharded values under torch.compile(fullgraph=True): values and gradients as in eager mode, graphs, guards.

Tests that need real ranks run on gloo processes: the state of a compiler belongs to its process.
"""

import contextlib
import os
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_overlap.mesh import (
    P,
    Sharded,
    all_gather,
    all_reduce,
    all_to_all,
    assume_partial,
    axis_index,
    broadcast,
    choosing,
    connect,
    from_local,
    gather_all_axes,
    pmean,
    ppermute,
    reduce_scatter,
    reshard,
    shard,
    shard_module,
)
from torch_overlap.testing import run_ranks, torch_is_before

pytestmark = pytest.mark.timeout(300)

# Attention of doubles: Inductor calls the CPU's backward with a float instead of a double, also without ranks.
INDUCTOR_DTYPE = torch.float32

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def inductor(test):
    """The C++ compilation is long: only `make stress` runs it."""
    test = pytest.mark.skipif("TORCH_OVERLAP_STRESS" not in os.environ, reason="make stress")(test)
    return pytest.mark.stress(pytest.mark.timeout(1800)(test))


class Values:
    """The same fresh values on every rank, with their layouts."""

    def __init__(self, mesh, seed):
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=g)  # noqa: E731
        self.mesh, self.plain = mesh, draw(4, 6)
        self.x = shard(draw(4, 6), mesh, P("tp")).requires_grad_()
        self.w = shard(draw(6, 6), mesh, P(None, "tp")).requires_grad_()
        self.v = shard(draw(6, 6), mesh, P("tp")).requires_grad_()
        self.b = shard(draw(6), mesh).requires_grad_()
        self.tokens = shard(torch.randint(0, 6, (4, 3), generator=g), mesh, P("tp"))
        self.classes = shard(torch.randint(0, 6, (4,), generator=g), mesh, P("tp"))

    def leaves(self):
        return [t.local for t in (self.x, self.w, self.v, self.b)]


CASES = {
    # Communication
    "shard": lambda s: shard(s.plain, s.mesh, P("tp")) * s.x,
    "shard again": lambda s: shard(s.x, s.mesh, P(None, "tp")),
    "reshard": lambda s: reshard(s.x, P(None, "tp")),
    "lists as an index": lambda s: s.x[[0, -1], [1, 2]] + s.x[[2, 1]][:, 0],
    "reshard method": lambda s: s.x.reshard(None),
    "reshard to a layout": lambda s: reshard(s.w, (s.x * 2).layout),
    "reshard to text": lambda s: s.x.reshard("[],[tp]"),
    "all_reduce": lambda s: all_reduce(s.x, "sum", "tp"),
    "all_reduce partial": lambda s: all_reduce(torch.matmul(s.w, s.v)),
    "pmean": lambda s: pmean(s.x, "tp"),
    "all_gather": lambda s: all_gather(s.x, 0),
    "gather_all_axes": lambda s: gather_all_axes(torch.matmul(s.w, s.v)),
    "reduce_scatter": lambda s: reduce_scatter(s.x, 1, "tp"),
    "all_to_all": lambda s: all_to_all(s.x, 1, 0),
    "all_to_all stacked": lambda s: all_to_all(s.x, 1, 0, tiled=False),
    "ppermute": lambda s: ppermute(s.x, [(0, 1), (1, 0)]),
    "axis_index": lambda s: axis_index(s.mesh, "tp") * s.x.sum(),
    "broadcast": lambda s: broadcast(s.b, 1) * 2,
    "assume_partial": lambda s: all_reduce(assume_partial(all_gather(s.x, 0), "tp")),
    "from_local": lambda s: from_local(s.x.local * 2, s.mesh, P("tp")),
    "full": lambda s: s.x.full() * 2,
    # Products
    "matmul": lambda s: torch.matmul(s.x, s.w),
    "matmul method": lambda s: s.x.matmul(s.w),
    "two products": lambda s: torch.matmul(torch.relu(torch.matmul(s.x, s.w)), s.v) + s.b,
    "partial product": lambda s: torch.matmul(s.w, s.v),
    "partial and nonlinear": lambda s: torch.exp(torch.matmul(s.w, s.v)) + s.b,
    "linear": lambda s: F.linear(s.x, s.w, s.b),
    "linear of a transpose": lambda s: F.linear(s.w, s.v.T, s.b) + 1,
    "anchor": lambda s: torch.matmul(s.x.anchor(), s.w),
    # Elementwise, reductions
    "elementwise": lambda s: F.relu(s.x) * 2 + s.x.exp() - 1.5 / (s.x * s.x + 1),
    "operators": lambda s: (1 - s.x) ** 2 + abs(-s.x) + (+s.x) / 2,
    "comparison": lambda s: torch.where((s.x > 0) & (s.x < 1), s.x, 0.0),
    "masked": lambda s: s.x.masked_fill(s.x > 0, 3.0),
    "sum": lambda s: s.x.sum(0),
    "sum by name": lambda s: s.x.sum(dim=0, keepdim=True),
    "mean": lambda s: s.x.mean(),
    "amax": lambda s: s.x.amax(1),
    "max": lambda s: s.x.max(1)[0],
    "std": lambda s: s.x.std(0),
    # Views
    "view": lambda s: s.x.view(4, 2, 3).transpose(0, 1).reshape(-1),
    "shapes": lambda s: s.x.view(s.x.shape[0] * 2, -1) * s.x.size(1) + s.x.dim(),
    "view as another": lambda s: (s.x * 2).view((s.x + 1).shape),
    "permute": lambda s: s.x.unflatten(1, (2, 3)).permute(2, 0, 1).flatten(1),
    "T": lambda s: s.x.T,
    "index": lambda s: s.x[1:3, None, ..., ::2],
    "cat": lambda s: torch.cat([s.x, s.x * 2], 1),
    "cat of partial and whole": lambda s: torch.cat([torch.matmul(s.w, s.v), s.b[None]]),
    "cat of parts": lambda s: torch.cat(list(s.x.chunk(2, 1)), 0),
    "stack": lambda s: torch.stack([s.x, s.x * 2], dim=1),
    "unbind": lambda s: torch.stack(list(s.x.unbind(1))),
    "half turn": lambda s: s.x * s.b + torch.cat([-s.x[:, 3:], s.x[:, :3]], -1),
    "unpack": lambda s: _first(*s.x.view(4, 2, 3).transpose(0, 1)),
    "iterate": lambda s: sum([row * i for i, row in enumerate(s.w)]),
    "split": lambda s: torch.stack(list(s.x.split(3, 1))),
    "gather": lambda s: torch.gather(s.x, 1, s.tokens),
    "gather along a sharded dimension": lambda s: torch.gather(s.w, 1, s.classes[:, None]),
    "index_select": lambda s: torch.index_select(s.x, 1, s.classes),
    "index_select of sharded rows": lambda s: torch.index_select(s.v, 0, s.classes),
    "cast": lambda s: s.x.to(torch.float32),
    # Functions of models
    "softmax": lambda s: F.softmax(s.x, -1),
    "softmax of a sharded dimension": lambda s: F.softmax(s.w, -1),
    "layer_norm": lambda s: F.layer_norm(s.x, (6,), s.b, s.b),
    "layer_norm of a sharded dimension": lambda s: F.layer_norm(s.w, (6,)),
    "rms_norm": lambda s: F.rms_norm(s.x, (6,), s.b, 1e-5),
    "rms_norm of a sharded dimension": lambda s: F.rms_norm(s.w, (6,), s.b, eps=1e-3),
    "conv1d": lambda s: F.conv1d(s.x.view(4, 2, 3), s.w.view(6, 2, 3), s.b, padding=1),
    "conv2d": lambda s: F.conv2d(s.x.view(4, 1, 2, 3), s.v.view(6, 1, 3, 2), padding=(1, 0)),
    "embedding": lambda s: F.embedding(s.tokens, s.v),
    "cross_entropy": lambda s: F.cross_entropy(s.x, s.classes),
    "cross_entropy of sharded classes": lambda s: F.cross_entropy(s.w, s.classes.repeat(2)[:6]),
    "attention": lambda s: F.scaled_dot_product_attention(*[s.x.view(4, 1, 2, 3)] * 3, is_causal=True),
}

# Dynamo breaks the graph at the first form and traces the second.
GRAPH_BREAKS = {
    "@": (lambda s: (s.x * 2) @ s.w + s.b, lambda s: torch.matmul(s.x * 2, s.w) + s.b),
    "cat of a tuple": (lambda s: torch.cat((s.x, s.x * 2), dim=-1), lambda s: torch.cat([s.x, s.x * 2], dim=-1)),
    "stack of results": (
        lambda s: torch.stack(s.x.unbind(1), dim=1) * 2,
        lambda s: torch.stack(list(s.x.unbind(1)), dim=1) * 2,
    ),
    "rms_norm without a weight": (
        lambda s: F.rms_norm(s.x, (6,), eps=1e-3) * s.b,
        lambda s: F.rms_norm(s.x, (6,), shard(torch.ones(6, dtype=torch.float64), s.mesh), eps=1e-3) * s.b,
    ),
}


def _first(a, b):
    return a - 2 * b


def locals_of(value):
    if isinstance(value, list | tuple):
        return [locals_of(item) for item in value]
    return value.local if isinstance(value, Sharded) else value


def check(function, values, compiled):
    """Value, layout and gradients of the compiled function are those of the function."""
    want, got = function(values), compiled(values)
    if isinstance(want, Sharded):
        assert got.spec is want.spec
    torch.testing.assert_close(locals_of(got), locals_of(want))
    ones = torch.randn_like(locals_of(want))
    assert locals_of(got).requires_grad
    assert locals_of(want).requires_grad
    grads = [
        torch.autograd.grad(locals_of(y), values.leaves(), ones, allow_unused=True, materialize_grads=True)
        for y in (got, want)
    ]
    torch.testing.assert_close(grads[0], grads[1], check_dtype=False)


def cases_rank(comm, names, backend, seed):
    with closing(connect({"tp": 2}, comm)) as mesh:
        for name in names:
            torch._dynamo.reset()
            values = Values(mesh, seed)
            compiled = torch.compile(CASES[name], backend=backend, fullgraph=True)
            try:
                check(CASES[name], values, compiled)
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error


NAMES = list(CASES)
GROUPS = [NAMES[i::4] for i in range(4)]


# "aot_eager" compiles what "eager" runs: a quarter of the cases is enough for the latter.
@pytest.mark.parametrize(
    ("names", "backend"),
    [pytest.param(names, "aot_eager", id=f"{i}-aot_eager") for i, names in enumerate(GROUPS)]
    + [pytest.param(GROUPS[0], "eager", id="0-eager")],
)
def test_values_and_gradients(names, backend, seed):
    run_ranks(cases_rank, 2, names, backend, seed, backend="gloo", timeout=280)


Unsupported = torch._dynamo.exc.Unsupported


def graph_breaks_rank(comm, seed):
    with closing(connect({"tp": 2}, comm)) as mesh:
        for name, (function, traceable) in GRAPH_BREAKS.items():
            torch._dynamo.reset()
            values = Values(mesh, seed)
            with pytest.raises(Unsupported) if torch_is_before("2.15") else suppress(Unsupported):
                torch.compile(function, backend="aot_eager", fullgraph=True)(values)
            try:
                check(function, values, torch.compile(function, backend="aot_eager"))
                check(function, values, torch.compile(traceable, backend="aot_eager", fullgraph=True))
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error


def test_graph_breaks_keep_values_and_gradients(seed):
    run_ranks(graph_breaks_rank, 2, seed, backend="gloo", timeout=280)


def _by_backward(s):
    torch.matmul(s.x, s.w).square().mean().backward()
    return [s.x.grad.local, s.w.grad.local]


def _by_grad(s):
    return locals_of(torch.autograd.grad(torch.matmul(s.x, s.w).square().mean(), [s.x, s.w]))


def _skipped(s):
    """Dynamo cannot resume here: it compiles the functions that it calls, each on its own."""
    with contextlib.suppress(ZeroDivisionError):
        torch._dynamo.graph_break()
        x = s.x.square().sin().add(1).exp().T.mT
        return x.sub(1).mul(x.cos()).mean() * s.b.square()


def skipped_rank(comm, seed):
    with closing(connect({"tp": 2}, comm)) as mesh:
        torch._dynamo.reset()
        check(_skipped, Values(mesh, seed), torch.compile(_skipped, backend="aot_eager"))
        with torch.autocast("cpu", torch.bfloat16):
            check(_skipped, Values(mesh, seed), torch.compile(_skipped, backend="aot_eager"))


def test_methods_of_a_function_that_is_not_compiled(seed):
    run_ranks(skipped_rank, 2, seed, backend="gloo", timeout=280)


def backward_rank(comm, seed):
    with closing(connect({"tp": 2}, comm)) as mesh:
        for function in (_by_backward, _by_grad):
            torch._dynamo.reset()
            with pytest.raises(Unsupported):
                torch.compile(function, backend="aot_eager", fullgraph=True)(Values(mesh, seed))
            got = torch.compile(function, backend="aot_eager")(Values(mesh, seed))
            torch.testing.assert_close(got, function(Values(mesh, seed)))


def test_a_backward_pass_in_a_compiled_function_breaks_the_graph(seed):
    run_ranks(backward_rank, 2, seed, backend="gloo", timeout=280)


@inductor
@pytest.mark.parametrize("names", [NAMES[i::8] for i in range(8)], ids=map(str, range(8)))
def test_values_and_gradients_inductor(names, seed):
    run_ranks(cases_rank, 2, names, "inductor", seed, backend="gloo", timeout=1700)


# --- Modules --------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A small language model: tokens [B, S] -> logits [B, S, V]."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(8, 6)
        self.norm = nn.LayerNorm(6)
        self.q, self.k, self.v = (nn.Linear(6, 8, bias=False) for _ in range(3))
        self.o = nn.Linear(8, 6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.register_buffer("scale", torch.rand(6))

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.linear(x, self.embedding.weight)


COLUMNS = {"[qkv].weight": P("tp"), "o.weight": P(None, "tp"), "up.*": P("tp"), "down.weight": P(None, "tp")}


def module_rank(comm, backend, layouts, lies, seed, algorithm, dtype=torch.float64):
    with closing(connect({"tp": 2}, comm)) as mesh:
        torch._dynamo.reset()
        plain = Model(seed).to(dtype)
        model = shard_module(Model(seed).to(dtype), mesh, layouts)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with choosing(algorithm):
            for step in range(2):
                tokens = torch.randint(0, 8, (4, 4), generator=torch.Generator().manual_seed(seed + step))
                want = plain(tokens)
                F.cross_entropy(want.flatten(0, 1), tokens.flatten()).backward()
                mine = shard(tokens, mesh, lies)
                logits = compiled(mine)
                F.cross_entropy(logits.flatten(0, 1), mine.flatten()).backward()
                torch.testing.assert_close(logits.full(), want)
        from torch_overlap.mesh import sharded_parameters

        for name, value in sharded_parameters(model).items():
            torch.testing.assert_close(value.grad.full(), dict(plain.named_parameters())[name].grad)


@pytest.mark.parametrize(
    ("lies", "algorithm"),
    [(P(), "auto"), (P(), "sequential"), (P("tp"), "sequential"), (P(None, "tp"), "auto")],
    ids=str,
)
def test_modules(lies, algorithm, seed):
    layouts = COLUMNS | {"embedding.weight": P("tp")}
    run_ranks(module_rank, 2, "aot_eager", layouts, lies, seed, algorithm, backend="gloo", timeout=240)


@inductor
def test_modules_inductor(seed):
    args = COLUMNS, P(), seed, "auto", INDUCTOR_DTYPE
    run_ranks(module_rank, 2, "inductor", *args, backend="gloo", timeout=1700)


def gpt_rank(comm, backend, axes, algorithm, seed, dtype=torch.float64, autocast=False):
    sys.path.insert(0, str(EXAMPLES))
    from gpt.model import Config
    from gpt.plain import LAYOUTS, TOKENS, PlainGPT

    with closing(connect(axes, comm)) as mesh:
        torch._dynamo.reset()
        config = Config(dim=16, layers=2, heads=4, sequence=8, vocabulary=12)
        models = [shard_module(PlainGPT(config, seed).to(dtype), mesh, LAYOUTS) for _ in range(2)]
        calls = models[0], torch.compile(models[1], backend=backend, fullgraph=True)
        whole = torch.randint(12, (8, 4), generator=torch.Generator().manual_seed(seed))
        cast = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        sent = []
        comm.register_pre_hook(lambda name, *_: sent.append(name.name))
        with choosing(algorithm):
            got, names = [], []
            for call in calls:
                tokens = shard(whole, mesh, TOKENS)
                with cast:
                    got.append(call(tokens))
                F.cross_entropy(got[-1].permute(0, 2, 1).to(dtype), tokens).backward()
                names.append(sent.copy())
                sent.clear()
        assert got[0].spec is got[1].spec
        near = {"rtol": 2e-2, "atol": 2e-2} if autocast else {}
        torch.testing.assert_close(got[1].local, got[0].local, **near)
        eager, compiled = (dict(model.named_parameters()) for model in models)
        assert eager
        for name, p in compiled.items():
            torch.testing.assert_close(p.grad, eager[name].grad, **near)
        with cast:
            # Products are split differently, and each piece is rounded to 16 bits.
            near = {"rtol": 5e-2, "atol": 5e-2} if autocast else {}
            torch.testing.assert_close(got[1].full(), PlainGPT(config, seed).to(dtype)(whole), **near)
        return names


# Over dp alone no product can overlap; over tp with "sequential": below.
@pytest.mark.parametrize(
    ("axes", "algorithm"),
    [({"dp": 1, "tp": 2}, "auto"), ({"dp": 2, "tp": 1}, "sequential")],
    ids=["tp-auto", "dp-plain"],
)
def test_the_gpt_of_the_examples(axes, algorithm, seed):
    run_ranks(gpt_rank, 2, "aot_eager", axes, algorithm, seed, backend="gloo", timeout=240)


def test_the_gpt_of_the_examples_under_autocast(seed):
    """The same collectives as in eager mode: casts keep their anchors there too, and are made once."""
    args = {"dp": 1, "tp": 2}, "sequential", seed, torch.float32, True
    eager, compiled = run_ranks(gpt_rank, 2, "aot_eager", *args, backend="gloo", timeout=240)[0]
    gather, scatter = "all_gather_single", "reduce_scatter_single"
    assert eager.count(gather) == compiled.count(gather) == 2 * 4
    assert eager.count(scatter) == compiled.count(scatter) == 2 * 4


@inductor
def test_the_gpt_of_the_examples_inductor(seed):
    axes = {"dp": 1, "tp": 2}
    run_ranks(gpt_rank, 2, "inductor", axes, "auto", seed, INDUCTOR_DTYPE, backend="gloo", timeout=1700)
