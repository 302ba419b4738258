"""Values of every operation, on every backend that moves data: fresh inputs, poisoned outputs, every element
compared."""

import pytest
import torch
from rank_values import DTYPES, OTHERS, assert_equal, assert_reduced, poisoned, rank_input

from torch_overlap import ReduceOp, TorchComm
from torch_overlap.testing import run_ranks

# No elements, one element, a number that no group size divides, and several dimensions.
SHAPES = [(0,), (1,), (129,), (3, 5, 2)]
MOVED = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint64, torch.bool, torch.complex64]
REST = [dtype for dtype in (*DTYPES, *OTHERS) if dtype not in MOVED]


class Case:
    """One operation's inputs on this rank, and everything needed to compute the expected result."""

    def __init__(self, comm: TorchComm, seed: int, shape: tuple[int, ...], dtype: torch.dtype, async_op: bool) -> None:
        self.comm, self.seed, self.shape, self.dtype, self.async_op = comm, seed, shape, dtype, async_op
        self.rank, self.size, self.device = comm.get_rank(), comm.get_size(), comm.get_device()

    def of(self, rank: int, salt: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return rank_input(self.seed + 7919 * salt, rank, self.shape if shape is None else shape, self.dtype)

    def mine(self, salt: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return self.of(self.rank, salt, shape).to(self.device)

    def empty(self, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return poisoned(self.shape if shape is None else shape, self.dtype, self.device)

    def rows(self) -> tuple[int, ...]:
        return (self.size, *self.shape)

    def everyone(self, salt: int = 0) -> list[torch.Tensor]:
        return [self.of(rank, salt) for rank in range(self.size)]


def broadcast(case: Case) -> None:
    for root in range(case.size):
        tensor = case.mine(root)
        case.comm.broadcast(tensor, root, case.async_op).wait()
        assert_equal(tensor, case.of(root, root))


def all_reduce(case: Case) -> None:
    tensor = case.mine()
    case.comm.all_reduce(tensor, ReduceOp.MAX, case.async_op).wait()
    assert_reduced(tensor, ReduceOp.MAX, case.everyone())


def reduce(case: Case) -> None:
    for root in range(case.size):
        tensor = case.mine(root)
        case.comm.reduce(tensor, root, ReduceOp.MAX, case.async_op).wait()
        if case.rank == root:
            assert_reduced(tensor, ReduceOp.MAX, case.everyone(root))
        else:
            assert_equal(tensor, case.of(case.rank, root), "a rank that is not the root")


def all_gather(case: Case) -> None:
    separate = [case.empty() for _ in range(case.size)]
    views = list(case.empty(case.rows()).unbind())
    for outputs in (separate, views):
        case.comm.all_gather(outputs, case.mine(), case.async_op).wait()
        for rank, output in enumerate(outputs):
            assert_equal(output, case.of(rank), f"from rank {rank}")


def all_gather_single(case: Case) -> None:
    output = case.empty(case.rows())
    case.comm.all_gather_single(output, case.mine(), case.async_op).wait()
    assert_equal(output, torch.stack(case.everyone()))


def all_gather_v(case: Case) -> None:
    shapes = [(rank, *case.shape) for rank in range(case.size)]
    outputs = [case.empty(shape) for shape in shapes]
    case.comm.all_gather_v(outputs, case.mine(0, shapes[case.rank]), case.async_op).wait()
    for rank, output in enumerate(outputs):
        assert_equal(output, case.of(rank, 0, shapes[rank]), f"from rank {rank}")


def gather(case: Case) -> None:
    for root in range(case.size):
        outputs = [case.empty() for _ in range(case.size)] if case.rank == root else []
        case.comm.gather(outputs, case.mine(root), root, case.async_op).wait()
        for rank, output in enumerate(outputs):
            assert_equal(output, case.of(rank, root), f"from rank {rank}")


def gather_single(case: Case) -> None:
    for root in range(case.size):
        output = case.empty(case.rows()) if case.rank == root else None
        case.comm.gather_single(output, case.mine(root), root, case.async_op).wait()
        if output is not None:
            assert_equal(output, torch.stack(case.everyone(root)))


def reduce_scatter(case: Case) -> None:
    output = case.empty()
    inputs = [case.mine(to) for to in range(case.size)]
    case.comm.reduce_scatter(output, inputs, ReduceOp.MIN, case.async_op).wait()
    assert_reduced(output, ReduceOp.MIN, case.everyone(case.rank))


def reduce_scatter_single(case: Case) -> None:
    output = case.empty()
    case.comm.reduce_scatter_single(output, case.mine(0, case.rows()), ReduceOp.MIN, case.async_op).wait()
    assert_reduced(output, ReduceOp.MIN, [case.of(rank, 0, case.rows())[case.rank] for rank in range(case.size)])


def reduce_scatter_v(case: Case) -> None:
    shapes = [(to, *case.shape) for to in range(case.size)]
    output = case.empty(shapes[case.rank])
    inputs = [case.mine(to, shapes[to]) for to in range(case.size)]
    case.comm.reduce_scatter_v(output, inputs, ReduceOp.MIN, case.async_op).wait()
    assert_reduced(output, ReduceOp.MIN, [case.of(rank, case.rank, shapes[case.rank]) for rank in range(case.size)])


def scatter(case: Case) -> None:
    for root in range(case.size):
        output = case.empty()
        inputs = [case.mine(to) for to in range(case.size)] if case.rank == root else None
        case.comm.scatter(output, inputs, root, case.async_op).wait()
        assert_equal(output, case.of(root, case.rank))


def all_to_all(case: Case) -> None:
    # Rank a sends a * size + b + 1 rows to rank b: every pair has its own size.
    def rows(source: int, target: int) -> tuple[int, ...]:
        return (source * case.size + target + 1, *case.shape)

    inputs = [case.mine(to, rows(case.rank, to)) for to in range(case.size)]
    outputs = [case.empty(rows(source, case.rank)) for source in range(case.size)]
    case.comm.all_to_all(outputs, inputs, case.async_op).wait()
    for source, output in enumerate(outputs):
        assert_equal(output, case.of(source, case.rank, rows(source, case.rank)), f"from rank {source}")


def all_to_all_single(case: Case) -> None:
    output = case.empty(case.rows())
    case.comm.all_to_all_single(output, case.mine(0, case.rows()), case.async_op).wait()
    assert_equal(output, torch.stack([case.of(source, 0, case.rows())[case.rank] for source in range(case.size)]))


def all_to_all_v_single(case: Case) -> None:
    # Rank a sends (a + b) % 3 rows to rank b: some send nothing.
    sends = [[(a + 2 * b) % 3 for b in range(case.size)] for a in range(case.size)]
    out_splits = [sends[source][case.rank] for source in range(case.size)]
    output = case.empty((sum(out_splits), *case.shape))
    mine = case.mine(0, (sum(sends[case.rank]), *case.shape))
    case.comm.all_to_all_v_single(output, mine, out_splits, sends[case.rank], case.async_op).wait()
    pieces = [
        case.of(source, 0, (sum(sends[source]), *case.shape)).split(sends[source])[case.rank]
        for source in range(case.size)
    ]
    assert_equal(output, torch.cat(pieces))


def batch(case: Case) -> None:
    """Every rank sends to every rank, itself included, in one batch."""
    batch = case.comm.batch_op_create()
    outputs = [case.empty() for _ in range(case.size)]
    for peer in range(case.size):
        batch.send(case.mine(peer), peer)
        batch.recv(outputs[peer], peer)
    assert len(batch.ops) == 2 * case.size
    batch.issue(case.async_op).wait()
    assert batch.ops == []
    for source, output in enumerate(outputs):
        assert_equal(output, case.of(source, case.rank), f"from rank {source}")


def barrier(case: Case) -> None:
    case.comm.barrier(case.async_op).wait()


OPERATIONS = [
    broadcast, all_reduce, reduce, all_gather, all_gather_single, all_gather_v, gather, gather_single, reduce_scatter,
    reduce_scatter_single, reduce_scatter_v, scatter, all_to_all, all_to_all_single, all_to_all_v_single, batch,
    barrier,
]  # fmt: skip
REDUCING = {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_v"}


def run_operation(comm: TorchComm, name: str, seed: int) -> None:
    operation = next(op for op in OPERATIONS if op.__name__ == name)
    for number, shape in enumerate(SHAPES):
        for i, dtype in enumerate([torch.float32] * 2 if name in REDUCING else MOVED):
            operation(Case(comm, seed + number, shape, dtype, async_op=(number + i) % 2 == 0))
    for number, dtype in enumerate([] if name in REDUCING else REST):
        operation(Case(comm, seed, (5, 2), dtype, async_op=number % 2 == 0))


@pytest.mark.parametrize("name", [op.__name__ for op in OPERATIONS])
def test_values(name: str, backend: str, size: int, device: str, seed: int) -> None:
    run_ranks(run_operation, size, name, seed, backend=backend, device=device)


def run_ring(comm: TorchComm, seed: int, async_op: bool) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    for dtype in MOVED:
        output = poisoned((17,), dtype, comm.get_device())
        mine = rank_input(seed, rank, (17,), dtype).to(comm.get_device())
        # The ring is broken at rank 0, which receives first, so that it works on backends whose sends wait for the
        # receive.
        steps = [lambda t=mine: comm.send(t, following, async_op), lambda t=output: comm.recv(t, previous, async_op)]
        for step in reversed(steps) if rank == 0 else steps:
            step().wait()
        assert_equal(output, rank_input(seed, previous, (17,), dtype))


@pytest.mark.sizes(2, 3, 4, 8)
@pytest.mark.parametrize("async_op", [False, True])
def test_send_and_recv_around_a_ring(backend: str, size: int, device: str, seed: int, async_op: bool) -> None:
    run_ranks(run_ring, size, seed, async_op, backend=backend, device=device)


def run_order(comm: TorchComm, seed: int) -> None:
    inputs = [rank_input(seed, salt, (5,), torch.int64).to(comm.get_device()) for salt in range(20)]
    outputs = [poisoned((5,), torch.int64, comm.get_device()) for _ in inputs]
    if comm.get_rank() == 0:
        works = [comm.send(tensor, 1, True) for tensor in inputs]
    else:
        works = [comm.recv(tensor, 0, True) for tensor in outputs]
    for work in works:
        work.wait()
    if comm.get_rank() == 1:
        for output, tensor in zip(outputs, inputs, strict=True):
            assert_equal(output, tensor.cpu())


@pytest.mark.sizes(2)
def test_messages_between_two_ranks_stay_in_order(backend: str, size: int, device: str, seed: int) -> None:
    run_ranks(run_order, size, seed, backend=backend, device=device)


def run_in_flight(comm: TorchComm, seed: int) -> None:
    """Many operations at once, waited for in another order; everything but the outputs is dropped at once."""
    size = comm.get_size()
    outputs = [poisoned((size, 1000), torch.float32, comm.get_device()) for _ in range(20)]
    works = [
        comm.all_gather_single(out, rank_input(seed + i, comm.get_rank(), (1000,), torch.float32).to(out.device), True)
        for i, out in enumerate(outputs)
    ]
    for i in reversed(range(20)):
        works[i].wait()
        expected = torch.stack([rank_input(seed + i, rank, (1000,), torch.float32) for rank in range(size)])
        assert_equal(outputs[i], expected)


def test_operations_in_flight_keep_their_tensors(backend: str, size: int, device: str, seed: int) -> None:
    run_ranks(run_in_flight, size, seed, backend=backend, device=device)
