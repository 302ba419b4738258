"""Shared memory of overlapped operators after an operation that failed halfway: unusable until reconfigure."""

from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
PATIENCE = timedelta(seconds=60)  # limit of waits that succeed
SOON = timedelta(seconds=3)  # limit of the wait for the absent rank


def new_comm(rank, size, store):
    return to.new_comm(
        "gloo", "cpu", "recovery", store=store, rank=rank, size=size, timeout=PATIENCE,
        abort_process_on_timeout_or_error=False, enable_reconfigure=True,
    )  # fmt: skip


def check_products(comm, seed, algorithm="p2p"):
    """Runs forward and backward: both channels are used."""
    gen = torch.Generator().manual_seed(seed)
    me, size = comm.get_rank(), comm.get_size()
    xs, w, v = (torch.randn(*s, generator=gen, dtype=torch.float64) for s in ((size, 3, 8), (5, 8), (8, 5)))
    x = xs[me].clone().requires_grad_()
    (y,), _ = ops.all_gather_matmul(x, [w], comm, algorithm=algorithm)
    torch.testing.assert_close(y, F.linear(xs.flatten(0, 1), w))
    z = ops.matmul_reduce_scatter(y, v, comm, algorithm=algorithm)
    torch.testing.assert_close(z, size * F.linear(F.linear(xs[me], w), v))
    z.sum().backward()
    torch.testing.assert_close(x.grad, size * (torch.ones(3, 8, dtype=torch.float64) @ v @ w))


def recovery_rank(rank, size, store, seed):
    comm = new_comm(rank, size, store)
    handles = [None] * size
    to.objcol.all_gather_object(comm, handles, comm.get_init_handle())
    check_products(comm, seed)
    for generation in (1, 2):
        comm.barrier(False)  # the others begin together
        if rank != size - 1:  # the last rank does not call
            comm.set_timeout(SOON)
            with pytest.raises(to.OperationTimeoutError, match=f"expected rank {size - 1} to begin operation"):
                check_products(comm, seed)
            with pytest.raises(to.UnsupportedError, match=r"ended half way; reconfigure.. the communicator, or make a"):
                check_products(comm, seed)
        store.set(f"expired/{generation}/{rank}", "")
        store.wait([f"expired/{generation}/{r}" for r in range(size)])
        comm.set_timeout(PATIENCE)
        comm.reconfigure(generation, handles)
        for turn in range(3):
            check_products(comm, seed + turn)
        check_products(comm, seed, "auto")
    comm.finalize()


def test_reconfigure_brings_the_operators_back(seed):
    run_ranks(recovery_rank, 3, seed, comm=False, timeout=240)
