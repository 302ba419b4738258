"""Partial products, which are computed when they are needed: changes of the result and of the operands, captures,
lifetime, and compiled functions."""

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from partial_products import NEEDED, Product, both, check_uses, products, run
from spmd_ranks import P, Rank, on_mesh

import torch_overlap as to
from torch_overlap.mesh import choosing, connect, sharded
from torch_overlap.testing import run_ranks

# --- Changes of the result


def through_a_view(local, value, n):
    local[1:3].add_(0.5)
    out = value.clone()
    out[1:3] += 0.5 * n
    return out


def by_an_optimizer(local, value, n):
    local.grad = torch.ones_like(local)
    torch.optim.SGD([local], lr=0.25).step()
    return value - 0.25 * n


# Change every rank's term, and return the new value: `value` is the sum of `n` terms.
CHANGES = {
    "mul_": lambda local, value, n: (local.mul_(2), 2 * value)[1],
    "zero_": lambda local, value, n: (local.zero_(), 0 * value)[1],
    "copy_": lambda local, value, n: (local.copy_(torch.ones_like(local)), 0 * value + n)[1],
    "a view": through_a_view,
    "detached": lambda local, value, n: (local.detach().mul_(-3), -3 * value)[1],
}


@both
@products
@pytest.mark.parametrize("change", [*CHANGES, "an optimizer"])
def test_a_change_of_the_result_counts(change, product, how, seed):
    """Before the first use, between uses, and of a copy that was already reduced."""

    def body(r):
        for uses in ([], ["full"], ["scattered"], ["linear function"], list(NEEDED)):
            made = Product(r, product)
            y, value = made.y, made.expected
            for _ in range(2):
                check_uses(y, value, *uses) if uses else None
                rows = y.local.shape[0]
                if change == "an optimizer":
                    value = by_an_optimizer(y.local.requires_grad_(), value, made.num_terms)
                    y.local.requires_grad_(False)
                elif change == "a view" and rows < len(value):
                    y.local.add_(0.5)
                    value = value + 0.5 * made.num_terms
                else:
                    value = CHANGES[change](y.local, value, made.num_terms)
            check_uses(y, value)
            y.detach().local.mul_(2)
            check_uses(y, 2 * value)

    def chosen(r):
        with choosing(how):
            body(r)

    run(product, chosen, seed)


@products
def test_an_assigned_part_counts(product, seed):
    def body(r):
        made = Product(r, product)
        for _ in range(2):
            made.y.local = made.y.local * 2
            made.expected = 2 * made.expected
            check_uses(made.y, made.expected)

    run(product, body, seed)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@products
def test_a_change_counts_in_every_mode(product, mode, seed):
    def body(r):
        with mode():
            made = Product(r, product)
            made.y.local.mul_(2)
            check_uses(made.y, 2 * made.expected)
            made.y.local.mul_(2)
            check_uses(made.y, 4 * made.expected)

    run(product, body, seed)


def test_a_change_has_its_gradient(seed):
    """The factor is in the gradients of the operands."""

    def body(r):
        for how in ("auto", "sequential"):
            with choosing(how):
                made = Product(r, grad=True)
                made.y.local.mul_(3)
                made.y.reshard(None).sin().sum().backward()
            x, w = (t.clone().requires_grad_() for t in made.whole)
            (3 * F.linear(x, w)).sin().sum().backward()
            for operand, leaf in zip(made.operands, (x, w), strict=True):
                r.check(operand.grad, leaf.grad)

    on_mesh("tp=2", body, seed)


# --- Changes of the operands


@both
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("needed", [*NEEDED, "local"])
def test_a_changed_operand_is_an_error(needed, which, how, seed):
    def body(r):
        made = Product(r, bias=True)
        made.operands[which].local.add_(10)
        with choosing(how), pytest.raises(to.StateError, match=r"expected operands that stay as they are .* \.local"):
            NEEDED[needed](made.y) if needed in NEEDED else made.y.local

    on_mesh("tp=2", body, seed)


@both
@products
@pytest.mark.parametrize("which", [0, 1, 2])
def test_local_is_taken_before_operands_change(which, product, how, seed):
    """The advice of the error works."""

    def body(r):
        made = Product(r, product, bias=True)
        made.y.local  # noqa: B018
        made.operands[which].local.add_(10)
        check_uses(made.y, made.expected)

    def chosen(r):
        with choosing(how):
            body(r)

    run(product, chosen, seed)


def test_an_assigned_bias_is_that_of_the_next_call(seed):
    def body(r):
        made = Product(r, bias=True)
        made.operands[2].local = r.randn(4)
        check_uses(made.y, made.expected)

    on_mesh("tp=2", body, seed)


@both
def test_parameters_step_after_the_product_was_used(how, seed):
    def body(r):
        with choosing(how):
            made = Product(r, bias=True, grad=True)
            optimizer = torch.optim.SGD([t.local for t in made.operands], lr=0.1)
            (made.y.full() ** 2).sum().backward()
            optimizer.step()
            check_uses(made.y, made.expected, "full", "scattered")
            leaves = [t.clone().requires_grad_() for t in made.whole]
            (F.linear(*leaves) ** 2).sum().backward()
            torch.optim.SGD(leaves, lr=0.1).step()
            check_uses(F.linear(*made.operands), F.linear(*leaves))

    on_mesh("tp=2", body, seed)


# --- Captures, lifetime


def test_a_product_and_the_captures_of_a_graph(seed, monkeypatch):
    """A product made before a capture is not computed in it; one of a capture is computed at each read after it."""
    now = threading.local()
    monkeypatch.setattr(sharded, "provenance_of", lambda spec: now.provenance)

    def body(r):
        now.provenance = sharded.Provenance.FUNCTION
        made, computed = Product(r), Product(r)
        computed.y.local  # noqa: B018
        inside = Product(r)
        inside.y._provenance = now.provenance = sharded.Provenance.CAPTURE
        for needed in (lambda y: y.local, *NEEDED.values()):
            with pytest.raises(to.StateError, match=r"computed before the capture.*take \.local"):
                needed(made.y)
        check_uses(computed.y, computed.expected, "full", "scattered")
        now.provenance = sharded.Provenance.FUNCTION
        check_uses(made.y, made.expected)
        for _ in range(2):
            check_uses(inside.y, inside.expected)
            assert inside.y.local is not inside.y.local

    on_mesh("tp=2", body, seed)


@both
def test_operands_live_until_the_product_was_computed_and_used(how, seed):
    def body(r):
        for first, second in ((lambda y: y.full(), lambda y: y.local), (lambda y: y.local, lambda y: y.full()),
                              (lambda y: y * 2, lambda y: y.local)):  # fmt: skip
            with torch.no_grad(), choosing(how):
                made = Product(r, bias=True)
                y, watched = made.y, [weakref.ref(t.local) for t in made.operands]
                del made
                first(y)
                second(y)
                gc.collect()
                assert [ref() for ref in watched] == [None] * 3

    on_mesh("tp=2", body, seed)


# --- torch.compile


def changed_in_a_graph(x, w):
    y = F.linear(x, w)
    y.local.mul_(2)
    return y.reshard(None).sin(), y.reshard(P("tp"))


def uses_an_argument(y):
    return y.reshard(None).sin(), y * 2


def compiled_rank(comm, seed):
    torch._dynamo.reset()
    mesh = connect({"tp": 2}, comm)
    r = Rank(mesh, seed, [])
    for how in ("auto", "sequential"):
        with choosing(how):
            made = Product(r)
            out, parts = torch.compile(changed_in_a_graph, backend="aot_eager", fullgraph=True)(*made.operands)
            torch.testing.assert_close(out.full(), (2 * made.expected).sin())
            torch.testing.assert_close(parts.full(), 2 * made.expected)
            y = Product(r)
            if comm.get_rank() == 0:
                y.y.local.norm().item()  # one rank alone
            out, double = torch.compile(uses_an_argument, backend="aot_eager", fullgraph=True)(y.y)
            torch.testing.assert_close(out.full(), y.expected.sin())
            torch.testing.assert_close(double.full(), 2 * y.expected)
    mesh.close()


@pytest.mark.timeout(300)
def test_changes_and_lone_reads_of_a_compiled_function(seed):
    run_ranks(compiled_rank, 2, seed, backend="gloo", timeout=240)
