"""The moved copies that results of functions keep: what makes them invalid, and what their users share."""

import threading

import pytest
import torch
import torch.nn.functional as F
from spmd_ranks import P, on_mesh

from torch_overlap.mesh import choosing, sharded

# Layouts of a result, and the number of its terms or copies that a change of every rank's part adds up.
LAYOUTS = {
    "partial": ("tp=2", "[],[] P{tp}", 2),
    "sharded": ("tp=2", "[tp],[]", 1),
    "both": ("dp=2,tp=2", "[dp],[] P{tp}", 2),
    "two sums": ("dp=2,tp=2", "[],[] P{dp,tp}", 4),
    "whole": ("dp=2,tp=2", "[],[]", 1),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
TARGETS = [None, P("tp"), P(None, "tp"), "[],[]"]

CHANGES = {
    "mul_": lambda local, value, n: (local.mul_(2), 2 * value)[1],
    "zero_": lambda local, value, n: (local.zero_(), 0 * value)[1],
    "copy_": lambda local, value, n: (local.copy_(torch.ones_like(local)), 0 * value + n)[1],
    "a view": lambda local, value, n: (local.view(-1)[:].add_(0.5), value + 0.5 * n)[1],
    "detached": lambda local, value, n: (local.detach().mul_(-3), -3 * value)[1],
}


def check_moves(y, value):
    for target in (*TARGETS, *TARGETS[::-1]):
        torch.testing.assert_close(y.reshard(target).full(), value)
    torch.testing.assert_close(torch.sin(y).full(), value.sin())
    torch.testing.assert_close(F.softmax(y, -1).full(), value.softmax(-1))


@layouts
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_result_is_moved_again(change, layout, seed):
    """Whatever it was moved to before: also if a copy was reduced already, and moved on."""
    mesh, before, n = LAYOUTS[layout]

    def body(r):
        for first in (*TARGETS, "all"):
            value = r.randn(8, 4)
            y = r.place(value, before) * 1.0
            y_view = y.T
            for _ in range(3):
                for target in TARGETS if first == "all" else [first]:
                    torch.testing.assert_close(y.reshard(target).full(), value)
                torch.testing.assert_close(y_view.full(), value.T)
                value = CHANGES[change](y.local, value, n)
                if first == "all":
                    check_moves(y, value)
            check_moves(y, value)
            torch.testing.assert_close(y_view.full(), value.T)

    on_mesh(mesh, body, seed)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "whole"])
def test_a_changed_copy_is_made_again(layout, seed):
    mesh, before, _ = LAYOUTS[layout]

    def body(r):
        value = r.randn(8, 4)
        y = r.place(value, before) * 1.0
        for target in TARGETS:
            if str(y.reshard(target).layout) != before:
                y.reshard(target).local.mul_(3)
                check_moves(y, value)

    on_mesh(mesh, body, seed)


def test_moves_of_a_result_are_made_once(seed):
    """Also after the first of them was made invalid."""

    def body(r):
        y = r.place(r.randn(8, 4), "[],[] P{tp}") * 1.0
        for _ in range(2):
            with r.sends("all_reduce tp"):
                y.full()
            with r.sends():
                for target in TARGETS:
                    y.reshard(target)
                torch.sin(y)
            y.local.mul_(2)

    on_mesh("tp=2", body, seed)


@pytest.mark.parametrize("moved", [False, True])
def test_a_cast_is_made_again(moved, seed):
    """Autocast keeps the cast of a result."""

    def body(r):
        value, w = r.randn(8, 4).float(), r.randn(6, 4).float()
        y = r.place(value, "[tp],[]") * 1.0
        weight = r.place(w, None)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = F.linear(y.reshard(None) if moved else y, weight)
                want = F.linear(value, w)
            torch.testing.assert_close(got.full(), want)
            y.local.mul_(2)
            value = 2 * value

    on_mesh("tp=2", body, seed)


def test_copies_are_those_of_one_capture(seed, monkeypatch):
    """A value from outside does not use its copies in a capture, nor one of a capture outside."""
    now = threading.local()
    monkeypatch.setattr(sharded, "provenance_of", lambda spec: now.provenance)

    def body(r):
        for made, used in (("FUNCTION", "CAPTURE"), ("CAPTURE", "FUNCTION")):
            now.provenance = sharded.Provenance[made]
            y = r.place(r.randn(8, 4), "[],[] P{tp}") * 1.0
            y._provenance = now.provenance
            y.full()
            with r.sends():
                y.reshard("[],[]")
                y.reshard(P("tp"))
            now.provenance = sharded.Provenance[used]
            for _ in range(2):
                for target, sent in (("[],[]", "all_reduce tp"), (P("tp"), "reduce_scatter tp")):
                    with r.sends(sent):
                        y.reshard(target)

    on_mesh("tp=2", body, seed)


# --- Gradients


def test_hooks_on_a_moved_result_see_its_gradient_alone(seed):
    """Functions that use the same copy have gradients of their own, also with retain_grad."""

    def body(r):
        value, c = r.randn(8, 4), r.randn(8, 4)
        for before in ("[tp],[]", "[],[] P{tp}"):
            for target in (None, "[],[]", P(None, "tp")):
                leaf = r.place(value, before).requires_grad_()
                plain = value.clone().requires_grad_()
                y, z = leaf * 2.0, plain * 2.0
                moved, again = y.reshard(target), y.reshard(target)
                z_moved, z_again = z.view_as(z), z.view_as(z)
                for kept in (moved, again, y, z_moved, z_again, z):
                    kept.retain_grad()
                moved.local.register_hook(lambda g: 5 * g)
                z_moved.register_hook(lambda g: 5 * g)
                cs = r.place(c, None)
                (moved * cs + torch.sin(y) + torch.exp(again)).sum().backward()
                (z_moved * c + torch.sin(z) + torch.exp(z_again)).sum().backward()
                for got, expected in ((again, z_again), (y, z), (leaf, plain), (moved, z_moved)):
                    r.check(got.grad, expected.grad)

    on_mesh("tp=2", body, seed)


@pytest.mark.parametrize("through", ["local", "Sharded"])
def test_requires_grad_of_a_result_or_a_copy(through, seed):
    """Copies that were made before have no graph."""

    def body(r):
        value = r.randn(8, 4)

        def require(y):
            (y.local if through == "local" else y).requires_grad_()

        for before in ("[tp],[]", "[],[] P{tp}"):
            y = r.place(value, before) * 1.0
            torch.sin(y).full()
            y.full()
            require(y)
            plain = value.clone().requires_grad_()
            (torch.sin(y) + y.reshard(None)).sum().backward()
            (torch.sin(plain) + plain).sum().backward()
            r.check(y.grad, plain.grad)
            with torch.no_grad():
                y = r.place(value, before) * 1.0
                moved = y.reshard(None)
                require(moved)
                assert not y.reshard(None).requires_grad
                assert not y.full().requires_grad

    on_mesh("tp=2", body, seed)


@pytest.mark.parametrize("how", ["auto", "sequential"])
def test_hooks_on_parameters(how, seed):
    """They see the gradient of all uses, of parameters that are moved too."""

    def body(r):
        x, w = r.randn(8, 6), r.randn(4, 6)
        for left, right in (("[tp],[]", "[tp],[]"), ("[],[tp]", "[],[tp]"), ("[tp],[]", "[],[tp]")):
            weight, plain = r.place(w, right).requires_grad_(), w.clone().requires_grad_()
            seen = []
            weight.local.register_hook(lambda g: (seen.append(g), 3 * g)[1])  # noqa: B023
            plain.register_hook(lambda g: 3 * g)
            with choosing(how):
                y = F.linear(r.place(x, left), weight)
                (torch.sin(y).sum() + (weight.reshard(None) ** 2).sum()).backward()
            (torch.sin(F.linear(x, plain)).sum() + (plain**2).sum()).backward()
            assert len(seen) == 1
            r.check(weight.grad, plain.grad)

    on_mesh("tp=2", body, seed)


@pytest.mark.parametrize("target", [None, P("tp"), "[],[]"])
def test_parameters_have_no_stale_copies(target, seed):
    """Optimizer steps and other changes of a leaf, with what was moved before: gradients, and values under no_grad."""

    def body(r):
        x, w = r.randn(8, 6), r.randn(4, 6)
        weight = r.place(w, "[tp],[]").requires_grad_()
        plain = w.clone().requires_grad_()
        optimizers = [torch.optim.Adam([t], lr=0.1) for t in (weight.local, plain)]
        xs = r.place(x, "[tp],[]")
        for _ in range(3):
            with torch.no_grad():
                torch.testing.assert_close(weight.full(), plain)
                torch.testing.assert_close(weight.detach().reshard(target).full(), plain)
            loss = (torch.sin(F.linear(xs, weight)) + (weight.reshard(target) ** 2).sum()).sum()
            expected = (torch.sin(F.linear(x, plain)) + (plain**2).sum()).sum()
            torch.testing.assert_close(loss.full().detach(), expected.detach())
            loss.backward()
            expected.backward()
            r.check(weight.grad, plain.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    on_mesh("tp=2", body, seed)
