"""Every collective operator, synchronous and asynchronous: compiled for any number of rows, and under vmap."""

from collections.abc import Callable

import pytest
import torch
import torch._dynamo.config

from torch_overlap import ops
from torch_overlap.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
RING = [(0, 1), (1, 0)]


def halves(x):
    return [x.shape[0] // 2] * 2


# Calls for two ranks; `op` is the operator or its asynchronous form.
CALLS: dict[str, Callable] = {
    "all_reduce": lambda op, x, comm: op(x, comm, "avg"),
    "all_gather": lambda op, x, comm: op(x, comm, -1),
    "reduce_scatter": lambda op, x, comm: op(x, comm, 0),
    "all_to_all": lambda op, x, comm: op(x, comm, 0, 1),
    "all_to_all_v": lambda op, x, comm: op(x, comm, halves(x), halves(x)),
    "broadcast": lambda op, x, comm: op(x, comm, 1),
    "permute": lambda op, x, comm: op(x, comm, RING),
}


def forms(name, comm):
    """Returns the synchronous and the asynchronous form, as functions of a tensor."""
    call, plain, background = CALLS[name], getattr(ops, name), getattr(ops, f"{name}_async")
    return [lambda x: call(plain, x, comm), lambda x: ops.wait_tensor(call(background, x, comm))]


def test_the_table_has_every_collective():
    assert set(CALLS) == {name for name in ops.__all__ if f"{name}_async" in ops.__all__}


def compile_rank(comm, name, seed):
    generator = torch.Generator().manual_seed(seed + comm.get_rank())
    for function in forms(name, comm):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        for rows in (4, 8, 14):
            x = torch.randn(rows, 6, generator=generator, requires_grad=True)
            want, got = function(x), compiled(x)
            torch.testing.assert_close(got, want)
            (want_grad,) = torch.autograd.grad(want.square().sum(), x)
            (grad,) = torch.autograd.grad(got.square().sum(), x)
            torch.testing.assert_close(grad, want_grad)


@pytest.mark.parametrize("name", CALLS)
def test_compiles_whole_for_any_number_of_rows(name, seed):
    run_ranks(compile_rank, 2, name, seed, timeout=240)


def splits_rank(comm, seed):
    """Splits that are read from a tensor: they are known only when the graph runs."""

    def exchange(x, mine, theirs):
        out_splits, in_splits = theirs.tolist(), mine.tolist()
        for split in (*out_splits, *in_splits):
            torch._check(split >= 0)
        return ops.all_to_all_v(x, comm, out_splits, in_splits) * 2

    sends = [[3, 1], [0, 2]]  # rows from rank a to rank b
    rank = comm.get_rank()
    inputs = [torch.randn(sum(rows), 5, generator=torch.Generator().manual_seed(seed + r))
              for r, rows in enumerate(sends)]  # fmt: skip
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(exchange, backend="aot_eager", fullgraph=True)
        got = compiled(inputs[rank], torch.tensor(sends[rank]), torch.tensor([rows[rank] for rows in sends]))
    want = torch.cat([part.split(rows)[rank] for part, rows in zip(inputs, sends, strict=True)]) * 2
    assert torch.equal(got, want)


def test_compiles_with_splits_that_are_data(seed):
    run_ranks(splits_rank, 2, seed, timeout=240)


def vmap_rank(comm, name, seed):
    x = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(seed + comm.get_rank()))
    for function in forms(name, comm):
        for batch_dim in (0, 1, -1):
            want = torch.stack([function(part) for part in x.unbind(batch_dim)])
            torch.testing.assert_close(torch.vmap(function, in_dims=batch_dim)(x), want)


@pytest.mark.parametrize("name", CALLS)
def test_vmap_of_both_forms_equals_a_loop(name, seed):
    run_ranks(vmap_rank, 2, name, seed)


def vmap_messages_rank(comm, seed):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    if comm.get_rank() == 0:
        torch.vmap(lambda part: (ops.send(part, comm, 1), part)[1])(x)
    else:
        out = torch.full((3, 4), float("nan"))
        torch.vmap(lambda part: ops.recv_(part, comm, 0))(out)
        assert torch.equal(out, x)


def test_vmap_of_send_and_recv_moves_the_whole_batch(seed):
    run_ranks(vmap_messages_rank, 2, seed)
