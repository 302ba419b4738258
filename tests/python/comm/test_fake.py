"""`fake`: every operation gives the result for ranks that all pass the arguments of this one."""

import pytest
import torch
from rank_values import assert_equal, assert_reduced, poisoned, rank_input

from torch_overlap import ReduceOp, TorchComm
from torch_overlap.testing import run_ranks

MOVED = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.uint64, torch.bool, torch.complex128]


class Case:
    """The tensors of one rank."""

    def __init__(self, comm: TorchComm, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.rank, self.size, self.dtype, self.shape = comm.get_rank(), comm.get_size(), dtype, shape
        self.mine = rank_input(seed, self.rank, shape, dtype)
        self.rows = rank_input(seed + 1, self.rank, (self.size, *shape), dtype)

    def empty(self, *leading: int) -> torch.Tensor:
        return poisoned((*leading, *self.shape), self.dtype)

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=torch.uint8).to(self.dtype)


def check_gathers(comm: TorchComm, case: Case, async_op: bool) -> None:
    everyone = torch.stack([case.mine] * case.size)
    single, parts, uneven = case.empty(case.size), list(case.empty(case.size)), list(case.empty(case.size))
    comm.all_gather_single(single, case.mine, async_op).wait()
    comm.all_gather(parts, case.mine, async_op).wait()
    comm.all_gather_v(uneven, case.mine, async_op).wait()
    for got in (single, torch.stack(parts), torch.stack(uneven)):
        assert_equal(got, everyone)
    for root in range(case.size):
        at_root = case.rank == root
        single, parts = case.empty(case.size), list(case.empty(case.size))
        comm.gather_single(single if at_root else None, case.mine, root, async_op).wait()
        comm.gather(parts if at_root else [], case.mine, root, async_op).wait()
        if at_root:
            assert_equal(single, everyone)
            assert_equal(torch.stack(parts), everyone)


def check_exchanges(comm: TorchComm, case: Case, async_op: bool) -> None:
    expected = torch.stack([case.rows[case.rank]] * case.size)
    single, parts, by_splits = case.empty(case.size), list(case.empty(case.size)), case.empty(case.size)
    comm.all_to_all_single(single, case.rows, async_op).wait()
    comm.all_to_all(parts, list(case.rows), async_op).wait()
    comm.all_to_all_v_single(by_splits, case.rows, [1] * case.size, [1] * case.size, async_op).wait()
    for got in (single, torch.stack(parts), by_splits):
        assert_equal(got, expected)


def check_roots(comm: TorchComm, case: Case, async_op: bool) -> None:
    for root in range(case.size):
        tensor = case.mine.clone()
        comm.broadcast(tensor, root, async_op).wait()
        assert_equal(tensor, case.mine)
        output = case.empty()
        comm.scatter(output, list(case.rows) if case.rank == root else [], root, async_op).wait()
        assert_equal(output, case.rows[root] if case.rank == root else case.zeros())


def check_messages(comm: TorchComm, case: Case, async_op: bool) -> None:
    batch = comm.batch_op_create()
    outputs = list(case.empty(case.size))
    for peer in range(case.size):
        if peer != case.rank:
            comm.send(case.mine, peer, async_op).wait()
            output = case.empty()
            comm.recv(output, peer, async_op).wait()
            assert_equal(output, case.zeros())
        batch.send(case.rows[peer], peer)
        batch.recv(outputs[peer], peer)
    batch.issue(async_op).wait()
    for peer, output in enumerate(outputs):
        assert_equal(output, case.rows[peer] if peer == case.rank else case.zeros())
    comm.barrier(async_op).wait()


def check_reductions(comm: TorchComm, case: Case, async_op: bool) -> None:
    everyone, column = [case.mine] * case.size, [case.rows[case.rank]] * case.size
    for root in range(case.size):
        tensor = case.mine.clone()
        comm.reduce(tensor, root, ReduceOp.SUM, async_op).wait()
        if case.rank == root:
            assert_reduced(tensor, ReduceOp.SUM, everyone)
        else:
            assert_equal(tensor, case.mine)
    tensor, single, listed, uneven = case.mine.clone(), case.empty(), case.empty(), case.empty()
    comm.all_reduce(tensor, ReduceOp.SUM, async_op).wait()
    assert_reduced(tensor, ReduceOp.SUM, everyone)
    comm.reduce_scatter_single(single, case.rows, ReduceOp.SUM, async_op).wait()
    comm.reduce_scatter(listed, list(case.rows), ReduceOp.SUM, async_op).wait()
    comm.reduce_scatter_v(uneven, list(case.rows), ReduceOp.SUM, async_op).wait()
    for output in (single, listed, uneven):
        assert_reduced(output, ReduceOp.SUM, column)


CHECKS = [check_gathers, check_exchanges, check_roots, check_messages, check_reductions]


def run_check(comm: TorchComm, name: str, seed: int) -> None:
    check = next(check for check in CHECKS if check.__name__ == name)
    for shape in ((0,), (1,), (7,), (3, 2)):
        for dtype in MOVED:
            for async_op in (False, True):
                check(comm, Case(comm, seed, shape, dtype), async_op)


def run_sparse(comm: TorchComm, seed: int) -> None:
    dense = rank_input(seed, comm.get_rank(), (6, 4), torch.float64)
    dense[comm.get_rank() % 6] = 0
    sparse = dense.to_sparse()
    comm.all_reduce(sparse, ReduceOp.SUM, False).wait()
    assert sparse.is_coalesced()
    assert_reduced(sparse.to_dense(), ReduceOp.SUM, [dense] * comm.get_size())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_a_sparse_tensor_becomes_the_sum_of_equal_ones(size: int, seed: int) -> None:
    run_ranks(run_sparse, size, seed, backend="fake")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_results_are_those_of_equal_ranks(name: str, size: int, seed: int) -> None:
    run_ranks(run_check, size, name, seed, backend="fake")
