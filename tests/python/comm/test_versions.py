"""Autograd detects that a collective has written to a tensor, as with every in-place operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torch_overlap as to
from torch_overlap import ReduceOp, TorchComm
from torch_overlap.testing import run_ranks

SUM = ReduceOp.SUM
Op = Callable[[TorchComm, bool], "tuple[to.TorchWork, list[torch.Tensor], list[torch.Tensor]]"]


def in_place(op: Callable[[TorchComm, torch.Tensor, bool], to.TorchWork], where: str = "all") -> Op:
    """`where` the tensor is written: on all ranks, on rank 0 (the root), or on the others."""

    def call(comm: TorchComm, async_op: bool) -> tuple[to.TorchWork, list[torch.Tensor], list[torch.Tensor]]:
        x = torch.ones(6)
        is_root = comm.get_rank() == 0
        is_written = {"all": True, "root": is_root, "others": not is_root}[where]
        return op(comm, x, async_op), [x] if is_written else [], [] if is_written else [x]

    return call


def from_to(op: Callable[..., to.TorchWork], outputs: int, inputs: int, where: str = "all") -> Op:
    """Returns an Op of op(comm, outputs, inputs, async_op). 0 stands for a large tensor, -1 for a small one, 1 for a
    list."""

    def make(comm: TorchComm, kind: int) -> torch.Tensor | list[torch.Tensor]:
        size = comm.get_size()
        return (
            torch.ones(2) if kind < 0 else torch.ones(2 * size) if kind == 0 else [torch.ones(2) for _ in range(size)]
        )

    def call(comm: TorchComm, async_op: bool) -> tuple[to.TorchWork, list[torch.Tensor], list[torch.Tensor]]:
        out, into = make(comm, outputs), make(comm, inputs)
        tensors = lambda side: side if isinstance(side, list) else [side]  # noqa: E731
        written = where == "all" or comm.get_rank() == 0
        work = op(comm, out, into, async_op)
        return work, tensors(out) if written else [], [*tensors(into), *([] if written else tensors(out))]

    return call


def send_recv(comm: TorchComm, async_op: bool) -> tuple[to.TorchWork, list[torch.Tensor], list[torch.Tensor]]:
    rank, size = comm.get_rank(), comm.get_size()
    x, y = torch.ones(3), torch.ones(3)
    batch = comm.batch_op_create()
    batch.send(x, (rank + 1) % size)
    batch.recv(y, (rank - 1) % size)
    return batch.issue(async_op), [y], [x]


def recv(comm: TorchComm, async_op: bool) -> tuple[to.TorchWork, list[torch.Tensor], list[torch.Tensor]]:
    x = torch.ones(3)
    if comm.get_rank() == 0:
        return comm.send(x, 1, async_op), [], [x]
    return comm.recv(x, 0, async_op), [x], []


LIST, LARGE, SMALL = 1, 0, -1
OPS: dict[str, Op] = {
    "broadcast": in_place(lambda c, x, a: c.broadcast(x, 0, a), "others"),
    "all_reduce": in_place(lambda c, x, a: c.all_reduce(x, SUM, a)),
    "reduce": in_place(lambda c, x, a: c.reduce(x, 0, SUM, a), "root"),
    "all_gather": from_to(lambda c, y, x, a: c.all_gather(y, x, a), LIST, SMALL),
    "all_gather_v": from_to(lambda c, y, x, a: c.all_gather_v(y, x, a), LIST, SMALL),
    "all_gather_single": from_to(lambda c, y, x, a: c.all_gather_single(y, x, a), LARGE, SMALL),
    "gather": from_to(lambda c, y, x, a: c.gather(y, x, 0, a), LIST, SMALL, "root"),
    "gather_single": from_to(lambda c, y, x, a: c.gather_single(y, x, 0, a), LARGE, SMALL, "root"),
    "scatter": from_to(lambda c, y, x, a: c.scatter(y, x, 0, a), SMALL, LIST),
    "reduce_scatter": from_to(lambda c, y, x, a: c.reduce_scatter(y, x, SUM, a), SMALL, LIST),
    "reduce_scatter_v": from_to(lambda c, y, x, a: c.reduce_scatter_v(y, x, SUM, a), SMALL, LIST),
    "reduce_scatter_single": from_to(lambda c, y, x, a: c.reduce_scatter_single(y, x, SUM, a), SMALL, LARGE),
    "all_to_all": from_to(lambda c, y, x, a: c.all_to_all(y, x, a), LIST, LIST),
    "all_to_all_single": from_to(lambda c, y, x, a: c.all_to_all_single(y, x, a), LARGE, LARGE),
    "all_to_all_v_single": from_to(lambda c, y, x, a: c.all_to_all_v_single(y, x, [], [], a), LARGE, LARGE),
    "recv": recv,
    "batch_op_issue": send_recv,
}


def run_versions(comm: TorchComm, async_op: bool) -> None:
    for name, op in OPS.items():
        work, written, read = op(comm, async_op)
        work.wait()
        assert all(x._version > 0 for x in written), name
        assert all(x._version == 0 for x in read), name
    comm.barrier(False)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_what_is_written_has_another_version(backend: str, async_op: bool) -> None:
    run_ranks(run_versions, 2, async_op, backend=backend)


def run_autograd(comm: TorchComm) -> None:
    x = torch.rand(4, requires_grad=True)
    y = x * 2
    loss = (y * y).sum()  # saves y
    comm.all_reduce(y.detach(), SUM, False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    parts = torch.rand(2 * comm.get_size(), requires_grad=True)
    z = parts * 2
    loss = (z * z).sum()
    comm.all_gather(list(z.detach().chunk(comm.get_size())), torch.ones(2), True).wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    # Parameters can be broadcast without no_grad(), as in torch.distributed.
    weight = torch.full((3,), float(comm.get_rank()), requires_grad=True)
    comm.broadcast(weight, 1, False)
    assert weight.tolist() == [1.0] * 3
    assert weight.is_leaf
    assert weight.requires_grad
    assert weight._version == (comm.get_rank() == 0)

    with torch.inference_mode():
        free = torch.ones(2)
        comm.all_reduce(free, SUM, False)  # has no version
        assert free.tolist() == [float(comm.get_size())] * 2

    own = torch.rand(3, requires_grad=True)
    kept = own * 1
    loss = (kept * kept).sum()
    with torch.no_grad():
        torch.ops.torch_overlap.all_reduce_(kept, "sum", comm.get_name())
    assert kept._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_a_saved_tensor_that_is_written_is_an_error_in_backward(backend: str) -> None:
    run_ranks(run_autograd, 2, backend=backend)
