"""Helpers of the tests of the fused products: data, references, and the backend of each algorithm."""

import itertools

import torch

from torch_overlap.testing import run_ranks

SIZES = [1, 2, 3, 4]
TOLERANCE = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-1},
    torch.float16: {"rtol": 4e-3, "atol": 2e-2},
}


class Data:
    """Random tensors, equal on all ranks that start from the same seed."""

    def __init__(self, seed, dtype=torch.float64):
        self.gen = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def __call__(self, *shape):
        return torch.randn(*shape, generator=self.gen, dtype=torch.float64).to(self.dtype)


def leaf(x):
    return x.detach().clone().requires_grad_()


def check(got, want):
    torch.testing.assert_close(got.double(), want.double(), **TOLERANCE[got.dtype])


def on_ranks(rank, size, algorithm, *args):
    """Runs run_ranks(rank, size, algorithm, *args) on ranks that can run `algorithm`.

    p2p, bulk and low_latency need shared memory, which processes on one host have; threads suffice for the others.
    """
    backend = "gloo" if algorithm in ("p2p", "bulk", "low_latency") else "local"
    return run_ranks(rank, size, algorithm, *args, backend=backend)


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def second_order(outputs, leaves, loss_weights, directions):
    """Returns the first gradients, and the gradients of their product with `directions`."""
    loss = sum((w * y * y).sum() for w, y in zip(loss_weights, outputs, strict=True))
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    again = sum((g * d).sum() for g, d in zip(first, directions, strict=True))
    return [g.detach() for g in first], torch.autograd.grad(again, leaves)


class GradientProblem:
    """The sum of all ranks' losses, quadratic in their outputs, and its gradients of first and second order.

    leaves: by rank; reference: all ranks' leaves -> all ranks' outputs, in plain torch. Values are detached: the
    parts are sent to the ranks.
    """

    def __init__(self, data, leaves, reference):
        leaves = [[leaf(x) for x in mine] for mine in leaves]
        outputs = reference(leaves)
        weights = [[data(*y.shape) for y in mine] for mine in outputs]
        directions = [[data(*x.shape) for x in mine] for mine in leaves]
        first, second = second_order(*map(joined, (outputs, leaves, weights, directions)))
        count = len(leaves[0])
        self.parts = [
            {
                "leaves": [x.detach() for x in leaves[r]],
                "outputs": [y.detach() for y in outputs[r]],
                "first": first[count * r : count * (r + 1)],
                "second": list(second[count * r : count * (r + 1)]),
                "loss_weights": weights[r],
                "directions": directions[r],
            }
            for r in range(len(leaves))
        ]


def check_gradients(part, sharded):
    """`sharded`: this rank's leaves -> its outputs, with the operators."""
    leaves = [leaf(x) for x in part["leaves"]]
    outputs = sharded(leaves)
    for got, want in zip(outputs, part["outputs"], strict=True):
        check(got.detach(), want)
    loss = sum((w * y * y).sum() for w, y in zip(part["loss_weights"], outputs, strict=True))
    # Once with the overlapped backward pass, once with the one that is differentiable.
    for got, want in zip(torch.autograd.grad(loss, leaves), part["first"], strict=True):
        check(got, want)
    first, second = second_order(sharded(leaves), leaves, part["loss_weights"], part["directions"])
    for got, want in zip((*first, *second), (*part["first"], *part["second"]), strict=True):
        check(got, want)
