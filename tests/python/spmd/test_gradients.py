"""Gradients of the communication functions: by pairs of layouts, equal to those of the global function."""

import pytest
import torch
from spmd_ranks import P, gradient_of, on_mesh
from torch.utils.checkpoint import checkpoint

from torch_overlap.mesh import (
    Layout,
    Mesh,
    all_gather,
    all_reduce,
    all_to_all,
    assume_partial,
    broadcast,
    choosing,
    from_local,
    gather_all_axes,
    gradient_layout,
    pmean,
    ppermute,
    reduce_scatter,
    shard,
)


def ring(n):
    return [(i, (i + 1) % n) for i in range(n)]


def chunks(x, n, dim=0):
    return torch.stack(x.chunk(n, dim))


# name -> (layout of the operand, the function, the same on the whole value). One axis "x" of n ranks; "y" has 2.
FUNCTIONS = {
    "all_reduce, sum": ("[],[] P{x} I{y}", lambda v, n: all_reduce(v), lambda v, n: v),
    "all_reduce, sum of two axes": ("[],[] P{x,y}", lambda v, n: all_reduce(v), lambda v, n: v),
    "all_reduce, avg": (
        "[x],[] I{y}",
        lambda v, n: all_reduce(v, "avg", "x"),
        lambda v, n: chunks(v, n).mean(0),
    ),
    "all_reduce of parts": (
        "[],[x] I{y}",
        lambda v, n: all_reduce(v, "sum", "x"),
        lambda v, n: chunks(v, n, 1).sum(0),
    ),
    "all_reduce of invariant copies": ("[],[] I{x,y}", lambda v, n: all_reduce(v, "sum", "x"), lambda v, n: n * v),
    "all_reduce of replicated copies": ("[],[]", lambda v, n: all_reduce(v, "sum", "x"), lambda v, n: n * v),
    "pmean of invariant copies": ("[],[] I{x,y}", lambda v, n: pmean(v, "x"), lambda v, n: v),
    "pmean of replicated copies": ("[y],[]", lambda v, n: pmean(v, "x"), lambda v, n: v),
    "pmean of parts": ("[x],[y]", lambda v, n: pmean(v, "x"), lambda v, n: chunks(v, n).mean(0)),
    "all_gather": ("[x],[y]", lambda v, n: all_gather(v, 0), lambda v, n: v),
    "all_gather of two axes": ("[],[x,y]", lambda v, n: all_gather(v, 1), lambda v, n: v),
    "gather_all_axes": ("[x],[] P{y}", lambda v, n: gather_all_axes(v), lambda v, n: v),
    "reduce_scatter, axis 0": ("[],[] P{x} I{y}", lambda v, n: reduce_scatter(v, 0), lambda v, n: v),
    "reduce_scatter, axis 1": ("[],[y] P{x}", lambda v, n: reduce_scatter(v, 1), lambda v, n: v),
    "reduce_scatter of copies": ("[],[] I{x,y}", lambda v, n: reduce_scatter(v, 1, "x"), lambda v, n: n * v),
    "reduce_scatter, avg": ("[],[] I{x}", lambda v, n: reduce_scatter(v, -1, "x", "avg"), lambda v, n: v),
    "reduce_scatter of parts": (
        "[x],[] I{y}",
        lambda v, n: reduce_scatter(v, 1, "x"),
        lambda v, n: chunks(v, n).sum(0),
    ),
    "all_to_all": ("[x],[] I{y}", lambda v, n: all_to_all(v, 1, 0), lambda v, n: v),
    "all_to_all, stacked": (
        "[x],[] I{y}",
        lambda v, n: all_to_all(v, 1, 0, tiled=False),
        lambda v, n: v.unflatten(0, (n, -1)),
    ),
    "ppermute, ring": (
        "[x],[] I{y}",
        lambda v, n: ppermute(v, ring(n), "x"),
        lambda v, n: v.roll(len(v) // n, 0),
    ),
    "ppermute, identity": ("[],[x]", lambda v, n: ppermute(v, [(i, i) for i in range(n)], "x"), lambda v, n: v),
    "ppermute, one": (
        "[x],[] I{y}",
        lambda v, n: ppermute(v, [(0, n - 1)], "x"),
        lambda v, n: torch.cat([torch.zeros_like(v[len(v) // n :]), v[: len(v) // n]]),
    ),
    "ppermute of copies": ("[],[y] I{x}", lambda v, n: ppermute(v, ring(n), "x"), lambda v, n: v),
    "broadcast of invariant copies": ("[],[] I{x,y}", lambda v, n: broadcast(v, n - 1, "x"), lambda v, n: v),
    "broadcast of replicated copies": ("[y],[]", lambda v, n: broadcast(v, 0), lambda v, n: v),
    "assume_partial, invariant": ("[],[] I{x,y}", lambda v, n: assume_partial(v, "x"), lambda v, n: n * v),
    "assume_partial, replicated": ("[y],[]", lambda v, n: assume_partial(v, "x"), lambda v, n: n * v),
    "assume_partial, avg": ("[],[] I{x,y}", lambda v, n: assume_partial(v, "x", "avg").reshard(None), lambda v, n: v),
    "shard": ("[],[] I{x,y}", lambda v, n: shard(v, v.mesh, P("x", "y")), lambda v, n: v),
    "shard, partial": ("[],[] I{x,y}", lambda v, n: shard(v, v.mesh, P("x"), partial_sum_axes=["y"]), lambda v, n: v),
}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_the_global_function(name, n, seed):
    """T16, T20, B17: autograd of the unsharded function, and finite differences, in fp64."""
    layout, function, reference = FUNCTIONS[name]

    def body(r):
        value = r.randn(12, 12)
        leaf = value.clone().requires_grad_()
        expected = reference(leaf, n)
        c, d = r.randn(*expected.shape), r.randn(12, 12)
        (first,) = torch.autograd.grad((c * expected**2).sum(), leaf)

        def loss(x):
            out = function(x, n)
            r.check(out, reference(x.full().detach(), n))
            return (shard(c, r.mesh) * out * out).sum().full()

        x = r.place(value, layout).requires_grad_()
        (local,) = torch.autograd.grad(loss(x), x.local)
        r.check(gradient_of(x, local), first)
        step = 1e-6
        up, down = (loss(r.place(value + sign * step * d, layout)) for sign in (1, -1))
        torch.testing.assert_close((up - down) / (2 * step), (first * d).sum(), rtol=1e-4, atol=1e-4)

    on_mesh(f"x={n},y=2", body, seed)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_whole_jacobian(name, seed):
    """T16, T20, B17: gradcheck on all ranks at once, from a replicated tensor to the whole result."""
    n, (layout, function, reference) = 2, FUNCTIONS[name]

    def body(r):
        def whole(v):
            return function(shard(v, r.mesh).reshard(layout), n).full()

        value = r.randn(2 * n, 2 * n).requires_grad_()
        torch.testing.assert_close(whole(value), reference(value, n))
        assert torch.autograd.gradcheck(whole, value)

    on_mesh(f"x={n},y=2", body, seed)


PRODUCTS = {
    "columns, then rows": ("[],[] I{x}", "[],[] I{x}", ["all_reduce x"]),
    "sequence parallel": ("[x],[]", "[x],[]", ["all_gather x", "reduce_scatter x"]),
}


@pytest.mark.parametrize("how", ["sequential", "auto"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_whole_jacobian_of_products(name, how, seed):
    before, after, kinds = PRODUCTS[name]

    def body(r):
        def whole(x, up, down):
            h = torch.tanh(shard(x, r.mesh).reshard(before) @ shard(up, r.mesh, P(None, "x")).anchor())
            return (h @ shard(down, r.mesh, P("x")).anchor()).reshard(after)

        x, up, down = (r.randn(*shape).requires_grad_() for shape in ((4, 3), (3, 4), (4, 2)))
        with choosing(how):
            if how == "sequential":
                with r.sends(*kinds):
                    whole(x, up, down)
            torch.testing.assert_close(whole(x, up, down).full(), torch.tanh(x @ up) @ down)
            assert torch.autograd.gradcheck(lambda *tensors: whole(*tensors).full(), (x, up, down))

    on_mesh("x=2", body, seed)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_gradients(name, seed):
    """B17: the gradient of a gradient, in fp64."""
    layout, function, reference = FUNCTIONS[name]

    def body(r):
        value = r.randn(12, 12)
        leaf = value.clone().requires_grad_()
        expected = reference(leaf, 2)
        c, d = r.randn(*expected.shape), r.randn(12, 12)
        (first,) = torch.autograd.grad((c * expected**3).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad((first * d).sum(), leaf)
        x = r.place(value, layout).requires_grad_()
        loss = (shard(c, r.mesh) * function(x, 2) ** 3).sum().full()
        (local,) = torch.autograd.grad(loss, x.local, create_graph=True)
        got = gradient_of(x, local)
        (again,) = torch.autograd.grad((got * shard(d, r.mesh)).sum().full(), x.local)
        r.check(got, first)
        r.check(gradient_of(x, again), second)

    on_mesh("x=2,y=2", body, seed)


def test_the_square_of_a_sum_of_halves(seed):
    """T20: of sum(all_reduce(u) ** 2) both halves have 2 (uL + uR); under vmap over two dimensions too."""

    def body(r):
        u = r.randn(4)
        halves = u.view(2, 2)
        x = shard(u.clone(), r.mesh, P("tp")).requires_grad_()
        with r.sends("all_reduce tp"):
            y = all_reduce(x, "sum", "tp").pow(2).sum()
        with r.sends():
            y.backward()
        r.check(x.grad, (2 * halves.sum(0)).repeat(2), "[tp]")

        batch = r.randn(2, 2, 4)
        local = shard(batch, r.mesh, P(None, None, "tp")).local.clone().requires_grad_()

        def loss(row):
            return all_reduce(from_local(row, r.mesh, P("tp")), "sum").local.pow(2).sum()

        with r.sends("all_reduce tp"):
            torch.func.vmap(torch.func.vmap(loss))(local).sum().backward()
        expected = (2 * batch.view(2, 2, 2, 2).sum(2)).repeat(1, 1, 2)
        r.check(from_local(local.grad, r.mesh, P(None, None, "tp")), expected)

    on_mesh("tp=2", body, seed)


def test_a_sum_through_a_ring(seed):
    """T16: gradients of ones, by the identity and around the ring."""

    def body(r):
        identity = [(i, i) for i in range(4)]
        for pairs in (identity, ring(4), [(b, a) for a, b in ring(4)]):
            x = shard(r.randn(8, 3), r.mesh, P("dp")).requires_grad_()
            with r.sends("permute dp"):
                y = ppermute(x, pairs).sum()
            with r.sends("permute dp"):
                y.backward()
            r.check(x.grad, torch.ones(8, 3, dtype=torch.float64), "[dp],[]")

    on_mesh("dp=4", body, seed)


@pytest.mark.parametrize("kind", ["max", "min", "product"])
def test_other_reductions_have_no_gradient(kind, seed):
    """B17: they raise when one is requested."""

    def body(r):
        value = r.randn(4, 6)
        x = shard(value.clone(), r.mesh, P("x")).requires_grad_()
        y = all_reduce(x, kind, "x")
        with pytest.raises(Exception, match=rf"expected.*(sum|avg).*got.*{kind}"):
            y.sum().full().backward()
        pending = r.place(value, Layout(Mesh({"x": 2}), [None, None], {"x": kind})).requires_grad_()
        with pytest.raises(Exception, match=rf"expected.*(sum|avg).*got.*{kind}"):
            pending.reshard(None).sum().full().backward()
        extreme = {"max": x.amax, "min": x.amin}.get(kind)
        if extreme is not None:  # the same for a partial value by itself
            with pytest.raises(Exception, match=rf"expected.*(sum|avg).*got.*{kind}"):
                extreme(0).backward(shard(r.randn(6), r.mesh))
            with pytest.raises(Exception, match=rf"expected.*(sum|avg).*got.*{kind}"):
                extreme().backward()
        with torch.no_grad():
            all_reduce(x, kind, "x")

    on_mesh("x=2", body, seed)


def test_gradients_of_a_mixture(seed):
    """Functions and communication in one graph, used twice, with gradients that are added up."""

    def body(r):
        x, w = r.randn(8, 6), r.randn(6, 4)
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        hidden = torch.tanh(leaves[0] @ leaves[1])
        ((hidden @ leaves[1].T) * leaves[0]).sum().backward()
        xs = shard(x, r.mesh, P("dp")).requires_grad_()
        ws = shard(w, r.mesh, P(None, "tp")).requires_grad_()
        hidden = torch.tanh(xs @ ws)
        loss = ((all_gather(hidden, 1) @ ws.T) * xs).sum()
        loss.backward()
        r.check(xs.grad, leaves[0].grad)
        r.check(ws.grad, leaves[1].grad)
        xs.grad = None
        assert xs.grad is None

    on_mesh("dp=2,tp=2", body, seed)


@pytest.mark.parametrize(
    "layouts", [("[a],[]", "[a],[]", "[],[a]"), ("[],[] P{a}", "[],[a]", None), (None, None, "[a],[]")]
)
@pytest.mark.parametrize("is_result", [False, True])
def test_recomputed_values_have_their_gradients(layouts, is_result, seed):
    """torch.utils.checkpoint, also of a value that was moved before, and keeps the copy."""

    def body(r):
        xs = r.randn(4, 6), r.randn(8, 6), r.randn(6, 8)
        whole = [x.clone().requires_grad_() for x in xs]
        mine = [r.place(x, layout).requires_grad_() for x, layout in zip(xs, layouts, strict=True)]

        def loss_of(x, up, down, run):
            x = x * 1.5 if is_result else x
            hidden = x.exp().sum()
            y = run(lambda z: torch.tanh(z @ up.T) @ down.T, x)
            return (x + y).square().sum() + hidden

        def recomputed(function, x):
            return checkpoint(function, x, use_reentrant=False)

        losses = loss_of(*mine, recomputed), loss_of(*whole, lambda function, x: function(x))
        torch.testing.assert_close(losses[0].full(), losses[1])
        for loss in losses:
            loss.backward()
        for leaf, reference in zip(mine, whole, strict=True):
            r.check(leaf.grad, reference.grad)

    on_mesh("a=2", body, seed)


def test_gradients_by_torch_autograd(seed):
    """torch.autograd.grad and backward, of one value and of several, as of plain tensors."""

    def body(r):
        a, b, c = r.randn(4, 6), r.randn(6, 8), r.randn(4, 8)
        plain = [t.clone().requires_grad_() for t in (a, b)]
        x, w = (r.place(t, lies).requires_grad_() for t, lies in ((a, "[y],[x]"), (b, "[x],[] I{y}")))
        expected = torch.autograd.grad((plain[0] @ plain[1]).square().sum(), plain)
        found = torch.autograd.grad((x @ w).square().sum(), [x, w])
        for got, want, leaf in zip(found, expected, (x, w), strict=True):
            r.check(got, want, str(gradient_layout(leaf.layout)))
        expected = torch.autograd.grad([(plain[0] @ plain[1]).relu(), plain[0].relu()], plain[0], [c, a])
        found = torch.autograd.grad([(x @ w).relu(), x.relu()], x, [shard(c, r.mesh), shard(a, r.mesh, P("x"))])
        r.check(found[0], expected[0])
        assert torch.autograd.grad(x.sum(), [w], allow_unused=True) == (None,)
        r.check(torch.autograd.grad(x.sum(), [w], materialize_grads=True)[0], torch.zeros_like(b))
        torch.autograd.backward([(x @ w).sum(), x.square().sum()])
        torch.autograd.backward([(plain[0] @ plain[1]).sum(), plain[0].square().sum()])
        r.check(x.grad, plain[0].grad)
        r.check(w.grad, plain[1].grad)
        (x @ w).sum().backward(inputs=[x])  # adds nothing to the gradient of w
        (plain[0] @ plain[1]).sum().backward(inputs=plain[0])
        r.check(x.grad, plain[0].grad)
        r.check(w.grad, plain[1].grad)
        with pytest.raises(TypeError, match="backward: expected Sharded inputs, got Tensor"):
            (x @ w).sum().backward(inputs=[x.local])
        with pytest.raises(ValueError, match=r"grad: expected a scalar, got a Sharded of shape \(4, 6\)"):
            torch.autograd.grad(x * 1, x)
        with pytest.raises(TypeError, match="grad: expected Sharded inputs, got Tensor"):
            torch.autograd.grad(x.sum(), [x.local])
        with pytest.raises(ValueError, match="backward: expected a gradient for each of 1 values, got 2"):
            torch.autograd.backward([x * 1], [shard(a, r.mesh)] * 2)

    on_mesh("x=2,y=2", body, seed)
