"""Every torch.distributed collective over the backend "torch_overlap", by value, on CPU ranks."""

from __future__ import annotations

import secrets
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import torch_overlap
from torch_overlap.testing import run_ranks

SIZES = [2, 3]
POISON = float("nan")


GENERATOR = torch.Generator()


def init(rank, size, store, backend="torch_overlap", seconds=60, **kwargs):
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds), **kwargs
    )
    # Random numbers that are new in every run and the same on all ranks.
    if rank == 0:
        store.set("seed", str(secrets.randbits(32)))
    GENERATOR.manual_seed(int(store.get("seed")))


def inputs_of_all_ranks(size, *shape, dtype=torch.float32):
    """Returns the inputs of all ranks, the same on every rank: all draw the same numbers in the same order."""
    if dtype.is_floating_point:
        return [torch.randn(shape, generator=GENERATOR).to(dtype) for _ in range(size)]
    return [torch.randint(0, 100, shape, generator=GENERATOR).to(dtype) for _ in range(size)]


def poisoned(*shape):
    return torch.full(shape, POISON)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def near(actual, expected):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-6, atol=1e-6)


def run_op(async_op, function, *args, **kwargs):
    work = function(*args, async_op=async_op, **kwargs)
    if async_op:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
    return work


# --- Collectives ---------------------------------------------------------------------------------------------------


def collectives(rank, size, store, async_op):
    init(rank, size, store)
    mine = inputs_of_all_ranks(size, 5, 3)
    total = sum(t.double() for t in mine)

    for root in range(size):
        x = mine[rank].clone()
        run_op(async_op, dist.broadcast, x, src=root)
        same(x, mine[root])

        x = mine[rank].clone()
        run_op(async_op, dist.reduce, x, dst=root)
        near(x, total) if rank == root else same(x, mine[rank])

        outputs = [poisoned(5, 3) for _ in range(size)] if rank == root else None
        run_op(async_op, dist.gather, mine[rank], outputs, dst=root)
        for r in range(size if rank == root else 0):
            same(outputs[r], mine[r])

        parts = inputs_of_all_ranks(size, 4, 2)
        output = poisoned(4, 2)
        run_op(async_op, dist.scatter, output, parts if rank == root else None, src=root)
        same(output, parts[rank])

    outputs = [poisoned(5, 3) for _ in range(size)]
    run_op(async_op, dist.all_gather, outputs, mine[rank])
    for r in range(size):
        same(outputs[r], mine[r])

    output = poisoned(size * 5, 3)
    run_op(async_op, dist.all_gather_into_tensor, output, mine[rank])
    same(output, torch.cat(mine))

    # blocks[r] are the inputs of rank r for each rank.
    blocks = [inputs_of_all_ranks(size, 2, 3 + r) for r in range(size)]
    square = [inputs_of_all_ranks(size, 2, 7) for _ in range(size)]
    reduced = sum(square[r][rank].double() * (r + 1) for r in range(size))
    output = poisoned(2, 7)
    run_op(async_op, dist.reduce_scatter, output, [(rank + 1) * t for t in square[rank]])
    near(output, reduced)
    output = poisoned(2, 7)
    run_op(async_op, dist.reduce_scatter_tensor, output, (rank + 1) * torch.cat(square[rank]))
    near(output, reduced)

    outputs = [poisoned(2, 3 + r) for r in range(size)]
    run_op(async_op, dist.all_to_all, outputs, [t.clone() for t in blocks[rank]])
    for r in range(size):
        same(outputs[r], blocks[r][rank])

    source = inputs_of_all_ranks(size, size * 2, 3)
    output = poisoned(size * 2, 3)
    run_op(async_op, dist.all_to_all_single, output, source[rank])
    same(output, torch.cat([source[r][2 * rank : 2 * rank + 2] for r in range(size)]))

    # Rank r sends r + s rows to rank s.
    rows = [sum(r + s for s in range(size)) for r in range(size)]
    source = [inputs_of_all_ranks(size, max(rows), 3)[r][: rows[r]] for r in range(size)]
    splits = [rank + s for s in range(size)]
    output = poisoned(sum(splits), 3)
    run_op(async_op, dist.all_to_all_single, output, source[rank].clone(), splits, splits)
    same(output, torch.cat([source[r].split([r + s for s in range(size)])[rank] for r in range(size)]))

    run_op(async_op, dist.barrier)
    return dist.get_backend()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_collectives_match_the_reference(size, async_op):
    assert run_ranks(collectives, size, async_op, comm=False) == ["torch_overlap"] * size


def reductions(rank, size, store):
    init(rank, size, store)
    floats = inputs_of_all_ranks(size, 17)
    integers = inputs_of_all_ranks(size, 17, dtype=torch.int32)
    stack = torch.stack(floats).double()
    table = [
        (dist.ReduceOp.SUM, floats, stack.sum(0)),
        (dist.ReduceOp.AVG, floats, stack.mean(0)),
        (dist.ReduceOp.PRODUCT, floats, stack.prod(0)),
        (dist.ReduceOp.MIN, floats, stack.min(0).values),
        (dist.ReduceOp.MAX, floats, stack.max(0).values),
        (dist.ReduceOp.BAND, integers, None),
        (dist.ReduceOp.BOR, integers, None),
        (dist.ReduceOp.BXOR, integers, None),
    ]
    bitwise = {
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }
    for op, tensors, expected in table:
        x = tensors[rank].clone()
        dist.all_reduce(x, op)
        if op in bitwise:
            expected = integers[0]
            for other in integers[1:]:
                expected = bitwise[op](expected, other)
            same(x, expected)
        else:
            near(x, expected)

    x = floats[rank].clone()
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5 + rank))
    near(x, sum(f.double() * (0.5 + r) for r, f in enumerate(floats)))
    x = floats[rank].clone()
    dist.all_reduce(x, dist._make_nccl_premul_sum(torch.tensor([2.0 + rank])))
    near(x, sum(f.double() * (2.0 + r) for r, f in enumerate(floats)))

    half = inputs_of_all_ranks(size, 65, dtype=torch.bfloat16)
    x = half[rank].clone()
    dist.all_reduce(x)
    same(x, sum(h.float() for h in half).bfloat16())

    complex_in = [torch.complex(f, f.flip(0)) for f in floats]
    x = complex_in[rank].clone()
    dist.all_reduce(x)
    torch.testing.assert_close(x, sum(complex_in))

    dense = torch.zeros(6, 2)
    dense[rank] = 1.5 + rank
    sparse = dense.to_sparse()
    dist.all_reduce(sparse)
    expected = torch.zeros(6, 2)
    for r in range(size):
        expected[r] = 1.5 + r
    same(sparse.to_dense(), expected)


@pytest.mark.parametrize("size", SIZES)
def test_reductions_match_the_reference(size):
    run_ranks(reductions, size, comm=False)


def unusual_tensors(rank, size, store):
    init(rank, size, store)
    # In place: dense in any order of dimensions.
    last = [t.to(memory_format=torch.channels_last) for t in inputs_of_all_ranks(size, 2, 3, 4, 5)]
    x = last[rank].clone(memory_format=torch.preserve_format)
    assert not x.is_contiguous()
    dist.all_reduce(x)
    near(x, sum(t.double() for t in last))
    x = last[rank].clone(memory_format=torch.preserve_format).requires_grad_()
    dist.broadcast(x, src=size - 1)
    same(x.detach(), last[size - 1])

    # Read-only inputs are copied.
    wide = inputs_of_all_ranks(size, 6, 4)
    outputs = [poisoned(4, 6) for _ in range(size)]
    dist.all_gather(outputs, wide[rank].t())
    for r in range(size):
        same(outputs[r], wide[r].t())
    output = poisoned(size * 4, 6)
    dist.all_gather_into_tensor(output, wide[rank].t())
    same(output, torch.cat([w.t() for w in wide]))

    # Outputs that share memory: the data of the last rank remains, whether the operation is done at the return or not.
    for async_op in (False, True):
        shared = poisoned(6, 4)
        work = dist.all_gather([shared] * size, wide[rank], async_op=async_op)
        if async_op:
            work.wait()
        same(shared, wide[size - 1])

    # Sizes differ by rank.
    ragged = [torch.arange(3.0 * (r + 1)) + r for r in range(size)]
    outputs = [poisoned(3 * (r + 1)) for r in range(size)]
    dist.all_gather(outputs, ragged[rank])
    for r in range(size):
        same(outputs[r], ragged[r])

    # No elements.
    empty = torch.empty(0)
    dist.all_reduce(empty)
    dist.broadcast(empty, src=0)


@pytest.mark.parametrize("size", SIZES)
def test_layouts_shared_outputs_and_sizes(size):
    run_ranks(unusual_tensors, size, comm=False)


def objects(rank, size, store):
    init(rank, size, store)
    mine = {"rank": rank, "list": list(range(rank + 1))}
    everybody = [{"rank": r, "list": list(range(r + 1))} for r in range(size)]
    gathered = [None] * size
    dist.all_gather_object(gathered, mine)
    assert gathered == everybody
    gathered = [None] * size if rank == 1 else None
    dist.gather_object(mine, gathered, dst=1)
    assert rank != 1 or gathered == everybody
    told = [mine, "x" * (rank + 1)]
    dist.broadcast_object_list(told, src=1)
    assert told == [everybody[1], "xx"]
    one = [None]
    dist.scatter_object_list(one, everybody if rank == 0 else None, src=0)
    assert one == [mine]
    if rank == 0:
        dist.send_object_list([mine, 7], dst=1)
    elif rank == 1:
        got = [None, None]
        assert dist.recv_object_list(got, src=0) == 0
        assert got == [everybody[0], 7]


@pytest.mark.parametrize("size", SIZES)
def test_object_collectives(size):
    run_ranks(objects, size, comm=False)


# --- Point to point, batches, coalescing ---------------------------------------------------------------------------


def point_to_point(rank, size, store):
    init(rank, size, store)
    right, left = (rank + 1) % size, (rank - 1) % size
    mine = inputs_of_all_ranks(size, 9)

    # Both directions at once, without a batch: an isend does not block.
    output = poisoned(9)
    works = [dist.isend(mine[rank], right), dist.irecv(output, left)]
    for work in works:
        work.wait()
    same(output, mine[left])
    assert works[1]._source_rank() == left

    # Messages between two ranks match in the order of issue.
    if rank == 0:
        for i in range(4):
            dist.send(torch.full((3,), float(i)), 1)
    elif rank == 1:
        for i in range(4):
            x = poisoned(3)
            assert dist.recv(x, 0) == 0
            same(x, torch.full((3,), float(i)))

    # A ring as one batch, and sends and receives of several peers in an order that would deadlock one by one.
    output = poisoned(9)
    ops = [dist.P2POp(dist.isend, mine[rank], right), dist.P2POp(dist.irecv, output, left)]
    works = dist.batch_isend_irecv(ops)
    assert len(works) == 1
    works[0].wait()
    same(output, mine[left])

    outputs = [poisoned(9) for _ in range(size)]
    ops = [dist.P2POp(dist.irecv, outputs[r], r) for r in range(size) if r != rank]
    ops += [dist.P2POp(dist.isend, mine[rank], r) for r in reversed(range(size)) if r != rank]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for r in range(size):
        if r != rank:
            same(outputs[r], mine[r])
    dist.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_point_to_point_and_batches(size):
    run_ranks(point_to_point, size, comm=False)


def coalescing(rank, size, store):
    init(rank, size, store)
    group = dist.group.WORLD
    many = [inputs_of_all_ranks(size, 3 + i) for i in range(4)]
    sums = [sum(t.double() for t in tensors) for tensors in many]

    for async_ops in (False, True):
        xs = [tensors[rank].clone() for tensors in many]
        with dist._coalescing_manager(group, async_ops=async_ops) as manager:
            for x in xs:
                dist.all_reduce(x)
        if async_ops:
            manager.wait()
        for x, expected in zip(xs, sums, strict=True):
            near(x, expected)

        gathered = [poisoned(size * (3 + i)) for i in range(4)]
        with dist._coalescing_manager(group, async_ops=async_ops) as manager:
            for output, tensors in zip(gathered, many, strict=True):
                dist.all_gather_into_tensor(output, tensors[rank])
        if async_ops:
            manager.wait()
        for output, tensors in zip(gathered, many, strict=True):
            same(output, torch.cat(tensors))

        parts = [inputs_of_all_ranks(size, size * (2 + i)) for i in range(3)]
        scattered = [poisoned(2 + i) for i in range(3)]
        with dist._coalescing_manager(group, async_ops=async_ops) as manager:
            for output, tensors in zip(scattered, parts, strict=True):
                dist.reduce_scatter_tensor(output, tensors[rank])
        if async_ops:
            manager.wait()
        for output, tensors in zip(scattered, parts, strict=True):
            near(output, sum(t.double() for t in tensors).chunk(size)[rank])

    # With a device: collectives and messages are in one block, and all are complete when its work is.
    x, y = many[0][rank].clone(), many[1][rank].clone()
    received = poisoned(3)
    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(x, src=0)
        dist.isend(many[0][rank], (rank + 1) % size)
        dist.irecv(received, (rank - 1) % size)
        dist.broadcast(y, src=size - 1)
    assert len(manager.works) == 1
    manager.wait()
    same(x, many[0][0])
    same(y, many[1][size - 1])
    same(received, many[0][(rank - 1) % size])

    xs = [tensors[rank].clone() for tensors in many]
    dist.all_reduce_coalesced(xs)
    for x, expected in zip(xs, sums, strict=True):
        near(x, expected)


@pytest.mark.parametrize("size", SIZES)
def test_coalescing(size):
    run_ranks(coalescing, size, comm=False)


def coalesced_epilogue(rank, size, store):
    """Outputs that share memory are copied from staging tensors when the single work is waited for."""
    init(rank, size, store)
    group, cpu = dist.group.WORLD, torch.device("cpu")
    mine = inputs_of_all_ranks(size, 5)
    for finish in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        first, second = poisoned(5), poisoned(5)
        with dist._coalescing_manager(group, cpu, async_ops=True) as manager:
            dist.all_gather([first] * size, mine[rank], async_op=True)
            dist.all_gather([second] * size, mine[rank] + 1, async_op=True)
        assert len(manager.works) == 1
        finish(manager.works[0])
        same(first, mine[-1])
        same(second, mine[-1] + 1)
        assert manager.works[0].is_completed()


def test_a_coalesced_work_finishes_every_output():
    run_ranks(coalesced_epilogue, 2, comm=False)


def failed_coalescing(rank, size, store):
    init(rank, size, store)
    group, cpu = dist.group.WORLD, torch.device("cpu")
    mine = inputs_of_all_ranks(size, 6)
    peer = 1 - rank

    def fail_halfway():
        with dist._coalescing_manager(group, cpu, async_ops=True):
            dist.isend(mine[rank] + 100, peer)
            dist.all_gather([poisoned(5) for _ in range(size)], mine[rank])

    with pytest.raises(RuntimeError, match=r"all_gather: expected tensor_list\[0\] of 6 elements"):
        fail_halfway()
    # Removes the state that the manager itself leaves when its body raises.
    dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)

    received = poisoned(6)
    works = [dist.isend(mine[rank], peer), dist.irecv(received, peer)]
    for work in works:
        work.wait()
    same(received, mine[peer])
    x = mine[rank].clone()
    dist.all_reduce(x)
    near(x, sum(t.double() for t in mine))

    y = mine[rank].clone()
    with dist._coalescing_manager(group, cpu, async_ops=True) as manager:
        dist.broadcast(y, src=1)
    manager.wait()
    same(y, mine[1])


def test_an_error_ends_the_coalescing():
    run_ranks(failed_coalescing, 2, comm=False)


# --- Works ---------------------------------------------------------------------------------------------------------


def works(rank, size, store):
    init(rank, size, store)
    group = dist.group.WORLD
    mine = inputs_of_all_ranks(size, 11)
    expected = sum(t.double() for t in mine)

    x = mine[rank].clone()
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    near(doubled.wait(), 2 * expected)
    assert future.done()
    near(future.wait()[0], expected)
    assert work.result()[0].data_ptr() == x.data_ptr()
    assert work.get_future_result().wait() == 0
    # The future of a completed operation is complete; the outputs live as long as it does.
    assert work.get_future().done()

    works = [dist.all_reduce(mine[rank].clone(), async_op=True) for _ in range(20)]
    for work in works:
        assert work.wait(timedelta(seconds=60))
    assert all(work.is_completed() for work in works)

    # Only the operation holds the tensors.
    futures = []
    for _ in range(5):
        output = [poisoned(11) for _ in range(size)]
        futures.append(dist.all_gather(output, mine[rank].clone(), async_op=True).get_future())
        del output
    for future in futures:
        for r, t in enumerate(future.wait()):
            same(t, mine[r])

    # A staged operation completes with its copies, through the future as well.
    shared = poisoned(11)
    dist.all_gather([shared] * size, mine[rank], async_op=True).get_future().wait()
    same(shared, mine[size - 1])
    assert group._get_backend(torch.device("cpu")).name() == "torch_overlap"


def test_works_and_futures():
    run_ranks(works, 2, comm=False)


def late_rank(rank, size, store):
    """Rank 1 never calls: rank 0's work raises an error that names it, and the group can still be destroyed."""
    options = torch_overlap.BackendOptions(abort_process_on_timeout_or_error=False)
    init(rank, size, store, pg_options=options)
    if rank == 1:
        store.wait(["rank 0 is done"], timedelta(seconds=60))
        dist.destroy_process_group()
        return
    dist.group.WORLD.set_timeout(timedelta(seconds=3))
    work = dist.all_reduce(torch.ones(4), async_op=True)
    assert not work.is_completed()
    with pytest.raises(RuntimeError):
        work.wait(timedelta(milliseconds=200))
    with pytest.raises(RuntimeError, match="all_reduce"):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert work.get_future_result().wait() != 0
    with pytest.raises(RuntimeError):
        work.get_future().wait()
    store.set("rank 0 is done", "1")
    dist.destroy_process_group()
    assert not dist.is_initialized()


def test_a_missing_rank_is_an_error_on_the_others():
    run_ranks(late_rank, 2, comm=False)


def bad_arguments(rank, size, store):
    init(rank, size, store)
    with pytest.raises(RuntimeError, match="all_gather"):
        dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"dtype|float"):
        dist.all_gather_into_tensor(torch.zeros(2 * size, dtype=torch.float64), torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"BAND"):
        dist.all_reduce(torch.zeros(2), dist.ReduceOp.BAND)
    with pytest.raises((RuntimeError, TypeError), match="BackendOptions"):
        dist.new_group(pg_options=dist.ProcessGroupGloo._Options())
    # Nothing was sent, so the group remains usable.
    x = torch.ones(2)
    dist.all_reduce(x)
    same(x, torch.full((2,), float(size)))


def test_bad_arguments_raise_on_every_rank_and_leave_the_group_usable():
    run_ranks(bad_arguments, 2, comm=False)


def functional_errors(rank, size, store):
    options = torch_overlap.BackendOptions(abort_process_on_timeout_or_error=False)
    init(rank, size, store, pg_options=options)
    with pytest.raises(torch_overlap.InvalidTypeError, match="BAND"):
        functional.all_reduce(torch.zeros(2), "band", dist.group.WORLD)
    if rank == 0:
        dist.group.WORLD.set_timeout(timedelta(seconds=1))
        with pytest.raises(torch_overlap.OperationTimeoutError, match="all_reduce"):
            functional.wait_tensor(functional.all_reduce(torch.zeros(2), "sum", dist.group.WORLD))
        store.set("rank 0 is done", "1")
    store.wait(["rank 0 is done"], timedelta(seconds=60))
    dist.destroy_process_group()


def test_errors_of_functional_collectives_keep_their_class():
    run_ranks(functional_errors, 2, comm=False)
