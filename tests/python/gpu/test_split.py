"""split over NCCL."""

import pytest
import torch

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)


def total(comm, value):
    x = torch.full((1000,), float(value), device="cuda")
    comm.all_reduce(x, to.ReduceOp.SUM, async_op=True).wait()
    assert (x == x[0]).all()
    return x[0].item()


def test_the_order_of_the_list_is_the_order_of_ranks(comm):
    rank, size = comm.get_rank(), comm.get_size()
    child = comm.split(list(reversed(range(size))), name="reversed")
    assert (child.get_rank(), child.get_size(), child.get_name()) == (size - 1 - rank, size, "reversed")
    out = torch.empty(size, dtype=torch.int64, device="cuda")
    child.all_gather_single(out, torch.tensor([rank], device="cuda"), async_op=False)
    assert out.tolist() == list(reversed(range(size)))
    child.finalize()


def test_parts_work_side_by_side_with_their_parent(comm):
    rank, size = comm.get_rank(), comm.get_size()
    members = [r for r in range(size) if r % 2 == rank % 2]
    child = comm.split(members)
    for i in range(5):
        assert total(child, rank + i) == sum(r + i for r in members)
        assert total(comm, rank) == sum(range(size))
    child.finalize()
    assert total(comm, 1) == size


def test_an_empty_list_gives_none_and_lets_the_others_go_on(comm):
    rank = comm.get_rank()
    child = comm.split([0] if rank == 0 else [])
    assert (child is None) == (rank != 0)
    if child is not None:
        assert total(child, 3) == 3
        child.finalize()


def test_options_are_inherited_and_a_child_may_be_split_again(make_comm):
    parent = make_comm("inherits", is_high_priority_stream=True)
    child = parent.split(list(range(parent.get_size())))
    assert child.get_options().is_high_priority_stream
    assert child.get_options().timeout == parent.get_options().timeout
    grandchild = child.split([child.get_rank()])
    assert total(grandchild, 7) == 7
    for one in (grandchild, child, parent):
        one.finalize()


def test_shared_resources(make_comm):
    parent = make_comm("shares", hints={"splitShare": "1"})
    child = parent.split(list(range(parent.get_size())))
    for i in range(10):
        assert total(parent, i) == i * parent.get_size()
        assert total(child, i) == i * parent.get_size()
    child.finalize()
    assert total(parent, 2) == 2 * parent.get_size()
    parent.finalize()


def test_split_with_operations_under_way(comm):
    x = torch.ones(1 << 20, device="cuda")
    torch.cuda._sleep(200_000_000)
    work = comm.all_reduce(x, to.ReduceOp.SUM, async_op=True)
    child = comm.split(list(range(comm.get_size())))
    assert total(child, 1) == comm.get_size()
    work.wait()
    assert (x == comm.get_size()).all()
    child.finalize()


def test_a_name_may_be_used_again(make_comm):
    for _ in range(3):
        again = make_comm("again")
        assert total(again, 1) == again.get_size()
        again.finalize()
