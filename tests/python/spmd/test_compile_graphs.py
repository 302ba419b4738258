"""Graphs of compiled functions on Sharded values, and the guards that recompile them."""

from collections import Counter
from contextlib import closing

import pytest
import torch
import torch._dynamo.testing
from torch._dynamo.backends.common import aot_autograd

from torch_overlap.mesh import P, all_gather, all_reduce, caching_moves, choosing, connect, shard, shard_module
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)


def operators(graph):
    """Returns the number of calls of each of our operators in the graph, in the order of the program or by itself."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    names = [str(x) for node in calls for x in (node.target, *node.args[:2]) if isinstance(x, torch._ops.OpOverload)]
    return Counter(name.split(".")[1] for name in names if name.startswith("torch_overlap."))


class Graphs:
    """A backend that records the number of each of our operators in the forward and backward graphs."""

    def __init__(self):
        self.forward, self.backward = [], []
        self.compile = aot_autograd(fw_compiler=self._keep(self.forward), bw_compiler=self._keep(self.backward))

    def _keep(self, kept):
        def compiler(graph, _):
            kept.append(operators(graph))
            return torch._dynamo.backends.debugging.boxed_nop(graph, _)

        return compiler


def graphs_of(function, make):
    """Returns the operators of forward and backward graph on rank 0 of two, on the backend that moves nothing. Products
    and collectives are separate, so that collectives can be counted."""
    found = []

    def rank(comm):
        torch._dynamo.reset()
        with closing(connect({"tp": comm.get_size()}, comm)) as mesh, choosing("sequential"):
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
        lambda x, a, b: torch.relu(torch.matmul(torch.relu(torch.matmul(x, a.anchor())), b.anchor())),
        lambda mesh: weights(mesh, P(), P(None, "tp"), P("tp")),
    )
    assert forward == {"all_reduce": 1}
    assert backward == {"all_reduce": 1}


def two_products(x, a, b):
    h = x * 2
    return torch.matmul(h, a.anchor()) * torch.matmul(h, b.anchor())


def two_products_cached(x, a, b):
    with caching_moves():
        return two_products(x, a, b)


@pytest.mark.parametrize(("function", "count"), [(two_products_cached, 1), (two_products, 2)])
def test_what_is_gathered_for_one_product_serves_all_inside_caching_moves(function, count):
    forward, backward = graphs_of(function, lambda mesh: weights(mesh, P("tp"), P(None, "tp"), P(None, "tp")))
    assert forward == {"all_gather": count}
    assert backward == {"reduce_scatter": count}


def test_the_steps_of_one_function_share_what_is_gathered():
    """Also of an argument."""
    forward, _ = graphs_of(lambda x: torch.std(x, 1), lambda mesh: weights(mesh, "[],[] P{tp}"))
    assert forward == {"all_reduce": 1}


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)

    def forward(self, x):
        h = x * 2
        return self.q(h) * self.k(h)


@pytest.mark.parametrize("inner", [False, True], ids=["root", "child"])
def test_a_module_caches_moves_in_its_forward(inner):
    """Also a child that is compiled on its own."""
    made = []

    def function(x):
        return made[-1](x)

    def make(mesh):
        model = shard_module(torch.nn.Sequential(Attention()), mesh, {"*": P("tp")})
        made.append(model[0] if inner else model)
        return weights(mesh, P("tp"))

    forward, backward = graphs_of(function, make)
    assert forward == {"all_gather": 1}
    assert backward == {"reduce_scatter": 1}


def test_results_leave_caching_moves_without_copies():
    def rank(comm):
        torch._dynamo.reset()
        with closing(connect({"tp": 2}, comm)) as mesh:
            counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

            def function(x, w):
                with caching_moves():
                    y = x * 2
                    return y, torch.matmul(y, w.anchor())

            compiled = torch.compile(function, backend=counter, fullgraph=True)
            x, w = weights(mesh, P("tp"), P(None, "tp"))
            for _ in range(3):
                y, z = compiled(x, w)
                for value in (x, w, y, z):
                    assert value._copies is None
                    assert not value._caches_in_dynamo
                x = y
            assert counter.frame_count == 1
            y.reshard(None)
            assert y._copies is not None
            assert y.reshard(None).local.data_ptr() == y.reshard(None).local.data_ptr()

    run_ranks(rank, 2, backend="fake")


def test_fused_products_are_in_the_graph():
    def function(x, a, b):
        y = torch.matmul(torch.relu(torch.matmul(x, a.anchor())), b.anchor())
        return y.reshard(P("tp")) * 2

    def choose(x, a, b):
        with choosing("auto"):
            return function(x, a, b)

    make = lambda mesh: weights(mesh, P("tp"), P(None, "tp"), P("tp"))  # noqa: E731
    forward, _ = graphs_of(choose, make)
    assert forward == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}
    forward, _ = graphs_of(lambda *args: _plainly(function, *args), make)
    assert forward == {"all_gather": 1, "reduce_scatter": 1}


def _plainly(function, *args):
    with choosing("sequential"):
        return function(*args)


def test_tuples_among_arguments():
    """A tuple of Sharded values is read by its items; one of plain tensors beside them is as without a mesh."""

    def rank(comm):
        torch._dynamo.reset()
        with closing(connect({"tp": 2}, comm)) as mesh:
            pair = tuple(weights(mesh, P("tp"), P("tp")))
            plain = torch.randn(2, 3), torch.randn(2, 3)

            def function(pair, plain):
                return torch.cat(list(pair), 1) * 2, torch.stack((*plain, plain[0]))

            got, whole = torch.compile(function, backend="aot_eager", fullgraph=True)(pair, plain)
            want, expected = function(pair, plain)
            assert got.spec is want.spec
            assert torch.equal(got.local, want.local)
            assert torch.equal(whole, expected)

    run_ranks(rank, 2, backend="fake")


def test_a_communication_that_nobody_uses_stays():
    def function(x):
        all_reduce(x, "sum", "tp")
        return x * 2

    forward, _ = graphs_of(function, lambda mesh: weights(mesh, P("tp")))
    assert forward["all_reduce"] == 1


def test_an_argument_is_not_changed():
    def rank(comm):
        torch._dynamo.reset()
        with closing(connect({"tp": 2}, comm)) as mesh:
            x, w = weights(mesh, P("tp"), P(None, "tp"))
            torch.compile(lambda x, w: torch.matmul(x, w), backend="aot_eager", fullgraph=True)(x, w)
            assert x._copies is None

    run_ranks(rank, 2, backend="fake")


def undeclared_rank(comm, move):
    """Traces a function that needs a communicator along an undeclared axis, and then with it."""
    torch._dynamo.reset()
    with closing(connect("x=2,y=2", comm, sets=["x"])) as mesh:
        x = shard(torch.arange(64.0).reshape(8, 8), mesh, P("y"))
        split = []
        comm.register_pre_hook(lambda name, *_: split.append(name.name))
        compiled = torch.compile(MOVES[move], backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match=r"expected a communicator over \[y\], got none.*call prepare\(\"y\"\)"):
            compiled(x)
        assert not split
        mesh.prepare("y")
        assert split == ["split"]
        torch._dynamo.reset()
        y = compiled(x)
        assert split == ["split"]
        torch.testing.assert_close(y.full(), MOVES[move](x).full())


MOVES = {
    "reshard": lambda x: x.reshard(None) * 2,
    "function": lambda x: all_gather(x, 0) + 1,
    "operator": lambda x: torch.matmul(torch.softmax(x, 0), x.T),
}


@pytest.mark.parametrize("move", MOVES)
def test_no_communicator_is_made_in_a_trace(move):
    run_ranks(undeclared_rank, 4, move, backend="gloo", timeout=240)


# --- Guards ---------------------------------------------------------------------------------------------


def guards_rank(comm):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, s: torch.softmax(x * s, -1).sum(0), backend=counter, fullgraph=True)
    with closing(connect({"tp": 2}, comm)) as mesh:
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
        with closing(connect({"tp": 2}, comm)) as mesh:
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
    with closing(connect({"tp": 2}, comm)) as mesh:
        for rows in (4, 6, 5, 8):
            t = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
            y = compiled(t, mesh)
            assert y.shape == (rows, 3)
            torch.testing.assert_close(y.full(), 2 * t)


def test_plain_tensors_of_several_shapes():
    run_ranks(plain_shapes_rank, 2, backend="gloo", timeout=240)


def feedback_rank(comm):
    """Results are arguments again, also partial ones and those of eager mode."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, w: torch.tanh(torch.matmul(x, w)), backend=counter, fullgraph=True)
    with closing(connect({"tp": 2}, comm)) as mesh:
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
