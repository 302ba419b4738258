"""Gradients of the operators against the unsharded computation, first and second order, in fp64.

Each case is a function of all ranks' inputs, written once with the operators (on rank r: its own result) and once with
plain torch (all results). The loss of rank r is a random weighting of its result, and a rank's gradient is that of the
sum of all ranks' losses.
"""

import pytest
import torch

from torch_overlap import UnsupportedError, ops
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
SIZES = [1, 2, 3, 4]


def cases(size):
    """Returns name -> (input shape, on a rank, reference: list of all inputs -> list of all results)."""

    def total(xs):
        return torch.stack(xs).sum(0)

    def chunk(x, dim, rank):
        return x.chunk(size, dim)[rank]

    ranks = range(size)
    ring = [(r, (r + 1) % size) for r in ranks]
    sizes = [[(a + 2 * b) % 3 for b in ranks] for a in ranks]
    longest = max(sum(row) for row in sizes)

    def all_to_all_v(x, comm):
        me = comm.get_rank()
        return ops.all_to_all_v(x[: sum(sizes[me])], comm, [sizes[r][me] for r in ranks], sizes[me])

    def all_to_all_v_reference(xs):
        sent = [xs[r][: sum(sizes[r])].split(sizes[r]) for r in ranks]
        return [torch.cat([sent[a][b] for a in ranks]) for b in ranks]

    return {
        "all_reduce sum": ((3, 2), lambda x, c: ops.all_reduce(x, c), lambda xs: [total(xs)] * size),
        "all_reduce avg": ((3, 2), lambda x, c: ops.all_reduce(x, c, "avg"), lambda xs: [total(xs) / size] * size),
        "all_reduce premul_sum": (
            (3, 2),
            lambda x, c: ops.all_reduce(x, c, "premul_sum", factor=1.5 + c.get_rank()),
            lambda xs: [total([x * (1.5 + r) for r, x in enumerate(xs)])] * size,
        ),
        "all_reduce_async": (
            (3, 2),
            lambda x, c: ops.wait_tensor(ops.all_reduce_async(x, c)),
            lambda xs: [total(xs)] * size,
        ),
        "all_gather 0": ((3, 2), lambda x, c: ops.all_gather(x, c), lambda xs: [torch.cat(xs)] * size),
        "all_gather 1": ((3, 2), lambda x, c: ops.all_gather(x, c, -1), lambda xs: [torch.cat(xs, 1)] * size),
        "all_gather_async": (
            (3, 2),
            lambda x, c: ops.wait_tensor(ops.all_gather_async(x, c, 1)),
            lambda xs: [torch.cat(xs, 1)] * size,
        ),
        "reduce_scatter 0": (
            (12, 2),
            lambda x, c: ops.reduce_scatter(x, c),
            lambda xs: [chunk(total(xs), 0, r) for r in ranks],
        ),
        "reduce_scatter avg 1": (
            (2, 12),
            lambda x, c: ops.reduce_scatter(x, c, 1, "avg"),
            lambda xs: [chunk(total(xs) / size, 1, r) for r in ranks],
        ),
        "reduce_scatter_async": (
            (2, 12),
            lambda x, c: ops.wait_tensor(ops.reduce_scatter_async(x, c, 1)),
            lambda xs: [chunk(total(xs), 1, r) for r in ranks],
        ),
        "all_to_all": (
            (12, 2),
            lambda x, c: ops.all_to_all(x, c, 0, 1),
            lambda xs: [torch.cat([chunk(x, 0, r) for x in xs], 1) for r in ranks],
        ),
        "all_to_all_async": (
            (12, 2),
            lambda x, c: ops.wait_tensor(ops.all_to_all_async(x, c, 0, 1)),
            lambda xs: [torch.cat([chunk(x, 0, r) for x in xs], 1) for r in ranks],
        ),
        "all_to_all_v": ((longest, 2), all_to_all_v, all_to_all_v_reference),
        "broadcast": ((3,), lambda x, c: ops.broadcast(x, c, size - 1), lambda xs: [xs[-1]] * size),
        "broadcast_async": (
            (3,),
            lambda x, c: ops.wait_tensor(ops.broadcast_async(x, c, 0)),
            lambda xs: [xs[0]] * size,
        ),
        "permute": ((3,), lambda x, c: ops.permute(x, c, ring), lambda xs: [xs[r - 1] for r in ranks]),
        "permute one": (
            (3,),
            lambda x, c: ops.permute(x, c, [(0, size - 1)]),
            lambda xs: [xs[0] if r == size - 1 else torch.zeros_like(xs[0]) for r in ranks],
        ),
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", cases(1))
def test_gradients_equal_those_of_the_unsharded_computation(name, size, seed):
    shape, sharded, reference = cases(size)[name]
    gen = torch.Generator().manual_seed(seed)

    def randn(*sizes):
        return torch.randn(*sizes, generator=gen, dtype=torch.float64)

    xs = [randn(shape).requires_grad_() for _ in range(size)]
    results = reference(xs)
    weights = [randn(result.shape) for result in results]
    # The loss is quadratic in the result, so that a second derivative exists.
    loss = sum((w * y * y).sum() for w, y in zip(weights, results, strict=True))
    first = torch.autograd.grad(loss, xs, create_graph=True, materialize_grads=True)
    directions = [randn(shape) for _ in range(size)]
    again = sum((g * d).sum() for g, d in zip(first, directions, strict=True))
    second = torch.autograd.grad(again, xs, materialize_grads=True)

    def rank(comm):
        me = comm.get_rank()
        x = xs[me].detach().clone().requires_grad_()
        result = sharded(x, comm)
        torch.testing.assert_close(result, results[me].detach())
        (grad,) = torch.autograd.grad((weights[me] * result * result).sum(), x, create_graph=True)
        torch.testing.assert_close(grad.detach(), first[me].detach())
        (grad,) = torch.autograd.grad((grad * directions[me]).sum(), x)
        torch.testing.assert_close(grad, second[me])

    run_ranks(rank, size, backend="local")


@pytest.mark.parametrize("size", [1, 3])
def test_invariant_results_pass_their_gradient_through(size):
    """I: all ranks have the same single loss, and its gradient is the same on all of them."""
    weight = torch.randn(3, 4 * size, dtype=torch.float64)

    def rank(comm):
        me = comm.get_rank()
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        part = weight.chunk(size, 1)[0]
        (grad,) = torch.autograd.grad((part * ops.all_reduce(x, comm, grad="I")).sum(), x)
        torch.testing.assert_close(grad, part)
        (grad,) = torch.autograd.grad((part * ops.all_reduce(x, comm, "avg", grad="I")).sum(), x)
        torch.testing.assert_close(grad, part / size)

        y = ops.all_gather(x, comm, 1, grad="I")
        (grad,) = torch.autograd.grad((weight * y * y).sum(), x, create_graph=True)
        torch.testing.assert_close(grad, 2 * x * weight.chunk(size, 1)[me])
        (grad,) = torch.autograd.grad((weight.chunk(size, 1)[me] * grad).sum(), x)
        torch.testing.assert_close(grad, 2 * weight.chunk(size, 1)[me].square())

    run_ranks(rank, size, backend="local")


def test_an_expanded_gradient_is_fine():
    def rank(comm):
        x = torch.ones(4, 6, requires_grad=True)
        ops.reduce_scatter(x, comm, 1).sum().backward()  # sum's gradient has strides 0
        assert torch.equal(x.grad, torch.ones(4, 6))
        x.grad = None
        ops.all_gather(x, comm, 1).sum().backward()
        assert torch.equal(x.grad, torch.full((4, 6), 2.0))

    run_ranks(rank, 2, backend="local")


@pytest.mark.parametrize("op", ["min", "max", "product"])
def test_a_reduction_without_gradient_raises_when_it_is_asked(op):
    def rank(comm):
        x = torch.ones(4, requires_grad=True)
        for result in (ops.all_reduce(x, comm, op), ops.reduce_scatter(x, comm, 0, op)):
            with pytest.raises(RuntimeError, match=f"got '{op}', which has no gradient; detach the input"):
                result.sum().backward()

    run_ranks(rank, 2, backend="local")


def test_operators_without_gradient_refuse_inputs_that_need_one():
    def rank(comm):
        x = torch.ones(4, requires_grad=True) * 1
        with pytest.raises(UnsupportedError, match="use permute"):
            ops.send(x, comm, 1 - comm.get_rank())
        with pytest.raises(UnsupportedError, match="use permute"):
            ops.recv_(x, comm, 1 - comm.get_rank())
        with pytest.raises(UnsupportedError, match="use all_reduce"):
            ops.all_reduce_(x, comm)
        with torch.no_grad():
            assert torch.equal(ops.all_reduce_(x, comm), torch.full((4,), 2.0))

    run_ranks(rank, 2, backend="local")


def two_losses_rank(comm):
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    calls = {
        "all_reduce": lambda: ops.all_reduce(x, comm),
        "all_gather": lambda: ops.all_gather(x, comm),
        "reduce_scatter": lambda: ops.reduce_scatter(x, comm),
        "all_to_all": lambda: ops.all_to_all(x, comm),
        "broadcast": lambda: ops.broadcast(x, comm, 0),
        "permute": lambda: ops.permute(x, comm, [(0, 1), (1, 0)]),
    }
    for name, call in calls.items():
        x.grad = None
        y = call()
        y.sum().backward()
        once = x.grad.clone()
        (2 * y).sum().backward()
        torch.testing.assert_close(x.grad, 3 * once, msg=name)


def test_two_losses_may_share_a_collective_which_saves_nothing():
    run_ranks(two_losses_rank, 2, backend="local")
