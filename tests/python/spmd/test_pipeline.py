"""A pipeline made of functions of sharded values."""

import torch
from spmd_ranks import P, on_mesh

from torch_overlap.mesh import ppermute, shard


def reference(x, w, b, mask):
    y = torch.relu(torch.einsum("smk,skn->smn", x, w) + b[:, None])
    y = y.roll(1, 0)
    return torch.where(mask, y, x).sum((0, 1))


def test_a_step_of_a_pipeline(seed):
    """T56: every stage runs its layer and sends its result to the next stage, under a mask; and the gradients."""

    def body(r):
        x, w, b = r.randn(4, 4, 8), r.randn(4, 8, 8), r.randn(4, 8)
        mask = r.randn(4, 1, 1) > 0
        c = r.randn(8)
        leaves = [v.clone().requires_grad_() for v in (x, w, b)]
        expected = reference(*leaves, mask)
        expected.backward(c)
        xs, ws, bs = (shard(v.clone(), r.mesh, P("stage")).requires_grad_() for v in (x, w, b))
        with r.sends():
            y = torch.relu(xs @ ws + bs.unsqueeze(1))
        r.check(y, torch.relu(x @ w + b[:, None]), "[stage],[],[]")
        with r.sends("permute stage"):
            moved = ppermute(y, [(i, (i + 1) % 4) for i in range(4)])
        r.check(moved, torch.relu(x @ w + b[:, None]).roll(1, 0), "[stage],[],[]")
        with r.sends():
            out = torch.where(shard(mask, r.mesh, P("stage")), moved, xs).sum((0, 1))
        r.check(out, expected, "[] P{stage}")
        out.backward(shard(c, r.mesh))
        assert r.sent() == ["permute stage"]
        for operand, leaf in zip((xs, ws, bs), leaves, strict=True):
            r.check(operand.grad, leaf.grad, str(operand.layout))

    on_mesh("stage=4", body, seed)


def test_a_step_of_a_pipeline_under_vmap(seed):
    """T56: the layer as a function of one stage, over the stages of a rank."""

    def body(r):
        x, w, b = r.randn(8, 4, 8), r.randn(8, 8, 8), r.randn(8, 8)
        mask = r.randn(8, 1, 1) > 0
        c = r.randn(8)

        def layer(x, w, b):
            return torch.relu(x @ w + b)

        leaves = [v.clone().requires_grad_() for v in (x, w, b)]
        made = torch.func.vmap(layer)(*leaves)
        expected = torch.where(mask, made.roll(2, 0), leaves[0]).sum((0, 1))
        expected.backward(c)
        xs, ws, bs = (shard(v.clone(), r.mesh, P("stage")).requires_grad_() for v in (x, w, b))
        with r.sends("permute stage"):
            y = type(xs)(torch.func.vmap(layer)(xs.local, ws.local, bs.local), xs.spec)
            moved = ppermute(y, [(i, (i + 1) % 4) for i in range(4)])
            out = torch.where(shard(mask, r.mesh, P("stage")), moved, xs).sum((0, 1))
        r.check(out, expected, "[] P{stage}")
        with r.sends("permute stage"):
            out.backward(shard(c, r.mesh))
        for operand, leaf in zip((xs, ws, bs), leaves, strict=True):
            r.check(operand.grad, leaf.grad, str(operand.layout))

    on_mesh("stage=4", body, seed)
