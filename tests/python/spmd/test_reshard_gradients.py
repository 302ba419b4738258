"""Gradients of reshard, and their layouts: by pairs of layouts."""

import math

import pytest
import torch
from spmd_ranks import MESHES, P, gradient_of, on_mesh, random_layout

from torch_overlap.mesh import (
    CostModel,
    Layout,
    Mesh,
    assume_partial,
    gradient_layout,
    shard,
)


def averages(layout):
    count = 1
    for name, kind in layout.partial.items():
        count *= layout.mesh.axis(name).size if kind == "avg" else 1
    return count


@pytest.mark.parametrize("kind", ["sum", "avg"])
@pytest.mark.parametrize("text", MESHES)
def test_reshard_between_any_layouts(text, kind, seed):
    """The gradient of a reshard is the gradient of the same value: R and P, S and I are exchanged by the pairs."""

    def body(r):
        mesh = r.mesh.mesh
        for _ in range(25):
            shape = [r.draw.randint(1, 9) for _ in range(r.draw.randint(1, 3))]
            before, after = (random_layout(r.draw, mesh, len(shape), kinds=(kind,)) for _ in range(2))
            if r.draw.random() < 0.3:  # cut evenly by the same axes, in another order
                shape = [r.draw.randint(1, 3) * math.prod(mesh.axes[a] for a in dim) for dim in before.dims]
                after = Layout(mesh, [r.draw.sample(dim, len(dim)) for dim in before.dims])
            x = r.place(r.randn(*shape), before).requires_grad_()
            y = x.reshard(after)
            c = r.randn(*shape)
            # Each of n terms of a mean has 1/n of the gradient.
            seed_gradient = r.place(c / averages(after), gradient_layout(after))
            (local,) = torch.autograd.grad(y.local, x.local, seed_gradient.local)
            r.check(gradient_of(x, local), c / averages(before))

    on_mesh(text, body, seed, cost=CostModel.bandwidth_only())


# An invariant axis, of which only a part is used afterwards, or was before.
PARTS = [
    ("[] I{x}", "[x:(1)2]"),
    ("[] I{x}", "[x:(1)2] I{x:(2)2}"),
    ("[] I{x}", "[x:(2)2] I{x:(1)2}"),
    ("[x:(1)2] I{x:(2)2}", "[] I{x}"),
    ("[x:(1)2]", "[] I{x}"),
    ("[x:(1)2] I{x:(2)2}", "[x]"),
]


def test_parts_of_an_invariant_axis(seed):
    def body(r):
        for before, after in PARTS:
            layouts = [Layout.parse(r.mesh.mesh, text) for text in (before, after)]
            value, c = r.randn(8), r.randn(8)
            x = r.place(value, layouts[0]).requires_grad_()
            y = x.reshard(layouts[1])
            r.check(y, value, after)
            seed_gradient = r.place(c, gradient_layout(layouts[1]))
            (local,) = torch.autograd.grad(y.local, x.local, seed_gradient.local)
            r.check(gradient_of(x, local), c)

    on_mesh("x=4", body, seed, sub_axes=["x:(1)2", "x:(2)2"])


@pytest.mark.parametrize("text", ["dp=2,tp=2", "dp=3,tp=2", "dp=2,tp=2,pp=2"])
def test_reshard_twice_differentiated(text, seed):
    """The second derivative of sum(x ** 3) along d is 6 x d, before and after any reshard."""

    def body(r):
        made = []
        for _ in range(12):
            shape = [r.draw.randint(1, 7) for _ in range(2)]
            before, after = (random_layout(r.draw, r.mesh.mesh, 2) for _ in range(2))
            value, d = r.randn(*shape), r.randn(*shape)
            x = r.place(value, before).requires_grad_()
            loss = x.reshard(after).pow(3).sum().full()
            (first,) = torch.autograd.grad(loss, x.local, create_graph=True)
            first = gradient_of(x, first)
            (second,) = torch.autograd.grad((first * shard(d, r.mesh)).sum().full(), x.local)
            made += [(first, 3 * value**2), (gradient_of(x, second), 6 * value * d)]
        for got, expected in made:
            r.check(got, expected)

    on_mesh(text, body, seed)


def test_a_plain_leaf_behind_shard(seed):
    """shard of a plain tensor is differentiable: every rank gets the whole gradient, for any layout."""

    def body(r):
        for spec in (None, P("x"), P("x", "y"), P(("y", "x")), P(None, "y")):
            for shape in ((8, 6), (7, 5)):
                x, c = r.randn(*shape).requires_grad_(), r.randn(*shape)
                (shard(x, r.mesh, spec) * shard(c, r.mesh)).sum().backward()
                torch.testing.assert_close(x.grad, c)

    on_mesh("x=2,y=2", body, seed)


def test_backward_of_a_pending_mean(seed):
    """A term of a mean over N ranks has 1/N of the gradient."""

    def body(r):
        value, c = r.randn(4, 6), r.randn(4, 6)
        for layout in ("[],[] I{x,y}", "[y],[]"):
            x = r.place(value, layout).requires_grad_()
            assume_partial(x, "x", "avg").backward(shard(c, r.mesh))
            r.check(x.grad, c)

    on_mesh("x=3,y=2", body, seed)


@pytest.mark.parametrize(
    ("mesh", "layout", "expected"),
    [
        ("x=2,y=2", "[x],[]", "[x],[] P{y}"),
        ("x=2,y=2", "[x],[] I{y}", "[x],[] I{y}"),
        ("x=2,y=2", "[x],[] P{y}", "[x],[]"),
        ("x=2,y=2", "[],[]", "[],[] P{x,y}"),
        ("x=8", "[x:(2)2],[]", "[x:(2)2],[] P{x:(1)2,x:(4)2}"),
        ("x=8,y=2", "[x:(1)2],[x:(4)2] I{y}", "[x:(1)2],[x:(4)2] P{x:(2)2} I{y}"),
        ("x=8", "[x:(4)2],[x:(1)4]", "[x:(4)2],[x:(1)4]"),
        ("x=8,y=1", "[x:(1)4],[] I{x:(4)2}", "[x:(1)4],[] P{y} I{x:(4)2}"),
    ],
)
def test_the_layout_of_a_gradient(mesh, layout, expected):
    """R and P are exchanged; so is the rest of an axis that is used in part."""
    mesh = Mesh.parse(mesh)
    assert gradient_layout(Layout.parse(mesh, layout)) == Layout.parse(mesh, expected)


def test_uneven_parts_of_an_axis(seed):
    """18 rows on 4 ranks, as 2 x 9: half of the axis remains, along which gradients are partial."""

    def body(r):
        for n in (6, 18, 10):
            value = r.randn(n, 3)
            leaf = value.clone().requires_grad_()
            expected = leaf.unflatten(0, (2, -1))
            c = r.randn(*expected.shape)
            expected.backward(c)
            x = shard(value, r.mesh, P("x")).requires_grad_()
            y = r.check(x.unflatten(0, (2, -1)), expected)
            y.backward(shard(c, r.mesh))
            r.check(x.grad, leaf.grad, "[x],[]")

    on_mesh("x=4", body, seed)
