"""Sharded values under torch.compile(fullgraph=True): values and gradients as in eager mode, graphs, guards.

What needs real ranks runs on gloo processes: a compiler's state belongs to its process.
"""

import os
import random
from collections import Counter

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd

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
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)

# Minutes of C++ to compile: `make stress` has them.
inductor = pytest.mark.skipif("TORCH_OVERLAP_STRESS" not in os.environ, reason="make stress")


class Values:
    """The same fresh values on every rank, as they lie."""

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
    "reshard method": lambda s: s.x.reshard(None),
    "reshard to a layout": lambda s: reshard(s.w, (s.x * 2).layout),
    "reshard to text": lambda s: s.x.reshard("[],[tp]"),
    "all_reduce": lambda s: all_reduce(s.x, "sum", "tp"),
    "all_reduce pending": lambda s: all_reduce(s.w @ s.v),
    "pmean": lambda s: pmean(s.x, "tp"),
    "all_gather": lambda s: all_gather(s.x, 0),
    "gather_all_axes": lambda s: gather_all_axes(s.w @ s.v),
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
    "@": lambda s: s.x @ s.w,
    "two products": lambda s: torch.relu(s.x @ s.w) @ s.v + s.b,
    "pending product": lambda s: s.w @ s.v,
    "pending and nonlinear": lambda s: torch.exp(s.w @ s.v) + s.b,
    "linear": lambda s: F.linear(s.x, s.w, s.b),
    "linear of a transpose": lambda s: F.linear(s.w, s.v.T, s.b) + 1,
    "anchor": lambda s: s.x.anchor() @ s.w,
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
    "split": lambda s: torch.stack(list(s.x.split(3, 1))),
    "cast": lambda s: s.x.to(torch.float32),
    # Of models
    "softmax": lambda s: F.softmax(s.x, -1),
    "softmax of a sharded dimension": lambda s: F.softmax(s.w, -1),
    "layer_norm": lambda s: F.layer_norm(s.x, (6,), s.b, s.b),
    "layer_norm of a sharded dimension": lambda s: F.layer_norm(s.w, (6,)),
    "embedding": lambda s: F.embedding(s.tokens, s.v),
    "cross_entropy": lambda s: F.cross_entropy(s.x, s.classes),
    "cross_entropy of sharded classes": lambda s: F.cross_entropy(s.w, s.classes.repeat(2)[:6]),
    "attention": lambda s: F.scaled_dot_product_attention(*[s.x.view(4, 1, 2, 3)] * 3, is_causal=True),
}


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
    with connect_for(comm, {"tp": 2}) as mesh:
        for name in names:
            torch._dynamo.reset()
            values = Values(mesh, seed)
            compiled = torch.compile(CASES[name], backend=backend, fullgraph=True)
            try:
                check(CASES[name], values, compiled)
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error


class connect_for:
    def __init__(self, comm, axes):
        self.mesh = connect(axes, comm)

    def __enter__(self):
        return self.mesh

    def __exit__(self, *_):
        self.mesh.close()


NAMES = list(CASES)
GROUPS = [NAMES[i::4] for i in range(4)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("names", GROUPS, ids=["0", "1", "2", "3"])
def test_values_and_gradients(names, backend):
    run_ranks(cases_rank, 2, names, backend, random.randrange(2**31), backend="gloo", timeout=280)


@inductor
@pytest.mark.parametrize("names", [NAMES[i::8] for i in range(8)], ids=map(str, range(8)))
def test_values_and_gradients_inductor(names):
    run_ranks(cases_rank, 2, names, "inductor", random.randrange(2**31), backend="gloo", timeout=280)


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
        return x @ self.embedding.weight.T


COLUMNS = {"[qkv].weight": P("tp"), "o.weight": P(None, "tp"), "up.*": P("tp"), "down.weight": P(None, "tp")}


def module_rank(comm, backend, layouts, lies, seed, algorithm):
    with connect_for(comm, {"tp": 2}) as mesh:
        torch._dynamo.reset()
        plain = Model(seed).double()
        model = shard_module(Model(seed).double(), mesh, layouts)
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


@pytest.mark.parametrize("algorithm", ["auto", "fused"])
@pytest.mark.parametrize("lies", [P(), P("tp"), P(None, "tp")], ids=str)
def test_modules(lies, algorithm):
    layouts = COLUMNS | {"embedding.weight": P("tp")}
    run_ranks(
        module_rank, 2, "aot_eager", layouts, lies, random.randrange(2**31), algorithm, backend="gloo", timeout=240
    )


@inductor
def test_modules_inductor():
    run_ranks(module_rank, 2, "inductor", COLUMNS, P(), random.randrange(2**31), "auto", backend="gloo", timeout=280)


# --- Graphs ---------------------------------------------------------------------------------------------


def operators(graph):
    """How often the graph calls each operator of ours, in the order of the program or by itself."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    names = [str(x) for node in calls for x in (node.target, *node.args[:2]) if isinstance(x, torch._ops.OpOverload)]
    return Counter(name.split(".")[1] for name in names if name.startswith("torch_overlap."))


class Graphs:
    """A backend that keeps how often each operator of ours is in the forward and backward graphs."""

    def __init__(self):
        self.forward, self.backward = [], []
        self.compile = aot_autograd(fw_compiler=self._keep(self.forward), bw_compiler=self._keep(self.backward))

    def _keep(self, kept):
        def compiler(graph, _):
            kept.append(operators(graph))
            return torch._dynamo.backends.debugging.boxed_nop(graph, _)

        return compiler


def graphs_of(function, make):
    """The operators of forward and backward graph on rank 0 of two, on the backend that moves nothing."""
    found = []

    def rank(comm):
        torch._dynamo.reset()
        with connect_for(comm, {"tp": comm.get_size()}) as mesh:
            graphs = Graphs()
            y = torch.compile(function, backend=graphs.compile, fullgraph=True)(*make(mesh))
            if y.local.requires_grad:
                y.local.backward(torch.ones_like(y.local))
            found.append((sum(graphs.forward, Counter()), sum(graphs.backward, Counter())))

    run_ranks(rank, 2, backend="fake")
    assert found[0] == found[-1]
    return found[0]


def weights(mesh, *specs):
    return [shard(torch.ones(8, 8), mesh, spec).requires_grad_() for spec in specs]


def test_a_megatron_mlp_has_one_collective_each_way():
    forward, backward = graphs_of(
        lambda x, a, b: torch.relu(torch.relu(x @ a.anchor()) @ b.anchor()),
        lambda mesh: weights(mesh, P(), P(None, "tp"), P("tp")),
    )
    assert forward == {"all_reduce": 1}
    assert backward == {"all_reduce": 1}


def test_what_is_gathered_for_one_product_serves_all():
    def function(x, a, b):
        h = x * 2
        return (h @ a.anchor()) * (h @ b.anchor())

    forward, backward = graphs_of(function, lambda mesh: weights(mesh, P("tp"), P(None, "tp"), P(None, "tp")))
    assert forward == {"all_gather": 1}
    assert backward == {"reduce_scatter": 1}


def test_fused_products_are_in_the_graph():
    def function(x, a, b):
        y = torch.relu(x @ a.anchor()) @ b.anchor()
        return y.reshard(P("tp")) * 2

    def choose(x, a, b):
        with choosing("fused"):
            return function(x, a, b)

    make = lambda mesh: weights(mesh, P("tp"), P(None, "tp"), P("tp"))  # noqa: E731
    forward, _ = graphs_of(choose, make)
    assert forward == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}
    forward, _ = graphs_of(lambda *args: _plainly(function, *args), make)
    assert forward == {"all_gather": 1, "reduce_scatter": 1}


def _plainly(function, *args):
    with choosing("plain"):
        return function(*args)


def test_a_communication_that_nobody_uses_stays():
    def function(x):
        all_reduce(x, "sum", "tp")
        return x * 2

    forward, _ = graphs_of(function, lambda mesh: weights(mesh, P("tp")))
    assert forward["all_reduce"] == 1


def test_an_argument_is_not_changed():
    def rank(comm):
        torch._dynamo.reset()
        with connect_for(comm, {"tp": 2}) as mesh:
            x, w = weights(mesh, P("tp"), P(None, "tp"))
            torch.compile(lambda x, w: x @ w, backend="aot_eager", fullgraph=True)(x, w)
            assert x._copies is None

    run_ranks(rank, 2, backend="fake")


# --- Guards ---------------------------------------------------------------------------------------------


def guards_rank(comm):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, s: torch.softmax(x * s, -1).sum(0), backend=counter, fullgraph=True)
    with connect_for(comm, {"tp": 2}) as mesh:
        frames = 0
        for spec, shape, dtype, new in (
            (P("tp"), (4, 6), torch.float32, True),
            (P("tp"), (4, 6), torch.float32, False),
            (P(None, "tp"), (4, 6), torch.float32, True),
            (P("tp"), (8, 6), torch.float32, True),
            (P("tp"), (6, 8), torch.float32, True),
            (P("tp"), (5, 7), torch.float32, True),
            (P(), (4, 6), torch.float64, True),
            (P(None, "tp"), (4, 6), torch.float32, False),
            (P("tp"), (5, 7), torch.float32, False),
        ):
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(frames)).to(dtype)
            y = compiled(shard(whole, mesh, spec), 2.0)
            torch.testing.assert_close(y.full(), torch.softmax(whole * 2.0, -1).sum(0))
            frames += new
            assert counter.frame_count == frames, (spec, shape, dtype)
        torch._dynamo.reset()
        for factor in (3.0, 4.0, 5.5):
            whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(9))
            y = compiled(shard(whole, mesh, P("tp")), factor)
            torch.testing.assert_close(y.full(), torch.softmax(whole * factor, -1).sum(0))


def test_another_layout_shape_or_dtype_compiles_again():
    run_ranks(guards_rank, 2, backend="gloo", timeout=240)


def mesh_rank(comm):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: all_reduce(x, "sum"), backend=counter, fullgraph=True)
    for turn in range(2):
        with connect_for(comm, {"tp": 2}) as mesh:
            for _ in range(2):
                x = shard(torch.arange(4.0) + turn, mesh, P("tp"))
                y = compiled(x)
                assert y.mesh is mesh
                assert torch.equal(y.local, torch.tensor([2.0, 4.0]) + 2 * turn)
            assert counter.frame_count == turn + 1


def test_another_mesh_compiles_again():
    run_ranks(mesh_rank, 2, backend="gloo", timeout=240)


def plain_shapes_rank(comm):
    torch._dynamo.reset()
    compiled = torch.compile(lambda t, m: shard(t, m, P("tp")) * 2, backend="aot_eager", fullgraph=True)
    with connect_for(comm, {"tp": 2}) as mesh:
        for rows in (4, 6, 5, 8):
            t = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
            y = compiled(t, mesh)
            assert y.shape == (rows, 3)
            torch.testing.assert_close(y.full(), 2 * t)


def test_plain_tensors_of_several_shapes():
    run_ranks(plain_shapes_rank, 2, backend="gloo", timeout=240)


def feedback_rank(comm):
    """Results are arguments again, also pending ones and those of eager mode."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, w: torch.tanh(x @ w), backend=counter, fullgraph=True)
    with connect_for(comm, {"tp": 2}) as mesh:
        whole = torch.eye(4) * 0.5
        x, w = shard(whole, mesh, P("tp")), shard(whole, mesh)
        want = whole
        for _ in range(4):
            x, want = compiled(x, w), torch.tanh(want @ whole)
        torch.testing.assert_close(x.full(), want)
        assert counter.frame_count == 1
        pending = shard(whole, mesh, P(None, "tp")) @ shard(whole, mesh, P("tp"))
        torch.testing.assert_close(compiled(pending, w).full(), torch.tanh(whole @ whole @ whole))
        with pytest.raises(Exception, match="plain tensor"):
            compiled(x, whole)


def test_results_as_arguments():
    run_ranks(feedback_rank, 2, backend="gloo", timeout=240)
