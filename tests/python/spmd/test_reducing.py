"""all_reduce, reduce_scatter and pmean on every mesh: value, parts, layout, and the operations sent."""

import pytest
import torch
from spmd_ranks import MESHES, P, on_mesh

from torch_overlap.mesh import (
    CostModel,
    all_gather,
    all_reduce,
    assume_partial,
    from_local,
    pmean,
    reduce_scatter,
    shard,
)

BYTES = CostModel.bandwidth_only()  # plans that send the least; the H200 model reduces and cuts


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("text", MESHES)
def test_reduce_scatter_of_copies(text, axis, seed):
    """T8: copies are terms, so the result is the value times the number of ranks; over one axis of each mesh."""

    def body(r):
        x = r.randn(12, 12)
        for name, size in r.mesh.mesh.axes.items():
            rest = ",".join(n for n in r.mesh.mesh.axes if n != name)
            layout = f"[{name}],[]" if axis == 0 else f"[],[{name}]"
            with r.sends(*[f"reduce_scatter {name}"] * (size > 1)):
                r.check(reduce_scatter(shard(x, r.mesh), axis, name), x * size, f"{layout} I{{{rest}}}")

    on_mesh(text, body, seed, cost=BYTES)


def test_reduce_scatter_on_the_one_axis(seed):
    """T8: (8, 4) on dp=4."""

    def body(r):
        x = r.randn(8, 4)
        with r.sends("reduce_scatter dp"):
            y = r.check(reduce_scatter(shard(x, r.mesh), 0), 4 * x, "[dp],[]")
        assert tuple(y.local.shape) == (2, 4)
        r.check(reduce_scatter(shard(x, r.mesh), -1, reduce_op="max"), x, "[],[dp]")

    on_mesh("dp=4", body, seed, cost=BYTES)

    def with_times(r):
        x = r.randn(8, 4)
        r.check(reduce_scatter(shard(x, r.mesh), 0), 4 * x, "[dp],[]")

    on_mesh("dp=4", with_times, seed)


def test_reduce_scatter_under_vmap(seed):
    """T9: rows are mapped one by one; the hidden dimension is scattered."""

    def body(r):
        x = r.randn(4, 16)

        def row(local):
            y = reduce_scatter(from_local(local, r.mesh, None), 0)
            assert str(y.layout) == "[tp]"
            return y.local

        with r.sends("reduce_scatter tp"):
            out = torch.func.vmap(row)(x)
        r.check(from_local(out, r.mesh, P(None, "tp")), 2 * x, "[],[tp]")

    on_mesh("tp=2", body, seed, cost=BYTES)


def test_reduce_scatter_of_parts_under_vmap(seed):
    """T21: local tensors are terms along the axis that shards them: half the size, and only that axis."""

    def body(r):
        x = r.randn(2, 8)
        batch = shard(x, r.mesh, P(None, "x"))

        def row(local):
            y = reduce_scatter(from_local(local, r.mesh, P("x")), 0)
            assert tuple(y.shape) == (4,)
            assert str(y.layout) == "[x] I{y}"
            return y.local

        with r.sends("reduce_scatter x"):
            out = torch.func.vmap(row)(batch.local)
        r.check(from_local(out, r.mesh, P(None, "x")), x[:, :4] + x[:, 4:], "[],[x] I{y}")

    on_mesh("x=2,y=2", body, seed, cost=BYTES)


@pytest.mark.parametrize(
    ("layout", "after", "sent"),
    [
        ("[x],[] P{y}", "[x,y],[]", "reduce_scatter y"),
        ("[],[x] P{y}", "[y],[x]", "reduce_scatter y"),
        ("[],[] P{y} I{x}", "[y],[] I{x}", "reduce_scatter y"),
        ("[],[] P{x,y}", "[x,y],[]", "reduce_scatter x,y"),
    ],
)
def test_reduce_scatter_takes_the_pending_axes(layout, after, sent, seed):
    """B6: over the partial axes, not over the mesh; onto a dimension that another axis shards."""

    def body(r):
        x = r.randn(8, 4)
        y = r.check(r.place(x, layout), x, layout)
        with r.sends(sent):
            r.check(reduce_scatter(y, 0), x, after)

    on_mesh("x=2,y=2", body, seed, cost=BYTES)


@pytest.mark.parametrize("text", MESHES)
def test_pmean(text, seed):
    """T18, B7: for copies the result is the value, divided by the size of the summed axis."""

    def body(r):
        x = r.randn(12, 4)
        for name, size in r.mesh.mesh.axes.items():
            rest = ",".join(n for n in r.mesh.mesh.axes if n != name)
            with r.sends(*[f"all_reduce {name}"] * (size > 1)):
                r.check(pmean(shard(x, r.mesh), name), x, f"[],[] I{{{name},{rest}}}")
            parts = shard(x, r.mesh, P(name))
            r.check(pmean(parts, name), torch.stack(x.chunk(size)).mean(0), f"[],[] I{{{name},{rest}}}")
            ones = torch.ones(4, dtype=torch.float64)
            r.check(pmean(shard(ones, r.mesh), name), ones)

    on_mesh(text, body, seed)


REDUCE = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin, "prod": torch.prod}


@pytest.mark.parametrize("kind", REDUCE)
@pytest.mark.parametrize("text", MESHES)
def test_all_reduce_of_parts(text, kind, seed):
    """T19, B18: local tensors are the terms, along one axis: (12, 4) on 2 becomes (6, 4)."""

    def body(r):
        x = r.randn(12, 4)
        for name, size in r.mesh.mesh.axes.items():
            rest = ",".join(n for n in r.mesh.mesh.axes if n != name)
            expected = REDUCE[kind](torch.stack(x.chunk(size)), 0)
            with r.sends(*[f"all_reduce {name}"] * (size > 1)):
                y = all_reduce(shard(x, r.mesh, P(name)), kind, name)
            r.check(y, expected, f"[],[] I{{{name},{rest}}}")
            pending = r.place(x, f"[],[] P{{{name}:{kind.replace('prod', 'product')}}} I{{{rest}}}")
            with r.sends(*[f"all_reduce {name}"] * (size > 1)):
                r.check(all_reduce(pending), x, f"[],[] I{{{name},{rest}}}")

    on_mesh(text, body, seed)


def test_pending_axes_survive_what_does_not_concern_them(seed):
    """B8: an all_gather leaves a partial sum, which is reduced along its own axis: ones give 2, not 4."""

    def body(r):
        x = r.randn(4, 3)
        y = r.place(x, "[x],[] P{y}")
        with r.sends("all_gather x"):
            z = r.check(all_gather(y, 0), x, "[],[] P{y} I{x}")
        with r.sends("all_reduce y"):
            r.check(all_reduce(z), x, "[],[] I{x,y}")
        ones = torch.ones(4, 3, dtype=torch.float64)
        z = all_gather(assume_partial(shard(ones, r.mesh, P("x")), "y"), 0)
        r.check(all_reduce(z), 2 * ones)

    on_mesh("x=2,y=2", body, seed)


def test_two_pending_axes_are_reduced_once(seed):
    """B9: ones partial on both axes of 2x2 are 4, in one collective."""

    def body(r):
        ones = torch.ones(4, 3, dtype=torch.float64)
        with r.sends("all_reduce x,y"):
            r.check(all_reduce(assume_partial(shard(ones, r.mesh), ["x", "y"])), 4 * ones, "[],[] I{x,y}")
        y = assume_partial(shard(ones, r.mesh), ["x", "y"])
        with r.sends("all_reduce x,y"):
            r.check(y.reshard(None), 4 * ones, "[],[] I{x,y}")
        with r.sends("all_reduce x"):
            r.check(all_reduce(y, "sum", "x"), 4 * ones, "[],[] P{y} I{x}")

    on_mesh("x=2,y=2", body, seed)


WIDENED = {
    "sum": lambda x: x.sum(),
    "sum of a dtype": lambda x: x.sum(0, dtype=torch.float64),
    "cumsum": lambda x: x.cumsum(1),
    "product with a number": lambda x: x * 2.5,
    "product": lambda x: x * x.to(torch.float64),
    "quotient": lambda x: x / 2,
    "sum with wider elements": lambda x: x + x.to(torch.int64) * 300,
    "mean": lambda x: x.mean(dtype=torch.float32),
}


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("name", WIDENED)
def test_terms_that_wrap_around(name, anchored, seed):
    """They add up in their own dtype only: they are reduced before a function that gives a wider one."""
    function = WIDENED[name]

    def body(r):
        for dtype in (torch.uint8, torch.int8, torch.int32):
            value = r.randint(100, 3, 4).to(dtype)
            first = torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, (3, 4), generator=r._generator)
            terms = first.to(dtype), value - first.to(dtype)
            x = from_local(terms[r.index].clone(), r.mesh, "[],[] P{x}")
            r.check(function(x.anchor() if anchored else x), function(value))

    on_mesh("x=2", body, seed)


def test_terms_that_a_narrower_dtype_does_not_have(seed):
    def body(r):
        terms = torch.tensor([[70000.0, 1.0], [-69998.0, 2.0]])
        x = from_local(terms[r.index].clone(), r.mesh, "[] P{x}")
        for function in (lambda v: v.sum(dtype=torch.float16), lambda v: v.cumsum(0, dtype=torch.bfloat16)):
            with r.sends("all_reduce x"):
                got = function(x)
            r.check(got, function(terms.sum(0)))

    on_mesh("x=2", body, seed)
