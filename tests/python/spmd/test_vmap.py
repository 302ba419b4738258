"""vmap over Sharded values: compared with torch.vmap, or a loop, on whole tensors."""

import math

import pytest
import torch
import torch.nn.functional as F

from torch_overlap import InvalidTypeError, InvalidValueError, StateError, comm_names
from torch_overlap.mesh import (
    P,
    Sharded,
    all_gather,
    all_reduce,
    all_to_all,
    assume_partial,
    axis_index,
    broadcast,
    connect,
    from_local,
    gather_all_axes,
    pmean,
    ppermute,
    reduce_scatter,
    reshard,
    shard,
    vmap,
)
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def on_mesh(seed):
    def run(body, *, backend="local", **axes):
        """Runs body(mesh, draw) on every rank; draw(shape) is the same fresh tensor on all of them."""

        def rank(comm):
            mesh = connect(axes, comm)
            generator = torch.Generator().manual_seed(seed)
            body(mesh, lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator))
            mesh.close()

        run_ranks(rank, math.prod(axes.values()), backend=backend)

    return run


def leaf(x, mesh, spec=None):
    return shard(x.clone(), mesh, spec).requires_grad_()


def grad_of(x):
    return x.grad.full()


def text(x):
    return str(x.layout)


# --- The cases of the plan: T9, T12, T20, T21, T56 ------------------------------------------------------


def test_reduce_scatter_of_rows(on_mesh):
    def body(mesh, draw):
        whole = draw(4, 16)
        y = vmap(lambda row: reduce_scatter(row, 0))(shard(whole, mesh))
        assert text(y) == "[],[tp]"
        assert y.local.shape == (4, 8)
        torch.testing.assert_close(y.full(), 2 * whole)

    on_mesh(body, tp=2)


def test_all_to_all_of_examples(on_mesh):
    def body(mesh, draw):
        whole = draw(2, 8, 8)
        for split, concat in ((1, 0), (-1, -2)):
            y = vmap(lambda x: all_to_all(x, split, concat))(shard(whole, mesh, P(None, "tp")))  # noqa: B023
            assert text(y) == "[],[],[tp]"
            torch.testing.assert_close(y.local, whole.chunk(2, 2)[mesh.rank])

    on_mesh(body, tp=2)


def test_gradient_of_a_reduction_of_parts(on_mesh):
    def body(mesh, draw):
        def loss(u):
            return all_reduce(u, "sum", "tp").square().sum(-1)

        for levels, shape in ((0, (4,)), (1, (3, 4)), (2, (2, 2, 4))):
            whole = draw(*shape)
            u = leaf(whole, mesh, P(*[None] * levels, "tp"))
            function = loss
            for _ in range(levels):
                function = vmap(function)
            function(u).sum().backward()
            left, right = whole.chunk(2, -1)
            torch.testing.assert_close(grad_of(u), torch.cat([2 * (left + right)] * 2, -1))

    on_mesh(body, tp=2)


def test_reduce_scatter_over_the_axis_of_the_dimension_alone(on_mesh):
    def body(mesh, draw):
        whole = draw(2, 8)
        y = vmap(lambda x: reduce_scatter(x, 0))(shard(whole, mesh, P(None, "x")))
        assert y.shape == (2, 4)
        assert text(y) == "[],[x] I{y}"
        left, right = whole.chunk(2, 1)
        torch.testing.assert_close(y.full(), left + right)

    on_mesh(body, x=2, y=2)


def test_pipeline_step(on_mesh):
    def body(mesh, draw):
        x, w, b = draw(4, 4, 8), draw(4, 8, 8), draw(4, 8)
        own = [t.clone().requires_grad_() for t in (x, w, b)]
        y = torch.relu(own[0] @ own[1] + own[2][:, None])
        mask = torch.arange(4).reshape(4, 1, 1) == 0
        want = torch.where(mask, own[0], y.roll(1, 0)).sum()
        want.backward()

        stages = [leaf(t, mesh, P("stage")) for t in (x, w, b)]
        step = vmap(lambda x, w, b: torch.relu(x @ w + b), spmd_axis_name="stage")
        moved = ppermute(step(*stages), [(i, (i + 1) % 4) for i in range(4)])
        first = axis_index(mesh, "stage").reshape(4, 1, 1) == 0
        got = torch.where(first, stages[0], moved).sum()
        got.backward()
        torch.testing.assert_close(got.full(), want)
        for mine, other in zip(stages, own, strict=True):
            torch.testing.assert_close(grad_of(mine), other.grad)

    on_mesh(body, stage=4)


# --- Values and gradients -------------------------------------------------------------------------------


LAYOUTS = [
    (P(), P()),
    (P("dp"), P()),
    (P("dp"), P(None, "tp")),
    (P("dp", None, "tp"), P("tp")),
    (P(None, "dp"), P(None, "tp")),
    (P(("dp", "tp")), P()),
    (P("dp", "tp"), P("dp")),
    (P("tp"), P("tp", "dp")),
]


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
def test_products_with_a_shared_weight(layouts, on_mesh):
    def body(mesh, draw):
        x, w = draw(8, 4, 6), draw(6, 4)
        mine, shared = leaf(x, mesh, layouts[0]), leaf(w, mesh, layouts[1])
        other, other_shared = x.clone().requires_grad_(), w.clone().requires_grad_()
        function = lambda x, w: F.softmax(x @ w, -1).exp()  # noqa: E731
        want = torch.vmap(function, (0, None))(other, other_shared)
        got = vmap(function, (0, None))(mine, shared)
        assert got.shape == want.shape
        torch.testing.assert_close(got.full(), want)
        scale = torch.arange(want.numel(), dtype=want.dtype).view_as(want)
        (want * scale).sum().backward()
        (got * shard(scale, mesh)).sum().backward()
        torch.testing.assert_close(grad_of(mine), other.grad)
        torch.testing.assert_close(grad_of(shared), other_shared.grad)

    on_mesh(body, dp=2, tp=2)


@pytest.mark.parametrize(("in_dim", "out_dim"), [(0, 0), (1, 2), (-1, 1), (2, -1)])
def test_dimensions(in_dim, out_dim, on_mesh):
    def body(mesh, draw):
        whole = draw(4, 4, 4)
        spec = [None] * 3
        spec[in_dim] = "dp"
        function = lambda x: x.sum(0, keepdim=True) * 2 + x.t()  # noqa: E731
        want = torch.vmap(function, in_dim, out_dim)(whole)
        for lies, name in ((P(*spec), None), (P(), "dp"), (P(*spec), "dp"), (P(), None)):
            y = vmap(function, in_dim, out_dim, spmd_axis_name=name)(shard(whole, mesh, lies))
            expected = "dp" if (lies or name) and not (lies == P() and name is None) else None
            assert y.layout.dims[out_dim] == ((expected,) if expected else ())
            torch.testing.assert_close(y.full(), want)

    on_mesh(body, dp=2)


def test_nested_arguments_and_results(on_mesh):
    def body(mesh, draw):
        x, y, k = draw(4, 6), draw(6, 4), draw(6)

        def function(pair, k, factor):
            a, b = pair["a"], pair["b"]
            return {"sum": a + b * factor, "both": (a * k, (k * 2,))}

        arguments = {"a": leaf(x, mesh, P("dp")), "b": leaf(y, mesh, P(None, "dp"))}, leaf(k, mesh), 3.0
        dims, out = ({"a": 0, "b": 1}, None, None), {"sum": 1, "both": (0, (None,))}
        got = vmap(function, dims, out)(*arguments)
        want = torch.vmap(lambda a, b: function({"a": a, "b": b}, k, 3.0), (0, 1), out)(x, y)
        torch.testing.assert_close(got["sum"].full(), want["sum"])
        torch.testing.assert_close(got["both"][0].full(), want["both"][0])
        torch.testing.assert_close(got["both"][1][0].full(), want["both"][1][0])
        got["both"][1][0].sum().backward()
        torch.testing.assert_close(grad_of(arguments[1]), torch.full_like(k, 2.0))

    on_mesh(body, dp=2, tp=2)


def test_nested_maps_over_two_axes(on_mesh):
    def body(mesh, draw):
        x, w = draw(4, 4, 5), draw(5, 5)
        mine, shared = leaf(x, mesh, P("dp", "tp")), leaf(w, mesh)
        inner = vmap(lambda row, w: torch.tanh(row @ w), (0, None))
        y = vmap(inner, (0, None))(mine, shared)
        assert text(y) == "[dp],[tp],[]"
        other, other_shared = x.clone().requires_grad_(), w.clone().requires_grad_()
        want = torch.tanh(other @ other_shared)
        torch.testing.assert_close(y.full(), want)
        y.square().sum().backward()
        want.square().sum().backward()
        torch.testing.assert_close(grad_of(mine), other.grad)
        torch.testing.assert_close(grad_of(shared), other_shared.grad)

    on_mesh(body, dp=2, tp=2)


# --- Every communication function -----------------------------------------------------------------------

FUNCTIONS = {
    "shard": lambda x: shard(x, x.mesh, P(None, "tp")),
    "reshard": lambda x: reshard(x, P(None, "tp")),
    "whole": lambda x: x.reshard(None),
    "all_reduce": lambda x: all_reduce(x, "sum", "tp"),
    "all_reduce max": lambda x: all_reduce(x, "max", "tp"),
    "pmean": lambda x: pmean(x, "tp"),
    "all_gather": lambda x: all_gather(x, 0),
    "gather_all_axes": gather_all_axes,
    "reduce_scatter": lambda x: reduce_scatter(x, 1, "tp"),
    "all_to_all": lambda x: all_to_all(x, -1, 0),
    "stacked": lambda x: all_to_all(x, 1, 0, tiled=False),
    "ppermute": lambda x: ppermute(x, [(0, 1), (1, 0)], "tp"),
    "broadcast": lambda x: broadcast(all_gather(x, 0), 1, "tp") * 2,
    "axis_index": lambda x: x * axis_index(x.mesh, "tp")[0:1].unsqueeze(-1),
    "assume_partial": lambda x: all_reduce(assume_partial(all_gather(x, 0), "tp")),
    "partial": lambda x: torch.exp(x.t() @ x),
    "sum": lambda x: x.sum(0) + x.mean(),
    "norm": lambda x: F.layer_norm(x, (6,)) + F.layer_norm(x.t(), (4,)).t(),
    "cat": lambda x: torch.cat([x, x * 2], 0).reshape(2, 4, 6),
    "loss": lambda x: F.cross_entropy(x, (x.sum(1) > 0).to(torch.int64)),
    "slice": lambda x: x[1:3, ::2],
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_each_function_on_each_example(name, on_mesh):
    """Compares with a loop over the examples, along a mapped dimension that is whole, and one that is sharded."""
    function = FUNCTIONS[name]

    def body(mesh, draw):
        whole = draw(4, 4, 6)
        for batch in (None, "dp"):
            mine = leaf(whole, mesh, P(batch, "tp"))
            alone = [leaf(example, mesh, P("tp")) for example in whole]
            got = vmap(function)(mine)
            want = [function(example) for example in alone]
            assert got.layout.dims[0] == ((batch,) if batch else ())
            assert got.layout.dims[1:] == want[0].layout.dims
            torch.testing.assert_close(got.full(), torch.stack([y.full() for y in want]))
            if "max" in name:
                continue
            weights = draw(*got.shape)
            (got * shard(weights, mesh)).sum().backward()
            sum((y * shard(w, mesh)).sum() for y, w in zip(want, weights, strict=True)).backward()
            torch.testing.assert_close(grad_of(mine), torch.stack([grad_of(example) for example in alone]))

    on_mesh(body, dp=2, tp=2)


def test_embedding_of_a_sharded_table(on_mesh):
    def body(mesh, draw):
        table, tokens = draw(8, 4), torch.arange(12).reshape(4, 3) % 8
        mine = leaf(table, mesh, P("tp"))
        y = vmap(F.embedding, (0, None))(shard(tokens, mesh, P("dp")), mine)
        torch.testing.assert_close(y.full(), table[tokens])
        y.square().sum().backward()
        other = table.clone().requires_grad_()
        F.embedding(tokens, other).square().sum().backward()
        torch.testing.assert_close(grad_of(mine), other.grad)

    on_mesh(body, dp=2, tp=2)


def test_plain_tensors(on_mesh):
    def body(mesh, draw):
        x, y = draw(3, 4), draw(4)
        torch.testing.assert_close(vmap(torch.dot, (0, None))(x, y), x @ y)
        mixed = vmap(lambda a, b: shard(a, mesh, P("dp")) * b)(x, shard(x, mesh))
        torch.testing.assert_close(mixed.full(), x * x)

    on_mesh(body, dp=2)


def test_one_collective_for_all_examples(on_mesh):
    def body(mesh, draw):
        from torch.utils._python_dispatch import TorchDispatchMode

        seen = []

        class Seen(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func.namespace == "torch_overlap":
                    seen.append(str(func))
                return func(*args, **(kwargs or {}))

        x = shard(draw(6, 4), mesh, P(None, "tp"))
        with Seen():
            vmap(lambda row: all_reduce(row, "sum", "tp"))(x)
        assert seen == ["torch_overlap.all_reduce.default"]

    on_mesh(body, tp=2)


# --- Errors ---------------------------------------------------------------------------------------------


def double(*values):
    return values[0] * 2


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (lambda m, d: [shard(d(5, 4), m, P("dp"))], {}, InvalidValueError, "divisible by the 2 ranks"),
        (lambda m, d: [shard(d(4), m, P("dp")), shard(d(4), m)], {}, InvalidValueError, "sharded alike"),
        (lambda m, d: [shard(d(4), m, P("dp")), shard(d(4), m, P("tp"))], {}, InvalidValueError, "sharded alike"),
        (lambda m, d: [shard(d(4), m), shard(d(6), m)], {}, InvalidValueError, "one size"),
        (lambda m, d: [shard(d(4), m, P("tp"))], {"spmd_axis_name": "dp"}, InvalidValueError, "as spmd_axis_name says"),
        (lambda m, d: [shard(d(4, 4), m, P(None, "dp"))], {"spmd_axis_name": "dp"}, InvalidValueError, "nothing but"),
        (lambda m, d: [shard(d(4), m)], {"spmd_axis_name": "pp"}, ValueError, "pp"),
        (lambda m, d: [d(4)], {"spmd_axis_name": "dp"}, InvalidTypeError, "Sharded among the arguments"),
        (lambda m, d: [shard(d(4), m, P("dp")), d(4)], {}, InvalidTypeError, "plain tensor of shape"),
        (lambda m, d: [shard(d(4), m)], {"in_dims": None}, InvalidValueError, "is mapped"),
        (lambda m, d: [shard(d(4), m)], {"in_dims": 1}, InvalidValueError, "in_dims in"),
        (lambda m, d: [shard(d(4), m)], {"in_dims": (0, 0)}, InvalidValueError, "structure"),
        (lambda m, d: [shard(d(4), m), 3], {}, InvalidTypeError, "no tensor"),
        (lambda m, d: [shard(d(4), m)], {"out_dims": None}, InvalidValueError, "same for all examples"),
        (lambda m, d: [shard(d(4), m)], {"out_dims": 1}, InvalidValueError, "out_dims in"),
    ],
)
def test_errors(make, arguments, error, message, on_mesh):
    def body(mesh, draw):
        with pytest.raises(error, match=message):
            vmap(double, **arguments)(*make(mesh, draw))

    on_mesh(body, dp=2, tp=2)


def test_inside_there_is_no_mapped_axis(on_mesh):
    def body(mesh, draw):
        x, other = shard(draw(4, 4), mesh, P("dp")), shard(draw(4), mesh)
        for function in (lambda row: all_reduce(row, "sum", "dp"), lambda row: row.reshard(P("dp"))):
            with pytest.raises(ValueError, match="dp"):
                vmap(function)(x)
        with pytest.raises(InvalidValueError, match="one mesh"):
            vmap(lambda row: row + other)(x)
        with pytest.raises(InvalidTypeError, match="Sharded results"):
            vmap(lambda row: row.full())(x)
        with pytest.raises(InvalidValueError, match="expected results on"):
            vmap(lambda row: (row, other), out_dims=(0, None))(x)

    on_mesh(body, dp=2, tp=2)


def test_a_mesh_closes_with_what_vmap_made():
    def rank(comm):
        for _ in range(2):
            mesh = connect({"a": 2, "b": 1, "c": 2}, comm)
            x = from_local(torch.ones(2, 3), mesh, P("a"))
            y = vmap(lambda row: row * 2, spmd_axis_name=("a",))(x)
            z = vmap(lambda row: row * 2, spmd_axis_name=("a", "c"))(shard(torch.ones(4, 3), mesh))
            assert isinstance(y, Sharded)
            assert z.layout.dims[0] == ("a", "c")
            mesh.close()

    run_ranks(rank, 4, backend="local")


def processes(comm):
    mesh = connect({"dp": 2}, comm)
    x = shard(torch.arange(8.0).reshape(4, 2), mesh, P("dp"))
    y = vmap(lambda row: row.cumsum(0))(x)
    assert torch.equal(y.full(), torch.arange(8.0).reshape(4, 2).cumsum(1))
    mesh.close()


def test_on_processes():
    run_ranks(processes, 2, backend="gloo")


def close_after_vmap(comm, axes):
    mesh = connect(axes, comm)
    step = vmap(lambda row: torch.tanh(row), spmd_axis_name="dp")
    x = shard(torch.ones(4, 6), mesh, P("dp"))
    step(x)
    mesh.close()
    with pytest.raises(StateError, match="expected an open mesh"):
        step(x)
    mesh.close()  # a second call does nothing
    assert not [name for name in comm_names() if name.startswith(f"{mesh.name}/")]


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 2}], ids=["groups", "one rank each"])
def test_meshes_of_the_other_axes_end_with_their_mesh(axes):
    run_ranks(close_after_vmap, math.prod(axes.values()), axes)
