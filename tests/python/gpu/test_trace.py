"""What a profile shows: transfers are on their way before the products that hide them end, forward and backward."""

import pytest
import torch
from trace_cases import tasks_of

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)

# Of one rank. A product of one chunk takes some tenths of a millisecond, and its issue a few hundredths.
ROWS, IN, OUT = 4096, 4096, 8192


def check_gather(transfers, products, ring):
    """All transfers are issued at once; product i + 1 needs the chunk that transfer i brings."""
    assert len(transfers) == len(products) - 1
    for i, (transfer, product) in enumerate(zip(transfers, products, strict=False)):
        assert transfer.issued < product.end, (transfer, product)
        if ring and i == 0:  # copy engines need nothing that a product has, but go one after the other
            assert transfer.begin < product.end, (transfer, product)
        assert not transfer.streams & product.streams


def check_scatter(transfers, products, ring):
    """Transfer i sends what product i made while product i + 1 runs."""
    assert len(transfers) == len(products) - 1
    for i, transfer in enumerate(transfers):
        assert transfer.begin >= products[i].end, (transfer, products[i])
        assert transfer.issued < products[i + 1].end, (transfer, products[i + 1])
        # The two products may run side by side, and the second may end first.
        if ring and i == 0 and products[i].end < products[i + 1].end:
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
    """Tasks of a forward pass, and of its backward pass, which runs on a thread of autograd's."""
    grad = torch.randn_like(forward())
    for _ in range(3):  # memory, cuBLASLt's choices and NCCL's connections are there afterwards
        forward().backward(grad)
        for x in inputs:
            x.grad = None
    results = []
    comm.barrier(async_op=False)
    first = tasks_of(lambda: results.append(forward()), path / "forward.json")
    comm.barrier(async_op=False)
    second = tasks_of(lambda: results[0].backward(grad), path / "backward.json")
    return first, second


@pytest.mark.parametrize("algorithm", ["chunked", "ring"])
def test_all_gather_matmul(comm, draw, tmp_path, algorithm):
    size, ring = comm.get_size(), algorithm == "ring"
    x, weight = draw(ROWS, IN), draw(OUT, IN)

    def forward():
        return to.ops.all_gather_matmul(x, [weight], comm, algorithm=algorithm)[0][0]

    (transfers, products), (back_transfers, back_products) = traced(comm, forward, (x, weight), tmp_path)
    assert len(products) == size
    check_gather(transfers, products, ring)
    # x is gathered again, for the weight's gradient, behind the products whose sum is x's gradient.
    assert len(back_products) == size
    again, sent = back_transfers[: size - 1], back_transfers[size - 1 :]
    for transfer in again:
        assert transfer.issued < back_products[0].end, (transfer, back_products[0])
    check_scatter(sent, back_products, ring)


@pytest.mark.parametrize("algorithm", ["chunked", "ring"])
def test_matmul_reduce_scatter(comm, draw, tmp_path, algorithm):
    size, ring = comm.get_size(), algorithm == "ring"
    x, weight = draw(ROWS * size, IN), draw(OUT, IN)

    def forward():
        return to.ops.matmul_reduce_scatter(x, weight, comm, algorithm=algorithm)

    (transfers, products), (back_transfers, back_products) = traced(comm, forward, (x, weight), tmp_path)
    assert len(products) == size
    check_scatter(transfers, products, ring)
    # The gradient is gathered, and multiplied chunk by chunk.
    assert len(back_products) == size
    check_gather(back_transfers, back_products, ring)
