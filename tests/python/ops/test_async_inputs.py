"""The input of an `*_async` operator belongs to the caller again once the result has been waited for, and not
before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torch_overlap as to
from torch_overlap import ops
from torch_overlap.testing import run_ranks

SIZE = 2
CHANGED = r"^wait_tensor: expected the input of {} unchanged until its result is waited for, got one that was changed"


def ring(size: int) -> list[tuple[int, int]]:
    return [(r, (r + 1) % size) for r in range(size)]


# By name: the operator on x [2 * ranks, 4], and its result from all ranks' x.
CASES: dict[str, tuple[Callable[..., Tensor], Callable[[list[Tensor], int], Tensor]]] = {
    "all_reduce_async": (ops.all_reduce_async, lambda xs, r: sum(xs)),
    "all_gather_async": (ops.all_gather_async, lambda xs, r: torch.cat(xs)),
    "all_gather_async along 1": (lambda x, comm: ops.all_gather_async(x, comm, 1), lambda xs, r: torch.cat(xs, 1)),
    "reduce_scatter_async": (ops.reduce_scatter_async, lambda xs, r: sum(xs).chunk(SIZE)[r]),
    "all_to_all_async": (ops.all_to_all_async, lambda xs, r: torch.cat([x.chunk(SIZE)[r] for x in xs])),
    "all_to_all_v_async": (
        lambda x, comm: ops.all_to_all_v_async(x, comm, [2] * SIZE, [2] * SIZE),
        lambda xs, r: torch.cat([x.chunk(SIZE)[r] for x in xs]),
    ),
    "broadcast_async": (lambda x, comm: ops.broadcast_async(x, comm, 1), lambda xs, r: xs[1]),
    "permute_async": (lambda x, comm: ops.permute_async(x, comm, ring(SIZE)), lambda xs, r: xs[r - 1]),
}


def draw(seed: int) -> list[Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(2 * SIZE, 4, generator=gen) for _ in range(SIZE)]


def change(x: Tensor, way: str) -> None:
    {"itself": x, "a view": x.view(-1)[1:], "detached": x.detach()}[way].fill_(-99.0)


def changed_early(comm: to.TorchComm, seed: int) -> None:
    for i, (name, (issue, reference)) in enumerate(CASES.items()):
        for j, way in enumerate(("itself", "a view", "detached")):
            xs = draw(seed + 10 * i + j)
            x, me = xs[comm.get_rank()].clone(), comm.get_rank()
            comm.barrier(async_op=False)
            if me == 1:
                time.sleep(0.02)  # the others issue, and change their inputs, before it has issued
            y = issue(x, comm)
            change(x, way)
            for _ in range(2):  # the result stays invalid
                with pytest.raises(to.StateError, match=CHANGED.format(name.split()[0])):
                    ops.wait_tensor(y.view(-1) if y.is_contiguous() else y)
            fresh = xs[me].clone()  # all ranks still match
            torch.testing.assert_close(ops.wait_tensor(issue(fresh, comm)), reference(xs, me))
            fresh.fill_(0)


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_a_change_before_the_wait_is_an_error_of_every_operator(backend: str, seed: int) -> None:
    run_ranks(changed_early, SIZE, seed, backend=backend)


def changed_late(comm: to.TorchComm, seed: int) -> None:
    me = comm.get_rank()
    for i, (name, (issue, reference)) in enumerate(CASES.items()):
        xs = draw(seed + i)
        x = xs[me].clone()
        y = issue(x, comm)
        ops.wait_tensor(y)
        x.fill_(-99.0)
        torch.testing.assert_close(ops.wait_tensor(y), reference(xs, me), msg=name)  # a second wait is not too early
        # Two operators of one input; and a change of a result that is not waited for.
        x = xs[me].clone()
        first, second = issue(x, comm), issue(x, comm)
        for result in (second, first):
            torch.testing.assert_close(ops.wait_tensor(result), reference(xs, me), msg=name)
        issue(x, comm)
        x.fill_(-99.0)
        comm.barrier(async_op=False)


def test_a_change_after_the_wait_is_none(seed: int) -> None:
    run_ranks(changed_late, SIZE, seed, backend="local")


def changed_after_it_was_done(comm: to.TorchComm) -> None:
    """The change is detected even if the operator was done long before, and other results were made in between."""
    x = torch.ones(4)
    y = ops.all_gather_async(x, comm)
    for _ in range(200):
        ops.wait_tensor(ops.all_reduce_async(torch.ones(2), comm))
    x.add_(1)
    with pytest.raises(to.StateError, match=CHANGED.format("all_gather_async")):
        ops.wait_tensor(y)
    # An operator without elements, or in which a rank has no part, sends nothing; the rule is the same.
    for issue in (lambda x: ops.all_gather_async(x, comm), lambda x: ops.permute_async(x, comm, [])):
        x = torch.empty(0, 3)
        y = issue(x)
        x.fill_(1)
        with pytest.raises(to.StateError, match=CHANGED.format(".*_async")):
            ops.wait_tensor(y)


def other_parts_change(comm: to.TorchComm) -> None:
    """The next chunk of a buffer is filled while the last one is reduced."""
    buffer = torch.ones(4, 8)
    results = []
    for chunk in range(4):
        buffer[chunk].fill_(chunk + 1.0)
        results.append(ops.all_reduce_async(buffer[chunk], comm))
    for chunk, result in enumerate(results):
        torch.testing.assert_close(ops.wait_tensor(result), torch.full((8,), SIZE * (chunk + 1.0)))


def test_other_parts_of_a_buffer_may_change() -> None:
    run_ranks(other_parts_change, SIZE, backend="local")


def test_whether_it_raises_does_not_depend_on_when_the_operation_is_done() -> None:
    run_ranks(changed_after_it_was_done, SIZE, backend="local")
    assert torch.ops.torch_overlap._pending_works() == 0


def in_inference_mode(comm: to.TorchComm, seed: int) -> None:
    """These tensors have no version counter, so the result does not detect their changes."""
    me = comm.get_rank()
    with torch.inference_mode():
        for i, (name, (issue, reference)) in enumerate(CASES.items()):
            xs = draw(seed + i)
            x = xs[me].clone()
            assert x.is_inference()
            comm.barrier(async_op=False)
            if me == 1:
                time.sleep(0.02)
            y = issue(x, comm)
            x.fill_(-99.0)
            torch.testing.assert_close(ops.wait_tensor(y), reference(xs, me), msg=name)


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_inputs_of_inference_mode_are_copied(backend: str, seed: int) -> None:
    run_ranks(in_inference_mode, SIZE, seed, backend=backend)


def with_gradients(comm: to.TorchComm, seed: int) -> None:
    me = comm.get_rank()
    for i, (name, (issue, reference)) in enumerate(CASES.items()):
        xs = draw(seed + i)
        leaf = xs[me].clone().requires_grad_()
        x = leaf * 1
        y = issue(x, comm)
        with torch.no_grad():
            x.fill_(-99.0)
        with pytest.raises(to.StateError, match=CHANGED.format(name.split()[0])):
            ops.wait_tensor(y)
        y = issue(leaf * 1, comm)
        torch.testing.assert_close(ops.wait_tensor(y), reference(xs, me), msg=name)


def test_inputs_with_gradients(seed: int) -> None:
    run_ranks(with_gradients, SIZE, seed, backend="local")


def waited_by_threads(comm: to.TorchComm) -> None:
    """A caller that has waited may change the input, while others still wait for the same result."""
    for _ in range(20):
        x = torch.ones(1000)
        y = ops.all_reduce_async(x, comm)
        failed: list[Exception] = []

        def wait(x: Tensor = x, y: Tensor = y, failed: list[Exception] = failed) -> None:
            try:
                ops.wait_tensor(y)
                x.add_(1)
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        assert torch.equal(y, torch.full((1000,), 2.0))


def test_threads_that_still_wait_take_no_change_for_an_early_one() -> None:
    run_ranks(waited_by_threads, SIZE, backend="local")


def compiled(comm: to.TorchComm, seed: int) -> None:
    xs, me = draw(seed), comm.get_rank()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        y = ops.all_gather_async(x, comm)
        x.add_(1)
        return ops.wait_tensor(y)

    torch.testing.assert_close(step(xs[me].clone()), torch.cat(xs))


def test_a_compiled_function_orders_the_change_behind_the_operation(seed: int) -> None:
    run_ranks(compiled, SIZE, seed, backend="gloo", timeout=280)  # a compiler's state belongs to its process
