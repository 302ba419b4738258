"""Complex operands: gradients of products have the conjugate of the other factor, first and second order."""

import pytest
import torch

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.nn.functional import copy_matmul, sum_matmul
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)


def cases(size, algorithm):
    """Returns name -> (on a rank, reference: lists of all x and weights -> list of all results). x is [2 size, 3 size],
    a weight [4 size, 3 size]."""
    options = {"algorithm": algorithm}
    ranks = range(size)

    def products(xs, ws):
        return [x @ w.T for x, w in zip(xs, ws, strict=True)]

    return {
        "all_gather_matmul": (
            lambda x, w, c: ops.all_gather_matmul(x, [w], c, **options)[0][0],
            lambda xs, ws: [torch.cat(xs) @ w.T for w in ws],
        ),
        "all_gather_matmul, gathered": (
            lambda x, w, c: torch.cat([y.flatten() for y in gathered(x, w, c, options)]),
            lambda xs, ws: [torch.cat([(torch.cat(xs) @ w.T).flatten(), torch.cat(xs).flatten()]) for w in ws],
        ),
        "matmul_reduce_scatter": (
            lambda x, w, c: ops.matmul_reduce_scatter(x, w, c, **options),
            lambda xs, ws: sum(products(xs, ws)).chunk(size),
        ),
        "matmul_reduce_scatter avg": (
            lambda x, w, c: ops.matmul_reduce_scatter(x, w, c, op="avg", **options),
            lambda xs, ws: (sum(products(xs, ws)) / size).chunk(size),
        ),
        "matmul_all_reduce": (
            lambda x, w, c: ops.matmul_all_reduce(x, w, c, **options),
            lambda xs, ws: [sum(products(xs, ws))] * size,
        ),
        "all_to_all_matmul": (
            lambda x, w, c: ops.all_to_all_matmul(x, w.repeat(1, size), c, **options),
            lambda xs, ws: [torch.cat([x.chunk(size)[r] for x in xs], 1) @ ws[r].repeat(1, size).T for r in ranks],
        ),
        "matmul_all_to_all": (
            lambda x, w, c: ops.matmul_all_to_all(x, [w], c, **options)[0],
            lambda xs, ws: [torch.cat([p.chunk(size, 1)[r] for p in products(xs, ws)]) for r in ranks],
        ),
        "bulk_overlap_matmul": (
            lambda x, w, c: ops.bulk_overlap_matmul(x, w, torch.zeros(2), c, collective="all_gather", **options)[0],
            products,
        ),
    }  # fmt: skip


def gathered(x, w, comm, options):
    (y,), rows = ops.all_gather_matmul(x, [w], comm, return_gathered=True, **options)
    return y, rows


def check(comm, xs, ws, mine, reference):
    rank = comm.get_rank()
    x, w = (values[rank].clone().requires_grad_() for values in (xs, ws))
    all_x, all_w = ([value.clone().requires_grad_() for value in values] for values in (xs, ws))
    first = torch.autograd.grad(mine(x, w, comm).abs().pow(3).sum(), [x, w], create_graph=True)
    loss = sum(y.abs().pow(3).sum() for y in reference(all_x, all_w))
    wanted = torch.autograd.grad(loss, [*all_x, *all_w], create_graph=True)
    torch.testing.assert_close(list(first), [wanted[rank], wanted[len(xs) + rank]])
    second = torch.autograd.grad(sum(g.abs().square().sum() for g in first), [x, w])
    again = torch.autograd.grad(sum(g.abs().square().sum() for g in wanted), [*all_x, *all_w])
    torch.testing.assert_close(list(second), [again[rank], again[len(xs) + rank]])


def inputs(seed, size):
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(rows * size, 3 * size, generator=generator, dtype=torch.complex128) for _ in range(size)]
        for rows in (2, 4)
    ]


def operators(comm, seed, algorithm):
    size = comm.get_size()
    xs, ws = inputs(seed, size)
    for name, (mine, reference) in cases(size, algorithm).items():
        if algorithm == "pipelined" and name.startswith(("all_gather_matmul", "matmul_reduce_scatter")):
            with pytest.raises(to.UnsupportedError, match=r"products of torch\.complex128"):
                mine(xs[comm.get_rank()], ws[comm.get_rank()], comm)
        else:
            check(comm, xs, ws, mine, reference)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["auto", "sequential", "pipelined"])
def test_operators(seed, size, algorithm):
    run_ranks(operators, size, seed, algorithm)


def layer_functions(comm, seed):
    size, rank = comm.get_size(), comm.get_rank()
    xs, ws = inputs(seed, size)

    x, w = xs[0].clone().requires_grad_(), ws[rank].clone().requires_grad_()
    torch.cat(copy_matmul(x, [w, 2 * w], [None, None], comm, "auto")).abs().pow(3).sum().backward()
    all_x, all_w = xs[0].clone().requires_grad_(), torch.stack(ws).requires_grad_()
    torch.cat([all_x @ all_w.mT, 2 * all_x @ all_w.mT]).abs().pow(3).sum().backward()
    torch.testing.assert_close([x.grad, w.grad], [all_x.grad, all_w.grad[rank]])

    x, w = xs[rank].clone().requires_grad_(), ws[rank].clone().requires_grad_()
    sum_matmul(x, w, None, comm, "auto").abs().pow(3).sum().backward()
    all_x, all_w = torch.stack(xs).requires_grad_(), torch.stack(ws).requires_grad_()
    (all_x @ all_w.mT).sum(0).abs().pow(3).sum().backward()
    torch.testing.assert_close([x.grad, w.grad], [all_x.grad[rank], all_w.grad[rank]])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_functions_of_layers(seed, size):
    run_ranks(layer_functions, size, seed)
