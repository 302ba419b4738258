"""Profiles show that transfers start before the products that hide them end, forward and backward."""

import pytest
import torch
from trace_cases import tasks_of

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)

# Sizes of one rank. A product of one chunk takes much longer than its issue.
ROWS, IN, OUT = 4096, 4096, 8192


def check_gather(transfers, products, p2p):
    """All transfers are issued at once; product i + 1 needs the chunk of transfer i."""
    assert len(transfers) == len(products) - 1
    for i, (transfer, product) in enumerate(zip(transfers, products, strict=False)):
        assert transfer.issued < product.end, (transfer, product)
        if p2p and i == 0:  # copy engines use no resource of a product, but run one after the other
            assert transfer.begin < product.end, (transfer, product)
        assert not transfer.streams & product.streams


def check_scatter(transfers, products, p2p):
    """Transfer i sends the result of product i while product i + 1 runs."""
    assert len(transfers) == len(products) - 1
    for i, transfer in enumerate(transfers):
        assert transfer.begin >= products[i].end, (transfer, products[i])
        assert transfer.issued < products[i + 1].end, (transfer, products[i + 1])
        # The two products may run concurrently, and the second may end first.
        if p2p and i == 0 and products[i].end < products[i + 1].end:
            assert transfer.begin < products[i + 1].end, (transfer, products[i + 1])
        assert not transfer.streams & products[i].streams


@pytest.fixture
def draw(comm, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed + comm.get_rank())

    def tensor(*shape):
        x = torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return x.requires_grad_()

    return tensor


def traced(comm, forward, inputs, path):
    """Returns the tasks of a forward pass, and of its backward pass, which runs on a thread of autograd."""
    grad = torch.randn_like(forward())
    for _ in range(3):  # allocates memory, cuBLASLt's plans and NCCL's connections
        forward().backward(grad)
        for x in inputs:
            x.grad = None
    results = []
    comm.barrier(async_op=False)
    first = tasks_of(lambda: results.append(forward()), path / "forward.json")
    comm.barrier(async_op=False)
    second = tasks_of(lambda: results[0].backward(grad), path / "backward.json")
    return first, second


@pytest.mark.parametrize("algorithm", ["pipelined", "p2p"])
def test_all_gather_matmul(comm, draw, tmp_path, algorithm):
    size, p2p = comm.get_size(), algorithm == "p2p"
    x, weight = draw(ROWS, IN), draw(OUT, IN)

    def forward():
        return to.ops.all_gather_matmul(x, [weight], comm, algorithm=algorithm)[0][0]

    (transfers, products), (back_transfers, back_products) = traced(comm, forward, (x, weight), tmp_path)
    assert len(products) == size
    check_gather(transfers, products, p2p)
    # x is gathered again, for the weight's gradient, after the products whose sum is x's gradient.
    assert len(back_products) == size
    again, sent = back_transfers[: size - 1], back_transfers[size - 1 :]
    for transfer in again:
        assert transfer.issued < back_products[0].end, (transfer, back_products[0])
    check_scatter(sent, back_products, p2p)


@pytest.mark.parametrize("algorithm", ["pipelined", "p2p"])
def test_matmul_reduce_scatter(comm, draw, tmp_path, algorithm):
    size, p2p = comm.get_size(), algorithm == "p2p"
    x, weight = draw(ROWS * size, IN), draw(OUT, IN)

    def forward():
        return to.ops.matmul_reduce_scatter(x, weight, comm, algorithm=algorithm)

    (transfers, products), (back_transfers, back_products) = traced(comm, forward, (x, weight), tmp_path)
    assert len(products) == size
    check_scatter(transfers, products, p2p)
    # The gradient is gathered, and multiplied chunk by chunk.
    assert len(back_products) == size
    check_gather(back_transfers, back_products, p2p)
