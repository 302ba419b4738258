"""A rank's queries and its uneven parts do not affect what all ranks must do alike; nor do modes and errors affect
results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from spmd_ranks import on_mesh
from torch import nn

from torch_overlap import InvalidValueError
from torch_overlap.mesh import Layout, P, Sharded, all_reduce, choices, choosing, shard, shard_module


def test_uneven_parts_choose_alike(seed):
    """The times of a fused and a plain product are so close that parts of other sizes would change the choice."""

    def body(r):
        x, w = r.randn(512, 64), r.randn(257, 64)
        for how in ("auto", "sequential"):
            with choosing(how), choices() as log:
                y = F.linear(shard(x, r.mesh, P("x")), shard(w, r.mesh, P("x")).anchor())
                torch.testing.assert_close(y.full(), F.linear(x, w))
            assert {choice.sizes for choice in log} == {(512, 129, 64)}

    on_mesh("x=2", body, seed)


def test_one_rank_may_look_at_a_pending_product(seed):
    def body(r):
        x, w = r.randn(8, 6), r.randn(6, 4)
        for look in (repr, lambda y: y.local, lambda y: y.detach(), lambda y: y.is_leaf):
            with choosing("auto"):
                y = shard(x, r.mesh, P(None, "x")) @ shard(w, r.mesh, P("x"))
                if r.mesh.rank == 0:
                    look(y)
                torch.testing.assert_close(y.reshard(P("x")).full(), x @ w)
                torch.testing.assert_close(y.full(), x @ w)

    on_mesh("x=2", body, seed)


def test_one_rank_may_write_what_it_made(seed):
    def body(r):
        x = shard(torch.zeros(4, 3), r.mesh, P("x"))
        assert x.full().sum() == 0
        if r.mesh.rank == 0:
            x.local[0] = 1
        assert x.full().sum() == 3

    on_mesh("x=2", body, seed)


def test_a_gradient_may_be_wanted_later(seed):
    def body(r):
        x, w = r.randn(4, 6), r.randn(6, 4)
        for way in (lambda s: s.requires_grad_(), lambda s: s.local.requires_grad_()):
            a, b = shard(x.clone(), r.mesh, P("x")), shard(w, r.mesh, P("x"))
            (a @ b).sum().full()
            way(a)
            (a @ b).sum().backward()
            torch.testing.assert_close(a.grad.full(), w.sum(1).expand(4, 6))

    on_mesh("x=2", body, seed)


@pytest.mark.parametrize(
    ("text", "whole"), [("[],[] P{a,b:avg}", 2.0), ("[],[] P{a:avg,b}", 2.0), ("[],[] P{a,b}", 4.0)]
)
def test_sums_and_averages_together(text, whole, seed):
    """Terms of one on four ranks; and a value that is resharded to such terms is the same value."""

    def body(r):
        layout = Layout.parse(r.mesh.mesh, text)
        pending = Sharded(torch.ones(3, 2), shard(torch.ones(3, 2), r.mesh, layout).spec)
        assert (pending.full() == whole).all()
        assert (all_reduce(pending).full() == whole).all()
        x = r.randn(3, 2)
        torch.testing.assert_close(shard(x, r.mesh, P("a")).reshard(layout).full(), x)

    on_mesh("a=2,b=2", body, seed)


def test_modes_of_the_caller(seed):
    """Autocast at the end of a deferred product, inference mode, a factor of -0.0, numbers of numpy."""

    def body(r):
        x, w = r.randn(4, 6), r.randn(6, 4)
        x, w = x.float(), w.float()
        for how in ("sequential", "auto"):
            with choosing(how):
                y = shard(x, r.mesh, P(None, "x")) @ shard(w, r.mesh, P("x"))
                with torch.autocast("cpu", torch.bfloat16):
                    out = y.full()
                assert out.dtype == y.dtype == y.local.dtype == torch.float32
                with torch.inference_mode():
                    z = shard(x, r.mesh, P(None, "x")) @ shard(w, r.mesh, P("x"))
                    torch.testing.assert_close((z * 1).reshard(P("x")).full(), x @ w)
        one = shard(torch.ones(4), r.mesh, P("x"))
        assert (one / 0.0).full()[0] == float("inf")
        assert (one / -0.0).full()[0] == float("-inf")
        before = torch.get_default_dtype()
        assert (one.to(torch.int64) / 2).dtype == before

    on_mesh("x=2", body, seed)


def test_two_losses_share_a_gather(seed):
    def body(r):
        x, v, w = r.randn(4, 6), r.randn(4, 6), r.randn(4, 6)
        for how in ("sequential", "auto"):
            leaves = [shard(t.clone(), r.mesh, P("x")).requires_grad_() for t in (x, v, w)]
            with choosing(how):
                h = leaves[0].reshard(P(None, "x")).reshard(P("x"))  # a result, whose gather is cached
                first = F.linear(h, leaves[1].anchor()).square().sum()
                second = F.linear(h, leaves[2].anchor()).sum()
            first.backward()
            second.backward()
            plain = [t.clone().requires_grad_() for t in (x, v, w)]
            h = plain[0]
            (F.linear(h, plain[1]).square().sum() + F.linear(h, plain[2]).sum()).backward()
            for leaf, reference in zip(leaves, plain, strict=True):
                torch.testing.assert_close(leaf.grad.full(), reference.grad)

    on_mesh("x=2", body, seed)


def test_a_single_element_on_one_rank(seed):
    def body(r):
        x = shard(r.randn(1), r.mesh, P("x")).requires_grad_()
        (x * 3).backward()
        assert x.grad.full().item() == 3

    on_mesh("x=2", body, seed)


def test_a_module_that_was_refused_is_as_before(seed):
    def body(r):
        layer = nn.Linear(8, 8)
        with pytest.raises(InvalidValueError, match="which fit none"):
            shard_module(layer, r.mesh, {"weight": P("x"), "wieght": P("x")})
        assert layer.weight.shape == (8, 8)
        shard_module(layer, r.mesh, {"weight": P("x")})
        assert layer.weight.shape == (8, 8)
        assert next(layer.parameters()).shape == (4, 8)

    on_mesh("x=2", body, seed)
