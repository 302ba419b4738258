"""What rank processes run for test_processes; they find it by name."""

import torch
import torch.nn.functional as F
from spmd_ranks import P, gradient_of, random_layout

from torch_overlap.mesh import (
    all_gather,
    all_reduce,
    all_to_all,
    assume_partial,
    axis_index,
    broadcast,
    from_local,
    gather_all_axes,
    gradient_layout,
    pmean,
    ppermute,
    reduce_scatter,
    shard,
)


def layouts(r):
    for shape in ((8, 12), (7, 5), (3, 1)):
        x = r.randn(*shape)
        for spec in (None, P("x"), P("y"), P("x", "y"), P(("y", "x")), P(None, ("x", "y"))):
            with r.sends():
                y = r.check(shard(x, r.mesh, spec), x)
            r.check(y.reshard(None), x, "[],[] I{x,y}")
            r.check(y.reshard(P("y", "x")), x, "[y],[x]")
            r.check(from_local(y.local, r.mesh, y.layout, shape), x)
    return tuple(shard(torch.zeros(5, 2), r.mesh, P(("x", "y"))).local.shape)


def communication(r):
    x = r.randn(12, 8)
    a, b = r.mesh.mesh.axes["x"], r.mesh.mesh.axes["y"]
    with r.sends("all_gather x"):
        r.check(all_gather(shard(x, r.mesh, P("x", "y")), 0), x, "[],[y] I{x}")
    r.check(gather_all_axes(shard(x, r.mesh, P(("x", "y")))), x, "[],[] I{x,y}")
    with r.sends("all_reduce y"):
        r.check(all_reduce(r.place(x, "[x],[] P{y}")), x, "[x],[] I{y}")
    with r.sends("all_reduce x"):
        r.check(all_reduce(shard(x, r.mesh, P("x")), "max", "x"), torch.stack(x.chunk(a)).amax(0), "[],[] I{x,y}")
    with r.sends("all_reduce x,y"):
        r.check(all_reduce(assume_partial(shard(x, r.mesh), ["x", "y"])), a * b * x, "[],[] I{x,y}")
    r.check(reduce_scatter(r.place(x, "[x],[] P{y}"), 1), x, "[x],[y]")
    with r.sends("all_to_all x"):
        r.check(all_to_all(shard(x, r.mesh, P("x")), 1, 0), x, "[],[x] I{y}")
    r.check(pmean(shard(x, r.mesh), "y"), x, "[],[] I{y,x}")
    with r.sends("permute x"):
        moved = ppermute(shard(x, r.mesh, P("x")), [(i, (i + 1) % a) for i in range(a)], "x")
    r.check(moved, x.roll(12 // a, 0), "[x],[] I{y}")
    own = torch.full((3,), float(r.index))
    with r.sends("broadcast x,y"):
        r.check(broadcast(from_local(own, r.mesh, None), 1), torch.ones(3))
    r.check(axis_index(r.mesh, "y"), torch.arange(b, dtype=torch.int32), "[y] I{x}")


def products(r):
    x, up, down, c = r.randn(8, 8), r.randn(8, 12), r.randn(12, 8), r.randn(8, 8)
    leaves = [v.clone().requires_grad_() for v in (x, up, down)]
    expected = F.gelu(F.relu(leaves[0] @ leaves[1]) @ leaves[2])
    (expected * c).sum().backward()
    h = shard(x, r.mesh, P("x")).requires_grad_()
    w1 = shard(up, r.mesh, P(None, "y")).requires_grad_()
    w2 = shard(down, r.mesh, P("y")).requires_grad_()
    with r.sends("all_reduce y"):
        y = F.gelu(F.relu(h @ w1) @ w2)
    r.check(y, expected, "[x],[] I{y}")
    loss = (y * shard(c, r.mesh)).sum()
    torch.testing.assert_close(loss.full(), (expected * c).sum())
    loss.backward()
    for operand, leaf in zip((h, w1, w2), leaves, strict=True):
        r.check(operand.grad, leaf.grad, str(operand.layout))


def random_reshards(r, count):
    for _ in range(count):
        shape = [r.draw.randint(1, 9) for _ in range(r.draw.randint(1, 3))]
        before, after = (random_layout(r.draw, r.mesh.mesh, len(shape)) for _ in range(2))
        value, c = r.randn(*shape), r.randn(*shape)
        x = r.place(value, before).requires_grad_()
        y = r.check(x.reshard(after), value, str(after))
        (local,) = torch.autograd.grad(y.local, x.local, r.place(c, gradient_layout(after)).local)
        r.check(gradient_of(x, local), c)


def parts_of_an_axis(r):
    x = r.randn(16, 32)
    y = r.place(x, "[d:(1)2],[d:(2)2]")
    with r.sends("all_gather d:(2)2"):
        r.check(all_gather(y, 1), x, "[d:(1)2],[] I{d:(2)2}")
    r.check(torch.relu(y).sum(0), x.relu().sum(0), "[d:(2)2] P{d:(1)2}")
