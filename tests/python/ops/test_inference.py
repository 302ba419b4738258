"""Operators under torch.inference_mode; memory that is first used there serves training later."""

import pytest
import torch
import torch.nn.functional as F
from fused_cases import Data, check, leaf, on_ranks

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.testing import run_ranks

ROWS, INNER, FEATURES = 12, 16, 20


def gathered(xs, weights, rank):
    return F.linear(torch.cat(xs), weights[rank])


def summed(xs, weights, rank):
    return sum(F.linear(x, w) for x, w in zip(xs, weights, strict=True))


def scattered(xs, weights, rank):
    return summed(xs, weights, rank).chunk(len(xs))[rank]


def by_tokens(xs, weights, rank):
    size = len(xs)
    x = torch.cat([x.chunk(size)[rank] for x in xs], dim=1)
    return F.linear(x, weights[rank].repeat(1, size))


def by_heads(xs, weights, rank):
    products = [F.linear(x, w) for x, w in zip(xs, weights, strict=True)]
    return torch.cat([product.chunk(len(xs), dim=1)[rank] for product in products])


def run_all_to_all_matmul(x, w, comm, **options):
    return ops.all_to_all_matmul(x, w.repeat(1, comm.get_size()), comm, **options)


def run_bulk(x, w, comm, **options):
    product, whole = ops.bulk_overlap_matmul(x, w, x, comm, collective="all_gather", **options)
    return torch.cat([product.flatten(), whole.flatten()])


def bulk(xs, weights, rank):
    return torch.cat([F.linear(xs[rank], weights[rank]).flatten(), torch.cat(xs).flatten()])


OPERATORS = {
    "all_gather_matmul": (lambda x, w, comm, **o: ops.all_gather_matmul(x, [w], comm, **o)[0][0], gathered),
    "matmul_reduce_scatter": (ops.matmul_reduce_scatter, scattered),
    "matmul_all_reduce": (ops.matmul_all_reduce, summed),
    "all_to_all_matmul": (run_all_to_all_matmul, by_tokens),
    "matmul_all_to_all": (lambda x, w, comm, **o: ops.matmul_all_to_all(x, [w], comm, **o)[0], by_heads),
    "bulk_overlap_matmul": (run_bulk, bulk),
}
MATMULS = ["sequential", "pipelined", "p2p", "bulk", "low_latency", "auto"]
ALGORITHMS = {
    "all_to_all_matmul": ["sequential", "pipelined", "p2p", "auto"],
    "matmul_all_to_all": ["sequential", "pipelined", "p2p", "auto"],
    "bulk_overlap_matmul": ["sequential", "pipelined", "bulk", "auto"],
}


def test_collectives():
    def rank(comm):
        with torch.inference_mode():
            x = torch.ones(4)
            assert torch.equal(ops.all_reduce(x, comm), torch.full((4,), 2.0))
            assert torch.equal(ops.wait_tensor(ops.all_gather_async(x, comm)), torch.ones(8))
            assert torch.equal(ops.all_reduce_(x, comm), torch.full((4,), 2.0))

    run_ranks(rank, 2, backend="local")


def inference_then_training_rank(comm, algorithm, name, number):
    data, rank, size = Data(number), comm.get_rank(), comm.get_size()
    run, reference = OPERATORS[name]
    for made_inside, trains in ((False, False), (True, False), (False, True), (True, False), (False, True)):
        xs = [leaf(data(ROWS, INNER)) for _ in range(size)]
        weights = [leaf(data(FEATURES, INNER)) for _ in range(size)]
        want = [reference(xs, weights, r) for r in range(size)]
        if not trains:
            with torch.inference_mode():
                x, w = [t.clone() if made_inside else t for t in (xs[rank], weights[rank])]
                y = run(x, w, comm, algorithm=algorithm)
                assert y.is_inference()
                y += 1  # results belong to the caller
            check(y, want[rank].detach() + 1)
            continue
        x, w = leaf(xs[rank]), leaf(weights[rank])
        y = run(x, w, comm, algorithm=algorithm)
        check(y.detach(), want[rank].detach())
        found = torch.autograd.grad((y * y).sum(), (x, w))
        for got, wanted in zip(found, torch.autograd.grad(sum((y * y).sum() for y in want), (xs[rank], weights[rank])),
                               strict=True):  # fmt: skip
            check(got, wanted)


@pytest.mark.parametrize(
    ("name", "algorithm"), [(name, algorithm) for name in OPERATORS for algorithm in ALGORITHMS.get(name, MATMULS)]
)
def test_training_after_inference(name, algorithm, seed):
    on_ranks(inference_then_training_rank, 2, algorithm, name, seed)


def symmetric_rank(comm):
    with torch.inference_mode():
        memory = to.symmetric_empty(6, torch.float32, comm)
        window = comm.new_window(memory)
    memory.copy_(torch.arange(6.0) + comm.get_rank())
    assert not memory.is_inference()
    comm.barrier(async_op=False)
    other = window.map_remote_tensor(1 - comm.get_rank())
    assert torch.equal(other, torch.arange(6.0) + 1 - comm.get_rank())
    comm.barrier(async_op=False)


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_symmetric_memory_is_written_in_any_mode(backend):
    run_ranks(symmetric_rank, 2, backend=backend)


def test_memory_of_a_fake_communicator_is_written_in_any_mode():
    comm = to.new_comm("fake", "cpu", name="inference_fake", rank=0, size=2)
    with torch.inference_mode():
        memory = to.symmetric_empty(6, torch.float32, comm)
    assert torch.equal(memory.add_(1), torch.ones(6))
