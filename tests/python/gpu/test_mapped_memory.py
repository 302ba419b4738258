"""Sends and receives between memory that other processes can map and memory that they cannot.

NCCL maps the former into the peer, in captures by default, and does not check that the other side is of the same
kind.
"""

import pytest
import torch

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)


def memory(comm, kind, count):
    if kind == "shared":
        return to.symmetric_empty(count, torch.float32, comm)
    return torch.empty(count, device="cuda")


def ring(comm, x, y):
    batch = comm.batch_op_create()
    batch.send(x, (comm.get_rank() + 1) % comm.get_size())
    batch.recv(y, (comm.get_rank() - 1) % comm.get_size())
    return batch.issue(async_op=True)


def all_to_all(comm, x, y):
    return comm.all_to_all_single(y, x, async_op=True)


def expected(op, xs, rank):
    if op is ring:
        return xs[rank - 1]
    return torch.cat([x.chunk(len(xs))[rank] for x in xs])


@pytest.mark.parametrize("mebibytes", [1 / 16, 8])  # on both sides of the size at which NCCL starts to do so
@pytest.mark.parametrize(("gives", "gets"), [("shared", "plain"), ("plain", "shared"), ("shared", "shared")])
@pytest.mark.parametrize("op", [ring, all_to_all], ids=lambda op: op.__name__)
def test_replays_between_kinds_of_memory(nccl_comm, seed, op, gives, gets, mebibytes):
    size = nccl_comm.get_size()
    count = int(mebibytes * 2**20) // 4 * size
    x, y = memory(nccl_comm, gives, count), memory(nccl_comm, gets, count)
    op(nccl_comm, x.zero_(), y).wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(nccl_comm, x, y).wait()
    gen = torch.Generator(device="cuda").manual_seed(seed)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(3):
        xs = torch.randn(size, count, generator=gen, device="cuda")
        x.copy_(xs[nccl_comm.get_rank()])
        y.fill_(float("nan"))
        graph.replay()
        wrong += (y != expected(op, xs, nccl_comm.get_rank())).sum()
    nccl_comm.all_reduce(wrong, to.ReduceOp.SUM, async_op=False)
    assert wrong.item() == 0


def test_a_graph_keeps_memory_that_is_mapped(nccl_comm):
    """NCCL finds the peers' mappings of a graph by address: new memory there would be sent to the freed one."""

    def fresh():
        return to.symmetric_empty(2**22, torch.float32, nccl_comm)

    x = fresh()
    address = x.data_ptr()
    nccl_comm.all_reduce(x.zero_(), to.ReduceOp.SUM, async_op=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        nccl_comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    del x
    torch.cuda.synchronize()
    y = fresh()
    assert y.data_ptr() != address
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):
        nccl_comm.all_reduce(y, to.ReduceOp.SUM, async_op=False)
    for step in range(3):
        y.fill_(nccl_comm.get_rank() + step)
        graph.replay()
        other.replay()
        size = nccl_comm.get_size()
        assert (y == size * (size - 1) // 2 + size * step).all()
    del graph, other


@pytest.fixture
def registered(nccl_comm):
    """Returns a function that makes a tensor of 8 MiB per rank, registered until the end of the test."""
    made = []

    def make(dtype):
        made.append(to.symmetric_empty(nccl_comm.get_size() * 2**23 // dtype.itemsize, dtype, nccl_comm))
        nccl_comm.tensor_register(made[-1])
        return made[-1]

    yield make
    for tensor in made:
        nccl_comm.tensor_deregister(tensor)


def integers(seed, rank, like):
    gen = torch.Generator(device="cuda").manual_seed(seed + rank)
    return torch.randint(-100, 100, like.shape, generator=gen, device="cuda").to(like.dtype)


def test_a_composed_reduction_of_registered_memory(nccl_comm, registered, seed):
    x = registered(torch.int16)  # NCCL has no sum of these
    x.copy_(integers(seed, nccl_comm.get_rank(), x))
    nccl_comm.all_reduce(x, to.ReduceOp.SUM, async_op=False)
    assert torch.equal(x, sum(integers(seed, r, x) for r in range(nccl_comm.get_size())))


def test_an_all_to_all_in_place_of_registered_memory(nccl_comm, registered, seed):
    x = registered(torch.int32)
    rank, size = nccl_comm.get_rank(), nccl_comm.get_size()
    x.copy_(integers(seed, rank, x))
    nccl_comm.all_to_all_single(x, x, async_op=False)
    assert torch.equal(x, torch.cat([integers(seed, r, x).chunk(size)[rank] for r in range(size)]))
