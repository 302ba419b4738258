"""Process groups of the backend "torch_overlap": creation, mixed backends, splits, timeouts, barriers, destruction."""

from __future__ import annotations

import copy
import textwrap
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launcher import run_code

import torch_overlap
from torch_overlap.testing import run_ranks


def init(rank, size, store, backend="torch_overlap", seconds=60, **kwargs):
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds), **kwargs
    )


def sum_of_ranks(group=None):
    x = torch.full((5,), float(dist.get_rank()) + 1)
    dist.all_reduce(x, group=group)
    assert torch.equal(x, x[:1].expand(5))
    return x[0].item()


# --- The communicator of a group ------------------------------------------------------------------------------------


def communicators(rank, size, store):
    with pytest.raises(torch_overlap.InvalidTypeError, match=r"got none: torch.distributed is not initialized"):
        torch_overlap.comm_from_group()
    init(rank, size, store)
    comm = torch_overlap.comm_from_group()
    assert (comm.get_rank(), comm.get_size(), comm.get_device().type) == (rank, size, "cpu")
    assert torch_overlap.comm_from_group(dist.group.WORLD, "cpu") is comm
    x = torch.full((3,), rank + 1.0)
    comm.all_reduce(x, torch_overlap.ReduceOp.SUM, async_op=False)
    assert x.tolist() == [size * (size + 1) / 2] * 3
    half = dist.new_group([0])
    if rank == 0:
        assert torch_overlap.comm_from_group(half).get_size() == 1
    else:
        with pytest.raises(torch_overlap.InvalidTypeError, match="expected a process group, got"):
            torch_overlap.comm_from_group(half)
    other = dist.new_group(backend="gloo")
    message = r"expected a group of backend 'torch_overlap' for cuda or cpu, got 'gloo'; call init_process_group"
    with pytest.raises(torch_overlap.InvalidValueError, match=message):
        torch_overlap.comm_from_group(other)
    with pytest.raises(torch_overlap.InvalidTypeError, match="expected a process group, got 'tp'"):
        torch_overlap.comm_from_group("tp")
    dist.barrier(other)
    dist.destroy_process_group()


def test_the_communicator_of_a_group():
    run_ranks(communicators, 2, comm=False)


# --- Groups --------------------------------------------------------------------------------------------------------


def subgroups(rank, size, store):
    init(rank, size, store)
    assert sum_of_ranks() == 10
    evens = dist.new_group([0, 2])
    odds = dist.new_group([1, 3])
    mine = odds if rank % 2 else evens
    assert sum_of_ranks(mine) == (6 if rank % 2 else 4)
    assert dist.get_rank(mine) == rank // 2
    everybody = dist.new_group()
    assert sum_of_ranks(everybody) == 10
    local, _ = dist.new_subgroups(2)
    assert sum_of_ranks(local) == (3 if rank < 2 else 7)
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert sum_of_ranks(alone) == rank + 1
    dist.destroy_process_group(mine)
    assert sum_of_ranks() == 10


def test_new_group_and_subgroups():
    run_ranks(subgroups, 4, comm=False)


def split(rank, size, store):
    init(rank, size, store, "cpu:torch_overlap,cuda:torch_overlap")
    parent = dist.group.WORLD
    half = parent.split_group([0, 2] if rank % 2 == 0 else [1, 3], timeout=timedelta(seconds=47), group_name="half")
    assert (half.rank(), half.size()) == (rank // 2, 2)
    x = torch.tensor([float(rank)])
    half.allreduce([x]).wait()
    assert x.item() == (2.0 if rank % 2 == 0 else 4.0)
    backend = half._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=47)
    # Device types of one backend share one object, and the names of the parent's groups do not change.
    assert (
        half._get_backend(torch.device("cuda")).get_comm(torch.device("cpu")).get_name()
        == backend.get_comm(torch.device("cpu")).get_name()
    )
    quarter = half.split_group([half.rank()], group_name=f"quarter{rank}")
    assert quarter.size() == 1
    half.barrier().wait()
    for group in (quarter, half):
        group.shutdown()
    assert sum_of_ranks() == 10


def test_split_group():
    run_ranks(split, 4, comm=False)


def mixed(rank, size, store, backend, config):
    init(rank, size, store, backend)
    assert dist.get_backend_config() == config
    assert sum_of_ranks() == 3
    group = dist.new_group(backend="gloo")
    assert sum_of_ranks(group) == 3
    ours = dist.new_group(backend="torch_overlap")
    assert sum_of_ranks(ours) == 3
    assert dist.get_backend(ours) == "torch_overlap"


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        ("cpu:torch_overlap", "cpu:torch_overlap"),
        ("cpu:torch_overlap,cuda:torch_overlap", "cpu:torch_overlap,cuda:torch_overlap"),
        ("cpu:gloo,cuda:torch_overlap", "cpu:gloo,cuda:torch_overlap"),
        ("cpu:torch_overlap,cuda:gloo", "cpu:torch_overlap,cuda:gloo"),
        ("gloo", "cpu:gloo,cuda:gloo"),
    ],
)
def test_device_strings_mix_with_stock_backends(backend, config):
    run_ranks(mixed, 2, backend, config, comm=False)


def options(rank, size, store):
    given = torch_overlap.BackendOptions(backends={"cpu": "gloo"}, abort_process_on_timeout_or_error=False)
    init(rank, size, store, seconds=57, pg_options=given)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options.backend == "torch_overlap"
    assert backend.options._timeout == timedelta(seconds=57)
    assert copy.deepcopy(backend.options).backends == {"cpu": "gloo"}
    comm = backend.get_comm()
    assert comm.get_options().timeout == timedelta(seconds=57)
    assert comm.get_options().abort_process_on_timeout_or_error is False
    assert (comm.get_rank(), comm.get_size(), comm.get_backend()) == (rank, size, "gloo")
    assert backend.supports_splitting
    assert backend.supports_coalescing
    with pytest.raises(RuntimeError, match="cuda"):
        backend.get_comm(torch.device("cuda", 0))
    assert sum_of_ranks() == 3


def test_options_reach_the_communicator():
    run_ranks(options, 2, comm=False)


# --- Barriers and timeouts -----------------------------------------------------------------------------------------


def stragglers(rank, size, store, absent, wait_all_ranks):
    init(rank, size, store)
    group = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=60), wait_all_ranks)
    message = None
    # Rank 0 decides, and starts last; without it, each rank decides for itself.
    decides = rank == 0 or 0 in absent
    if rank not in absent:
        if rank == 0:
            store.wait([f"begins/{r}" for r in range(1, size) if r not in absent])
        store.set(f"begins/{rank}", "")
        with pytest.raises(RuntimeError) as caught:
            group.monitored_barrier(timedelta(seconds=2 if decides else 60), wait_all_ranks)
        message = str(caught.value)
        assert isinstance(caught.value, TimeoutError)
    # The communicator itself is not affected, and a rank that is late gets the error at once.
    assert sum_of_ranks() == sum(range(1, size + 1))
    if rank in absent:
        with pytest.raises(RuntimeError):
            group.monitored_barrier(timedelta(seconds=60), wait_all_ranks)
    group.monitored_barrier(timedelta(seconds=60), wait_all_ranks)
    return message


@pytest.mark.parametrize(
    ("absent", "wait_all_ranks", "expected"),
    [
        ((1,), False, "Rank 1"),
        ((1, 2), False, "Rank 1"),
        ((1, 2), True, "Ranks 1, 2"),
        ((0,), True, "Rank 0"),
    ],
)
def test_monitored_barrier_names_stragglers_on_every_rank(absent, wait_all_ranks, expected):
    messages = run_ranks(stragglers, 4, absent, wait_all_ranks, comm=False)
    for rank, message in enumerate(messages):
        if rank in absent:
            assert message is None
        else:
            milliseconds = 2000 if rank == 0 or 0 in absent else 60000
            assert f"{expected} failed to pass monitoredBarrier in {milliseconds} ms" in message


def barriers(rank, size, store):
    init(rank, size, store)
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(5):
        dist.group.WORLD.monitored_barrier(timedelta(seconds=60))
    dist.barrier()
    assert store.num_keys() == before
    dist.barrier()  # the first ranks to finish make keys of their own


def test_monitored_barriers_leave_no_keys_in_the_store():
    run_ranks(barriers, 3, comm=False)


def short_timeout(rank, size, store):
    init(rank, size, store, pg_options=torch_overlap.BackendOptions(abort_process_on_timeout_or_error=False))
    group = dist.group.WORLD
    assert sum_of_ranks() == 3
    group.set_timeout(timedelta(milliseconds=500))
    if rank == 0:
        with pytest.raises(RuntimeError, match="barrier"):
            dist.barrier()
        store.set("over", "1")
    else:
        store.wait(["over"], timedelta(seconds=60))
    group.abort()


def test_set_timeout_bounds_the_next_operation():
    run_ranks(short_timeout, 2, comm=False)


# --- Ending --------------------------------------------------------------------------------------------------------


def ending(rank, size, store):
    for round_ in range(3):
        init(rank, size, dist.PrefixStore(str(round_), store))
        group = dist.group.WORLD
        assert sum_of_ranks() == 3
        comm = group._get_backend(torch.device("cpu")).get_comm()
        if round_ == 1:
            group.shutdown()
            with pytest.raises(RuntimeError, match="finalized"):
                dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        assert comm.is_finalized()
        group.shutdown()
        group.abort()
    init(rank, size, dist.PrefixStore("abort", store))
    group = dist.group.WORLD
    group.abort()
    with pytest.raises(RuntimeError, match="abort"):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def test_destroy_shutdown_and_abort_are_idempotent():
    run_ranks(ending, 2, comm=False)


def pending_at_the_end(rank, size, store):
    """Works and futures outlive their group."""
    init(rank, size, store)
    outputs = [torch.full((3,), float("nan")) for _ in range(size)]
    work = dist.all_gather(outputs, torch.full((3,), float(rank)), async_op=True)
    future = work.get_future()
    dist.destroy_process_group()
    work.wait()
    assert [t.tolist() for t in future.wait()] == [[float(r)] * 3 for r in range(size)]


def test_destroy_waits_for_pending_operations():
    run_ranks(pending_at_the_end, 2, comm=False)


# --- Over an existing communicator ---------------------------------------------------------------------------------


def wrapper(comm):
    backend = torch_overlap._BackendWrapper(comm)
    assert (backend.rank(), backend.size(), backend.name()) == (comm.get_rank(), comm.get_size(), "torch_overlap")
    assert backend.get_comm() is comm
    assert backend.options._timeout == comm.get_options().timeout
    x = torch.full((4,), comm.get_rank() + 1.0)
    backend.allreduce([x]).wait()
    assert x.tolist() == [3.0] * 4
    # The same communicator, in the same order.
    work = comm.all_reduce(x, torch_overlap.ReduceOp.SUM, async_op=True)
    backend.allreduce([x]).wait()
    work.wait()
    assert x.tolist() == [12.0] * 4
    backend.monitored_barrier(timedelta(seconds=60))
    with pytest.raises(TypeError):
        torch_overlap._BackendWrapper(None)
    backend.shutdown()
    backend.shutdown()
    assert comm.is_finalized()


def test_wrapper_over_a_communicator():
    run_ranks(wrapper, 2)


def test_the_interpreter_ends_although_groups_live():
    code = """
        import torch, torch.distributed as dist, torch_overlap
        dist.init_process_group("torch_overlap", store=dist.HashStore(), rank=0, world_size=1)
        groups = [dist.group.WORLD, dist.new_group([0]), dist.group.WORLD.split_group([0], group_name="part")]
        for group in groups:
            comm = group._get_backend(torch.device("cpu")).get_comm()
            comm.register_abort_hook(lambda name=comm.get_name(): print("aborted", name))
            work = comm.all_reduce(torch.ones(1000), torch_overlap.ReduceOp.SUM, async_op=True)
            print("made", comm.get_name())
    """
    done = run_code(textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    words = [line.split() for line in done.stdout.splitlines()]
    made, aborted = (sorted(name for what, name in words if what == which) for which in ("made", "aborted"))
    assert len(made) == 3
    assert aborted == made
    assert "of process groups destroy_process_group()" in done.stderr
    assert all(f"'{name}'" in done.stderr for name in made)


def looks_once(rank, size, store):
    init(rank, size, store)
    if rank == 0:
        with pytest.raises(
            RuntimeError, match=r"Rank 0 timed out in monitoredBarrier.* Rank 1 failed to pass .* in 0 ms"
        ):
            dist.group.WORLD.monitored_barrier(timedelta(seconds=0))
        store.set("looked", "1")
    else:
        store.wait(["looked"], timedelta(seconds=60))


def test_a_monitored_barrier_with_timeout_zero_looks_once():
    run_ranks(looks_once, 2, comm=False)
