"""Functions that move parts, on every mesh: value, parts, layout, and the operations sent."""

import pytest
import torch
from spmd_ranks import MESHES, P, on_mesh

from torch_overlap.mesh import (
    Layout,
    Mesh,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    from_local,
    gather_all_axes,
    ppermute,
    reduce_scatter,
    shard,
    shard_module,
)


def sizes_of(r):
    return {name: size for name, size in r.mesh.mesh.axes.items() if size > 1}


@pytest.mark.parametrize("text", MESHES)
def test_all_gather_of_one_dimension(text, seed):
    """T5-T7, B18: only that dimension is gathered, over its own axes."""

    def body(r):
        x = r.randn(12, 8)
        a, b = list(r.mesh.mesh.axes)[:2]
        rest = [name for name in r.mesh.mesh.axes if name not in (a, b)]
        y = shard(x, r.mesh, P(a, b))
        live = sizes_of(r)
        with r.sends(*[f"all_gather {a}"] * (a in live)):
            r.check(all_gather(y, 0), x, f"[],[{b}] I{{{','.join([a, *rest])}}}")
        with r.sends(*[f"all_gather {b}"] * (b in live)):
            r.check(all_gather(y, -1), x, f"[{a}],[] I{{{','.join([b, *rest])}}}")
        z = shard(x, r.mesh, P(a))
        with r.sends(*[f"all_gather {a}"] * (a in live)):
            r.check(all_gather(z, axis=0), x, f"[],[] I{{{','.join([a, b, *rest])}}}")
        with r.sends():
            r.check(all_gather(z, 1), x, str(z.layout))

    on_mesh(text, body, seed)


@pytest.mark.parametrize("dims", [("dp", "tp"), ("tp", "dp")])
@pytest.mark.parametrize("text", ["dp=2,tp=2", "dp=2,tp=4", "dp=3,tp=2"])
def test_all_gather_of_a_dimension_on_two_axes(text, dims, seed):
    """B1: all of the axes, in the order of the dimension; uneven too."""

    def body(r):
        for n in (24, 13):
            x = r.randn(n, 3)
            y = shard(x, r.mesh, P(dims))
            r.sent()
            r.check(all_gather(y, 0), x, "[],[] I{dp,tp}")
            sent = r.sent()
            assert sent in (["all_gather dp,tp"], [f"all_gather {a}" for a in dims[::-1]]), sent

    on_mesh(text, body, seed)


def test_parts_of_an_axis_are_gathered_and_reduced_in_their_groups(seed):
    """B2: groups are those of the part of the axis, not of the whole axis."""

    def body(r):
        x = r.randn(16, 8)
        y = r.place(x, "[d:(1)2],[d:(2)4]")
        with r.sends("all_gather d:(1)2"):
            r.check(all_gather(y, 0), x, "[],[d:(2)4] I{d:(1)2}")
        with r.sends("all_gather d:(2)4"):
            r.check(all_gather(y, 1), x, "[d:(1)2],[] I{d:(2)4}")
        pending = r.place(x, "[],[d:(2)4] P{d:(1)2}")
        with r.sends("all_reduce d:(1)2"):
            r.check(all_reduce(pending), x, "[],[d:(2)4] I{d:(1)2}")
        with r.sends("reduce_scatter d:(1)2"):
            r.check(reduce_scatter(pending, 0), x, "[d:(1)2],[d:(2)4]")
        with r.sends("all_to_all d:(1)2"):
            r.check(all_to_all(y, 1, 0), x, "[],[d:(2)4,d:(1)2]")

    on_mesh("d=8", body, seed, sub_axes=("d:(1)2", "d:(2)4"))


@pytest.mark.parametrize("text", MESHES)
def test_gather_all_axes(text, seed):
    """T14: the value is whole on every rank, and partial values are reduced."""

    def body(r):
        x = r.randn(12, 9)
        names = list(r.mesh.mesh.axes)
        whole = str(Layout.replicated(r.mesh.mesh, 2).with_invariant(names))
        with r.sends():
            r.check(gather_all_axes(shard(x, r.mesh)), x, whole)
        for layout in (P(names[0], names[1]), P(names), P(None, names[::-1])):
            r.check(gather_all_axes(shard(x, r.mesh, layout)), x, whole)
        r.check(gather_all_axes(r.place(x, Layout(r.mesh.mesh, [names[0], None], names[1]))), x, whole)
        if text == "dp=2,tp=2":
            y = shard(torch.arange(64.0).view(8, 8), r.mesh, P("dp", "tp"))
            r.sent()
            gather_all_axes(y)
            assert sorted(r.sent()) == ["all_gather dp", "all_gather tp"]

    on_mesh(text, body, seed)


@pytest.mark.parametrize("text", MESHES)
def test_all_to_all(text, seed):
    """T10, T11, B5: along one axis of the mesh; negative dimensions count from the end."""

    def body(r):
        x = r.randn(12, 24)
        for name, size in r.mesh.mesh.axes.items():
            rest = ",".join(n for n in r.mesh.mesh.axes if n != name)
            for split, concat in ((1, 0), (-1, -2)):
                y = shard(x, r.mesh, P(name))
                with r.sends(*[f"all_to_all {name}"] * (size > 1)):
                    z = r.check(all_to_all(y, split, concat), x, f"[],[{name}] I{{{rest}}}")
                r.check(all_to_all(z, concat, split), x, str(y.layout))
                assert tuple(z.local.shape) == (12, 24 // size)

    on_mesh(text, body, seed)


def test_all_to_all_beside_other_axes(seed):
    """B5: two axes on one dimension, one of them on the other."""

    def body(r):
        x = r.randn(8, 16)
        r.check(all_to_all(shard(x, r.mesh, P(("x", "y"))), 1, 0), x, "[],[x,y]")
        r.check(all_to_all(shard(x, r.mesh, P("x", "y")), 0, 1), x, "[x,y],[]")
        r.check(all_to_all(r.place(x, "[x],[] P{y}"), 1, 0), x, "[],[x] P{y}")

    on_mesh("x=2,y=4", body, seed)


def test_all_to_all_under_vmap(seed):
    """T12: (2, 8, 8), each matrix by itself."""

    def body(r):
        x = r.randn(2, 8, 8)
        batch = shard(x, r.mesh, P(None, "tp"))
        with r.sends("all_to_all tp"):
            out = torch.func.vmap(lambda m: all_to_all(from_local(m, r.mesh, P("tp")), 1, 0).local)(batch.local)
        r.check(from_local(out, r.mesh, P(None, None, "tp")), x, "[],[],[tp]")

    on_mesh("tp=2", body, seed)


def test_all_to_all_with_stacked_parts(seed):
    """T10 with tiled=False: the parts of the joined dimension are a dimension of their own."""

    def body(r):
        x = r.randn(8, 12)
        with r.sends("all_to_all dp"):
            y = all_to_all(shard(x, r.mesh, P("dp")), 1, 0, tiled=False)
        r.check(y, x.view(4, 2, 12), "[],[],[dp]")

    on_mesh("dp=4", body, seed)


def test_all_to_all_needs_a_size_to_divide(seed):
    """T13, B20: refused, not truncated."""

    def body(r):
        with pytest.raises(ValueError, match=r"dimension 1 of \(4, 3\) divisible by the 2 ranks"):
            all_to_all(shard(r.randn(4, 3), r.mesh, P("tp")), 1, 0)
        with pytest.raises(ValueError, match=r"dimension 0 of \(5, 4\) divisible by the 2 ranks"):
            reduce_scatter(r.place(r.randn(5, 4), "[],[] P{tp}"), 0)
        with pytest.raises(ValueError, match="divisible by its 2 parts"):
            all_to_all(shard(r.randn(5, 4), r.mesh, P("tp")), 1, 0, tiled=False)

    on_mesh("tp=2", body, seed)


@pytest.mark.parametrize("shift", [1, -1])
def test_ppermute_in_a_ring(shift, seed):
    """T15: rolled parts, both ways."""

    def body(r):
        x = r.randn(8, 3)
        with r.sends("permute dp"):
            y = ppermute(shard(x, r.mesh, P("dp")), [(i, (i + shift) % 4) for i in range(4)])
        r.check(y, x.roll(2 * shift, 0), "[dp],[]")

    on_mesh("dp=4", body, seed)


@pytest.mark.parametrize("text", MESHES)
def test_ppermute_along_one_axis(text, seed):
    """T15, T16 on all meshes: each group by itself; the identity; ranks without a source get zeros."""

    def body(r):
        for name, size in r.mesh.mesh.axes.items():
            x = r.randn(size * 2, 3)
            y = shard(x, r.mesh, P(name))
            live = [f"permute {name}"] * (size > 1)
            with r.sends(*live):
                r.check(ppermute(y, [(i, (i + 1) % size) for i in range(size)], name), x.roll(2, 0), str(y.layout))
            with r.sends(*live):
                r.check(ppermute(y, [(i, i) for i in range(size)], name), x)
            if size > 1:
                with r.sends(*live * (r.mesh.coordinate(name) in (0, size - 1))):
                    z = ppermute(y, [(0, size - 1)], name)
                r.check(z, torch.cat([torch.zeros(2 * size - 2, 3).double(), x[:2]]))

    on_mesh(text, body, seed)


@pytest.mark.parametrize("text", MESHES)
def test_broadcast(text, seed):
    """Values that differ between ranks become the root's; along the named axes only."""

    def body(r):
        own = r.randn(r.mesh.mesh.size, 5, 2)  # one for each rank
        plain: Mesh = r.mesh.mesh
        for name, size in plain.axes.items():
            root = r.draw.randrange(size)
            group = plain.group(r.mesh.rank, name)
            mine = from_local(own[r.mesh.rank].clone(), r.mesh, None)
            with r.sends(*[f"broadcast {name}"] * (size > 1)):
                out = broadcast(mine, root, name)
            torch.testing.assert_close(out.local, own[group[root]], rtol=0, atol=0)
        live = list(sizes_of(r))
        with r.sends(f"broadcast {','.join(live)}"):
            out = broadcast(from_local(own[r.mesh.rank].clone(), r.mesh, None), plain.size - 1)
        r.check(out, own[plain.ranks[-1]], str(out.layout))

    on_mesh(text, body, seed)


def test_shard_copies_whatever_the_layout(seed):
    """The result does not share memory or being a leaf with the plain tensor; from_local uses the memory of its
    argument."""

    def body(r):
        for spec in (None, P(), P("x"), P(None, "y"), P(("x", "y")), "[],[]", "[],[] P{x}"):
            for make in (lambda x: x, lambda x: x.t(), lambda x: x.detach()[:]):
                x = make(r.randn(6, 6))
                whole = x.clone()
                y = shard(x, r.mesh, spec).requires_grad_()
                assert y.is_leaf
                assert not x.requires_grad
                x.fill_(7)
                torch.testing.assert_close(y.full(), whole)
                with torch.no_grad():
                    y.local.fill_(3)
                assert x.eq(7).all()
                leaf = whole.requires_grad_()
                y = shard(leaf, r.mesh, spec)
                assert not y.is_leaf
                assert y.requires_grad
                with torch.no_grad():
                    leaf.fill_(7)
                assert not y.full().eq(7).any()
        x = r.randn(4, 6)
        assert from_local(x, r.mesh, P()).local is x
        whole = torch.nn.Linear(6, 6)
        parameter = whole.weight
        shard_module(whole, r.mesh, {"weight": P("x"), "bias": P()})
        assert whole._parameters["weight"].untyped_storage().nbytes() == parameter.untyped_storage().nbytes() // 2

    on_mesh("x=2,y=2", body, seed)
