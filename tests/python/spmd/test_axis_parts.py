"""Parts of a mesh axis: every pair of layouts, its values and gradients, for sizes that divide and that do not."""

import itertools

import pytest
import torch
from spmd_ranks import P, compare, on_mesh

from torch_overlap import InvalidValueError
from torch_overlap.mesh import (
    Sharded,
    clip_grad_norm_,
    full_state_dict,
    load_full_state_dict,
    ppermute,
    shard,
    shard_module,
)

PARTS = ("x:(1)2", "x:(2)2")


def layouts_over(one, two, whole=None):
    """Returns every layout of a matrix over two axes or parts: sharded, partial, invariant or replicated."""

    def text(names, places):
        lists = [",".join(n for n, place in zip(names, places, strict=True) if place == p) for p in range(4)]
        partial, invariant = (f" {p}{{{names}}}" * bool(names) for p, names in zip("PI", lists[2:], strict=True))
        return f"[{lists[0]}],[{lists[1]}]{partial}{invariant}"

    pairs = itertools.product(range(5), repeat=2)
    found = [text((one, two), places) for places in pairs] + [text((two, one), (d, d)) for d in range(2)]
    return found + [text((whole,), (place,)) for place in range(4) if whole]


@pytest.mark.parametrize("shape", [(4, 8), (5, 7), (6, 3)])
@pytest.mark.parametrize(("mesh", "names"), [("x=4", (*PARTS, "x")), ("x=2,y=2", ("x", "y"))])
def test_every_pair_of_layouts(mesh, names, shape, seed):
    """The plan, the collectives and their gradients split a dimension as the layout says."""

    def body(r):
        value, c = r.randn(*shape), r.randn(*shape)
        layouts = layouts_over(*names)
        gradient = shard(c, r.mesh)
        for before in layouts:
            torch.testing.assert_close(r.place(value, before).full(), value)
            for after in layouts:
                r.what = f"{before} to {after}"
                x = r.place(value, before).requires_grad_()
                y = r.check(x.reshard(after), value, after)
                y.backward(gradient)
                r.check(x.grad, c)

    on_mesh(mesh, body, seed)


def test_parts_that_arise_from_reshapes(seed):
    """The gradient of w is whole along a part of x, and partial along the other."""

    def body(r):
        value, w = r.randn(8, 5), r.randn(2, 5)
        for layout in ("[],[]", "[],[] I{x}", "[],[] P{x}", "[x],[]", "[],[x]", "[],[] I{x:(1)2}", "[x:(2)2],[]"):
            compare(r, lambda x, w: torch.maximum(x.reshape(2, 4, 5).sum(1), w), (value, w), ("[x],[]", layout))
            compare(r, lambda x, w: torch.cat([x.reshape(2, 4, 5).mean(1), w], 1), (value, w), ("[x],[]", layout))
            compare(r, lambda x, w: x.reshape(2, 4, 5).sum(1) @ w.t(), (value, w), ("[x],[]", layout))

    on_mesh("x=4", body, seed)


def reshard_if_sharded(x, layout):
    return x.reshard(layout) if isinstance(x, Sharded) else x


@pytest.mark.parametrize("rows", [8, 5])
def test_products_that_are_reduced_along_parts(rows, seed):
    """A deferred product, and a gathered operand: an operator that overlaps has the gradients of the plan."""

    def body(r):
        a, b = r.randn(rows, 8), r.randn(8, 4)
        for after in layouts_over(*PARTS, "x"):
            r.what = after
            compare(r, lambda x, y, to=after: reshard_if_sharded(x @ y, to), (a, b), ("[],[x]", "[x],[]"))
        for before in ("[x:(1)2,x:(2)2],[]", "[x:(2)2,x:(1)2],[]", "[x],[]"):
            for weight in ("[],[]", "[],[x]", "[],[] I{x:(1)2}", "[],[x:(2)2] I{x:(1)2}", "[],[] I{x}"):
                compare(r, torch.matmul, (a, b), (before, weight))

    on_mesh("x=4", body, seed)


@pytest.mark.parametrize("rows", [8, 5])
def test_parts_use_the_communicator_of_their_axis(rows, seed):
    """No communicator is split off for parts that together are an axis: a compiler could not."""

    def body(r):
        x = r.place(r.randn(rows, 3), "[x:(1)2,x:(2)2],[]")
        with r.sends("all_gather x"):
            x.full()
        with r.sends("all_gather x"):
            x.reshard("[],[] I{x:(1)2}")
        with r.sends("reduce_scatter x"):
            r.place(r.randn(rows, 3), "[],[] P{x}").reshard("[x:(1)2,x:(2)2],[]")

    on_mesh("x=4", body, seed)


@pytest.mark.parametrize("defer", [False, True])
def test_the_norm_of_gradients_counts_copies_once(defer, seed):
    """A weight that is sharded along a part of an axis has copies along the rest. Uneven, saved and loaded, too."""

    def body(r):
        for layout in ("[x:(1)2],[] I{x:(2)2}", "[x:(2)2],[]", "[x:(1)2,x:(2)2],[]", "[x:(2)2],[x:(1)2]", "[x],[]"):
            linear, reference = (torch.nn.Linear(7, 5, bias=False, dtype=torch.float64) for _ in range(2))
            state = {"weight": r.randn(5, 7)}
            reference.load_state_dict(state)
            module = shard_module(linear, r.mesh, {"weight": layout}, defer_gradients=defer)
            load_full_state_dict(module, state)
            torch.testing.assert_close(full_state_dict(module), state)
            x, c = r.randn(8, 7), r.randn(8, 5)
            (module(shard(x, r.mesh, P("x"))) * shard(c, r.mesh)).sum().backward()
            (reference(x) * c).sum().backward()
            expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            norm, _ = clip_grad_norm_(module, 0.5)
            torch.testing.assert_close(norm, expected)
            for one in (module, reference):
                torch.optim.SGD(one.parameters(), lr=1.0).step()
            torch.testing.assert_close(full_state_dict(module), reference.state_dict())

    on_mesh("x=4", body, seed)


def test_ppermute_refuses_copies_along_a_part(seed):
    def body(r):
        x = r.place(r.randn(8, 3), "[x:(1)2],[] I{x:(2)2}")
        with pytest.raises(InvalidValueError, match=r"got copies along \['x:\(2\)2'\] of \[x:\(1\)2\]"):
            ppermute(x, [(0, 1), (1, 2), (2, 3), (3, 0)])
        y = r.place(r.randn(8, 3), "[x:(1)2,x:(2)2],[]")
        assert torch.equal(ppermute(y, [(i, i) for i in range(4)]).local, y.local)

    on_mesh("x=4", body, seed)
