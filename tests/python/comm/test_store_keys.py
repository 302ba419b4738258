"""Communicators delete the keys that they write into the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import torch_overlap as to


@pytest.mark.parametrize("options", [{}, {"enable_reconfigure": True}, {"hints": {"check_mismatch": "true"}}], ids=str)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_name_that_is_used_again_leaves_what_it_left_the_first_time(size: int, options: dict[str, object]) -> None:
    store = dist.HashStore()

    def live(rank: int) -> None:
        comm = to.new_comm("local", "cpu", "again", store=store, rank=rank, size=size, **options)
        with pytest.raises(to.InvalidValueError):
            comm.split([0, 0])
        half = comm.split([r for r in range(size) if r % 2 == rank % 2])
        for one in (comm, half):
            x = torch.full((3,), float(rank))
            one.all_reduce(x, to.ReduceOp.SUM, async_op=False)
            assert x.tolist() == [float(sum(one.get_ranks_in_world()))] * 3
        window = comm.new_window(torch.zeros(4))
        window.tensor_deregister()
        half.finalize()
        comm.finalize()

    with ThreadPoolExecutor(size) as ranks:
        for _ in range(4):
            list(ranks.map(live, range(size)))
            # A counter of the ranks that arrived under this name, and the size that each one published.
            assert store.num_keys() == size + 1
