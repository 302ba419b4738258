"""Values on a mesh: the part of each rank, even or not; all parts together are the value."""

import pytest
import torch
from spmd_ranks import MESHES, P, on_mesh

from torch_overlap.mesh import Layout, Mesh, axis_index, from_local, shard

UNEVEN = (7, 11, 10, 5, 3, 1)


def trip(r, x, spec, layout):
    """Shards x and makes it whole again; the sharding sends nothing."""
    with r.sends():
        y = r.check(shard(x, r.mesh, spec), x, layout)
    r.check(y.reshard(None), x)
    torch.testing.assert_close(y.full(), x, rtol=0, atol=0)
    r.check(from_local(y.local, r.mesh, y.layout, x.shape), x, str(y.layout))
    return y


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("mesh", "shape", "spec", "layout", "local"),
    [
        pytest.param("dp=4", (8, 4), P("dp"), "[dp],[]", (2, 4), id="T1"),
        pytest.param("dp=2,tp=4", (8, 16), P(None, "dp"), "[],[dp] I{tp}", (8, 8), id="T2"),
        pytest.param("dp=2,tp=4", (8, 16), P("dp", "tp"), "[dp],[tp]", (4, 4), id="T2-both"),
        pytest.param("x=2,y=2,z=2", (8, 8, 8), P("x", "y", "z"), "[x],[y],[z]", (4, 4, 4), id="T3"),
        pytest.param("dp=2,tp=4", (8, 16), None, "[],[] I{dp,tp}", (8, 16), id="T4"),
        pytest.param("dp=2,tp=4", (8, 16), P(("dp", "tp")), "[dp,tp],[]", (1, 16), id="T4-one-dimension"),
        pytest.param("dp=2,tp=4", (8, 16), P(("tp", "dp")), "[tp,dp],[]", (1, 16), id="T4-minor-first"),
    ],
)
def test_parts_are_cut_without_sending(mesh, shape, spec, layout, local, seed):
    """T1-T4."""

    def body(r):
        y = trip(r, r.randn(*shape), spec, layout)
        assert tuple(y.local.shape) == local

    on_mesh(mesh, body, seed)


@pytest.mark.parametrize("text", MESHES)
def test_every_mesh_cuts_every_way(text, seed):
    """T1-T4 on all meshes, with ranks in another order; B3: rank and position are not confused."""
    plain = Mesh.parse(text)
    ranks = list(reversed(plain.ranks))
    ranks[0], ranks[-1] = ranks[-1], ranks[0]

    def body(r):
        names = list(r.mesh.mesh.axes)
        x = r.randn(8, 12)
        for dims in ((names[0], None), (None, names[0]), (names[0], names[1]), (names[1], names[0]), (names, None),
                     (names[::-1], None), (None, names), (names[1:], names[0])):  # fmt: skip
            layout = Layout(r.mesh.mesh, dims)
            trip(r, x, P(*dims), str(layout.with_invariant([n for n in names if n not in str(layout)])))

    on_mesh(Mesh(plain.axes, ranks), body, seed)


@pytest.mark.parametrize(
    ("before", "after"),
    [("[x],[]", "[x,y],[]"), ("[x],[]", "[x],[y]"), ("[y],[]", "[y],[x]"), ("[],[y]", "[],[y,x]")],
)
def test_a_part_is_cut_further(before, after, seed):
    """B3: each rank cuts its own part; nothing is sent."""

    def body(r):
        x = r.randn(8, 12)
        y = r.check(shard(x, r.mesh, before), x)
        with r.sends():
            r.check(y.reshard(after), x, after)

    on_mesh("x=2,y=2", body, seed)


@pytest.mark.parametrize("n", UNEVEN)
def test_uneven_parts(n, seed):
    """T43, B20: torch.chunk's parts through elementwise functions, gathers and reductions."""

    def body(r):
        x = r.randn(n, 3)
        y = trip(r, x, P("x"), "[x],[]")
        layout = "[x],[]" if n > 1 else None  # one row may be broadcast, and so gathered
        r.check(torch.relu(y), x.relu(), layout)
        r.check(y * y - 2, x * x - 2, layout)
        if n == 1:
            r.check(y.sum(0), x.sum(0))
            return tuple(y.local.shape)
        with r.sends():
            r.check(torch.relu(y), x.relu(), layout)
            total = r.check(y.sum(0), x.sum(0), "[] P{x}")
        with r.sends("all_reduce x"):
            r.check(total.reshard(None), x.sum(0), "[] I{x}")
        columns = r.randn(3, n)
        z = trip(r, columns, P(None, "x"), "[],[x]")
        with r.sends():
            r.check(y.mean(0), x.mean(0), "[] P{x}")
            r.check(y.amax(0), x.amax(0), "[] P{x:max}")
            r.check(z @ y, columns @ x, "[],[] P{x}")
        with r.sends("all_reduce x"):
            assert y.amax().item() == x.max().item()
        with r.sends("all_gather x"):
            r.check(z.reshard(P(None, None)), columns, "[],[] I{x}")
        with r.sends("all_to_all x"):
            r.check(z.reshard(P("x", None)), columns, "[x],[]")
        return tuple(y.local.shape)

    shapes = on_mesh("x=4", body, seed)
    if n == 5:
        assert shapes == [(2, 3), (2, 3), (1, 3), (0, 3)]


def test_uneven_parts_on_two_axes(seed):
    """T43, B20: nested, as DTensor cuts: 10 over 2 and 4."""

    def body(r):
        x = r.randn(10, 3)
        y = trip(r, x, P(("x", "y")), "[x,y],[]")
        for spec in (P("x"), P("y"), P(("y", "x")), P(None, "x"), P("y", "x")):
            r.check(y.reshard(spec), x)
        return len(y.local)

    assert on_mesh("x=2,y=4", body, seed) == [2, 2, 1, 0, 2, 2, 1, 0]


def test_smaller_than_the_mesh(seed):
    """T44: 2x2 products and a 1x1 tensor on four ranks; no part, one part, the whole."""

    def body(r):
        a, b, one = r.randn(2, 2), r.randn(2, 2), r.randn(1, 1)
        rows, columns, gather = P("x"), P(None, "x"), "all_gather x"
        for left, right, sent, layout in (
            (rows, rows, [gather], "[x],[]"), (rows, columns, [gather], "[x],[]"), (rows, P(), [], "[x],[]"),
            (columns, rows, [], "[],[] P{x}"), (columns, columns, [gather], "[],[x]"),
            (columns, P(), [], "[],[] P{x}"), (P(), rows, [], "[],[] P{x}"), (P(), columns, [], "[],[x]"),
            (P(), P(), [], "[],[] I{x}"),
        ):  # fmt: skip
            with r.sends(*sent):
                r.check(shard(a, r.mesh, left) @ shard(b, r.mesh, right), a @ b, layout)
        for spec in (rows, columns, P()):
            y = trip(r, one, spec, str(shard(one, r.mesh, spec).layout))
            with r.sends():
                r.check(y.exp(), one.exp(), str(y.layout))
            with r.sends(*[gather] * 2 * bool(spec)):  # both operands: a caller's value may change between two
                r.check(y @ y, one @ one, "[],[] I{x}")
            assert y.sum().item() == one.item()

    on_mesh("x=4", body, seed)


def test_parts_of_an_axis(seed):
    """T45, B2: an axis of 8 as 2 x 4, half of an axis of 4; the ranks along the rest have copies."""

    def two(r):
        x = r.randn(16, 32)
        y = r.check(r.place(x, "[d:(1)2],[d:(2)4]"), x)
        assert tuple(y.local.shape) == (8, 8)
        with r.sends():
            r.check(torch.relu(y), x.relu(), "[d:(1)2],[d:(2)4]")
        with r.sends("all_gather d:(2)4"):
            r.check(y.reshard("[d:(1)2],[] I{d:(2)4}"), x, "[d:(1)2],[] I{d:(2)4}")
        r.check(y.reshard(None), x, "[],[] I{d}")

    on_mesh("d=8", two, seed, sub_axes=("d:(1)2", "d:(2)4"))

    def half(r):
        x = r.randn(4, 3)
        y = r.check(r.place(x, "[g:(1)2],[]"), x)
        with r.sends():
            r.check(torch.relu(y), x.relu(), "[g:(1)2],[]")
        return y.local

    copies = on_mesh("g=4", half, seed, sub_axes=("g:(1)2",))
    assert torch.equal(copies[0], copies[1])
    assert torch.equal(copies[2], copies[3])
    assert not torch.equal(copies[0], copies[2])


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [("dp=4", {"dp": [0, 1, 2, 3]}), ("x=2,y=2", {"x": [0, 0, 1, 1], "y": [0, 1, 0, 1]})],
)
def test_axis_index(mesh, expected, seed):
    """T17: each rank's coordinate, as data and as an int."""

    def body(r):
        out = {}
        with r.sends():
            for name, size in r.mesh.mesh.axes.items():
                others = [n for n in r.mesh.mesh.axes if n != name]
                layout = str(Layout(r.mesh.mesh, [name], invariant=others))
                index = r.check(axis_index(r.mesh, name), torch.arange(size, dtype=torch.int32), layout)
                assert tuple(index.local.shape) == (1,)
                assert index.local.item() == r.mesh.coordinate(name)
                out[name] = r.mesh.coordinate(name)
        return out

    results = on_mesh(mesh, body, seed)
    assert {name: [r[name] for r in results] for name in expected} == expected


def test_axis_index_on_ranks_in_another_order(seed):
    """T17: along a mesh of permuted ranks."""
    results = on_mesh(Mesh({"x": 2, "y": 2}, [2, 0, 3, 1]), lambda r: axis_index(r.mesh, "x").local.item(), seed)
    assert results == [0, 1, 0, 1]


def test_shard_of_a_sharded_value(seed):
    """shard as a function and as a method is reshard; replicated and partial axes are named."""

    def body(r):
        x = r.randn(8, 4)
        y = shard(x, r.mesh, P("x"))
        r.check(shard(y, r.mesh, P("y")), x, "[y],[] I{x}")
        r.check(y.shard(r.mesh, P(None, ("x", "y"))), x, "[],[x,y]")
        r.check(shard(x, r.mesh, P("x"), replicated_axes=["y"]), x, "[x],[] I{y}")
        r.check(shard(x, r.mesh, P("x"), partial_sum_axes=["y"]), x, "[x],[] P{y}")
        with r.sends("all_reduce y"):
            r.check(shard(x, r.mesh, P("x"), partial_sum_axes=["y"]).reshard(P("x")), x, "[x],[] I{y}")

    on_mesh("x=2,y=2", body, seed)
