"""Shapes, inputs and references of the tests of all_reduce_rms_norm."""

import time

import pytest
import torch

import torch_overlap as to
from torch_overlap import ops

EPS = 1e-5
MODES = ["auto", "ll", "ll128", "simple", "two_shot", "off"]
# Rows and their length: one block, clusters, rounds, whole and partial packets and vectors, too long for a cluster.
SHAPES = [(1, 8), (3, 127), (5, 1000), (16, 2048), (300, 1024), (7, 5120), (16, 8192), (64, 8192), (3, 12288),
          (2, 20000), (1, 40000), (130, 4104), (33, 7168), (700, 8192)]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def draw(generator, *shape, dtype):
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float64).to(dtype)


class Problem:
    """All ranks' inputs, which every rank can draw."""

    def __init__(self, comm, seed, shape, dtype, has_bias=True):
        generator = torch.Generator("cuda").manual_seed(seed)
        self.comm, self.dtype = comm, dtype
        self.every = [draw(generator, *shape, dtype=dtype) for _ in range(comm.get_size())]
        self.x = self.every[comm.get_rank()]
        self.residual = draw(generator, *shape, dtype=dtype)
        self.weight = draw(generator, shape[-1], dtype=dtype)
        self.bias = draw(generator, shape[-1], dtype=dtype) if has_bias else None

    def run(self):
        return ops.all_reduce_rms_norm(self.x, self.residual, self.weight, self.comm, self.bias, eps=EPS)

    def check(self, results):
        """Checks h, rounded once or, after a separate sum, twice; and the norm as that of the returned h."""
        out, hidden = results
        sums = [x.double() for x in self.every]
        exact = self.residual.double() + sum(sums)
        scale = self.residual.double().abs() + sum(s.abs() for s in sums)
        if self.bias is not None:
            exact, scale = exact + self.bias.double(), scale + self.bias.double().abs()
        eps = torch.finfo(self.dtype).eps
        assert ((hidden.double() - exact).abs() <= 2 * len(sums) * eps * scale).all()
        wide = hidden.double()
        normed = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weight.double()
        # Sum of squares, its root and two products: in float32, or rounded like the reference itself.
        of_sums = 4e-6 if self.dtype != torch.float64 else 8 * eps
        least = torch.finfo(self.dtype).smallest_normal * eps
        assert ((out.double() - normed).abs() <= (eps + of_sums) * normed.abs() + least).all()


def same_everywhere(comm, tensors):
    for t in tensors:
        bits = t.contiguous().view(torch.uint8).flatten()
        every = torch.empty(comm.get_size(), bits.numel(), dtype=torch.uint8, device="cuda")
        comm.all_gather_single(every, bits, async_op=False, hints={"custom_collectives": "off"})
        assert (every == every[0]).all()


def run_until_an_error(run):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        run()
        torch.cuda.synchronize()
        time.sleep(0.05)


def last_rank_stays_away(comm, problem, run):
    """Checks that run(), over a communicator with a timeout of two seconds, ends with an error on the other ranks, and
    that the device continues."""
    torch.cuda.synchronize()
    comm.barrier(async_op=False)
    torch.cuda.synchronize()
    if comm.get_rank() == comm.get_size() - 1:
        time.sleep(5)
    else:
        begin = time.monotonic()
        with pytest.raises(to.Error, match="all_reduce_rms_norm"):
            run_until_an_error(run)
        assert time.monotonic() - begin < 5
    problem.comm.abort()
    torch.cuda.synchronize()
    x = torch.ones(100, device="cuda")
    comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    assert (x == comm.get_size()).all()
