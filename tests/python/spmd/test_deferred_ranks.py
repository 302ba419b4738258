"""Partial products, which are computed when they are needed: hooks, gradients, and ranks that read the result alone."""

import pytest
import torch
import torch.nn.functional as F
from partial_products import Product, both, products, run
from spmd_ranks import P, gradient_of, on_mesh

import torch_overlap as to
from torch_overlap.mesh import choosing

# --- Hooks and gradients of the result


@both
@products
def test_hooks_and_gradients_of_the_result(how, product, seed):
    """retain_grad, hooks that read and hooks that change the gradient, torch.autograd.grad."""

    def body(r):
        c = r.randn(8, 4)
        for keep in ("retain_grad", "hook", "grad"):
            made = Product(r, product, grad=True)
            leaves = [t.clone().requires_grad_() for t in made.whole]
            expected = F.linear(*leaves)
            expected.retain_grad()
            seen = []
            if keep == "hook":
                expected.register_hook(lambda g: 3 * g)
                made.y.local.register_hook(lambda g: (seen.append(g), 3 * g)[1])  # noqa: B023
            else:
                made.y.retain_grad()
            loss = (torch.sin(made.y) * r.place(c, None)).sum()
            (torch.sin(expected) * c).sum().backward(retain_graph=True)
            if keep == "grad":
                gradient, x_gradient = torch.autograd.grad(loss, [made.y, made.operands[0]])
                r.check(gradient, expected.grad)
                r.check(x_gradient, leaves[0].grad)
                continue
            loss.backward()
            assert len(seen) == (keep == "hook")
            gradient = made.y.grad if keep == "retain_grad" else gradient_of(made.y, 3 * seen[0])
            r.check(gradient, expected.grad)
            for operand, leaf in zip(made.operands, leaves, strict=True):
                r.check(operand.grad, leaf.grad)

    def chosen(r):
        with choosing(how):
            body(r)

    run(product, chosen, seed)


def test_a_gradient_that_was_not_kept_is_an_error(seed):
    def body(r):
        made = Product(r, grad=True)
        loss = torch.sin(made.y).sum()
        wanted = r"call retain_grad\(\) on it before"
        for _ in range(2):
            with pytest.raises(to.StateError, match=f"retain_grad: .*{wanted}"):
                made.y.retain_grad()
            with pytest.raises(to.StateError, match=f"grad: .*{wanted}"):
                torch.autograd.grad(loss, [made.y], materialize_grads=True)
            with pytest.raises(to.StateError, match=f"backward: .*{wanted}"):
                torch.autograd.backward([loss], inputs=[made.y])
            made.y.local  # noqa: B018
        loss.backward()
        x, w = (t.clone().requires_grad_() for t in made.whole)
        F.linear(x, w).sin().sum().backward()
        r.check(made.operands[0].grad, x.grad)
        r.check(made.operands[1].grad, w.grad)

    on_mesh("tp=2", body, seed)


@both
@products
def test_a_product_that_is_needed_without_gradients_first(product, how, seed):
    """Its value has no graph then; later uses have."""

    def body(r):
        for mode in (torch.no_grad, torch.inference_mode):
            made = Product(r, product, grad=True)
            with mode():
                whole = made.y.full()
                assert not whole.requires_grad
                torch.testing.assert_close(whole, made.expected)
                if mode is torch.inference_mode:
                    made.y.local  # noqa: B018
            made.y.retain_grad()
            torch.sin(made.y).sum().backward()
            leaves = [t.clone().requires_grad_() for t in made.whole]
            expected = F.linear(*leaves)
            expected.retain_grad()
            expected.sin().sum().backward()
            r.check(made.y.grad, expected.grad)
            for operand, leaf in zip(made.operands, leaves, strict=True):
                r.check(operand.grad, leaf.grad)

    def chosen(r):
        with choosing(how):
            body(r)

    run(product, chosen, seed)


# --- Ranks that read alone


def reading_alone(r, product, how, grad):
    """Random uses of products, and changes on all ranks; at any time one rank alone reads `local`. Returns what was
    sent."""
    targets = [None, P("tp"), P(None, "tp"), "[],[]"]
    if product == "two axes":
        targets += ["[],[] P{dp}", "[tp],[] P{dp}", P("dp", "tp")]
    all_sent = []
    for _ in range(12):
        made = Product(r, product, bias=r.draw.random() < 0.5, grad=grad)
        y, value = made.y, made.expected
        reader, changed = r.draw.randrange(r.mesh.mesh.size), False
        r.sent()
        with choosing(how), torch.set_grad_enabled(grad):
            for _ in range(6):
                if r.index == reader:
                    y.local.norm().item()
                event = r.draw.choice(["move", "move", "function", "add", "change", "operand", "no_grad", "copy"])
                if event == "move":
                    target = r.draw.choice(targets)
                    torch.testing.assert_close(y.reshard(target).full().detach(), value)
                elif event == "function":
                    torch.testing.assert_close(torch.sin(y).full().detach(), value.sin())
                elif event == "add":
                    torch.testing.assert_close((y + y).full().detach(), value + value)
                elif event == "change" and not grad:
                    y.local.mul_(2)
                    value = 2 * value
                elif event == "operand" and not grad and not changed:
                    y.local  # noqa: B018
                    made.operands[0].local.add_(1)
                    changed = True
                elif event == "no_grad":
                    with torch.no_grad():
                        torch.testing.assert_close(y.full(), value)
                elif event == "copy" and not grad:
                    y.full().zero_()
                    torch.testing.assert_close(y.full(), value)
        all_sent.append(r.sent())
    return all_sent


@both
@products
@pytest.mark.parametrize("grad", [False, True])
def test_one_rank_alone_reads_local(product, how, grad, seed):
    sent = run(product, reading_alone, seed, product, how, grad)
    assert all(one == sent[0] for one in sent)


def backward_reading_alone(r, product):
    made = Product(r, product, grad=True)
    if r.index == 0:
        made.y.local.norm().item()
    r.sent()
    torch.sin(made.y).sum().backward()
    sent = r.sent()
    x, w = (t.clone().requires_grad_() for t in made.whole)
    F.linear(x, w).sin().sum().backward()
    r.check(made.operands[0].grad, x.grad)
    r.check(made.operands[1].grad, w.grad)
    return sent


@products
def test_gradients_if_one_rank_alone_reads_local(product, seed):
    sent = run(product, backward_reading_alone, seed, product)
    assert all(one == sent[0] for one in sent)
