"""Works and their events in a profile, compared with gloo's; functions of torch that know its own backends only."""

from __future__ import annotations

import secrets
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile

import torch_overlap as to
from torch_overlap.testing import run_ranks, torch_is_before

CPU = torch.device("cpu")


def init(rank, size, store, backend="torch_overlap", **keywords):
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60), **keywords)


# --- Profiles ------------------------------------------------------------------------------------------------------


def calls(group, rank, size):
    """Runs operations whose events gloo names after themselves."""
    x = torch.ones(4, 2)
    parts = [torch.ones(4, 2) for _ in range(size)]
    dist.all_reduce(x, group=group)
    dist.all_gather(parts, x, group=group)
    dist.broadcast(x, 0, group=group)
    dist.reduce(x, 0, group=group)
    dist.gather(x, parts if rank == 0 else None, group=group)
    dist.scatter(x, parts if rank == 0 else None, group=group)
    dist.all_to_all_single(torch.empty(4), torch.ones(4), group=group)
    dist.all_reduce_coalesced([x, torch.ones(3)], group=group)
    dist.barrier(group=group)
    if rank == 0:
        dist.send(x, 1, group=group)
    elif rank == 1:
        dist.recv(x, 0, group=group)


def events(rank, size, store):
    init(rank, size, store)
    stock = dist.new_group(backend="gloo")
    found = {}
    for library, group in (("torch_overlap", dist.group.WORLD), ("gloo", stock)):
        calls(group, rank, size)
        with profile(record_shapes=True) as profiler:
            calls(group, rank, size)
        found[library] = [
            (event.name.removeprefix(f"{library}:"), event.input_shapes, event.is_async)
            for event in profiler.events()
            if event.name.startswith(f"{library}:")
        ]
        if library == "torch_overlap":
            names = [event.name for event in profiler.events()]
            assert names.count("record_param_comms") == sum(name.startswith("TorchComm::") for name in names) > 9
            shapes = [event.input_shapes for event in profiler.events() if event.name == "TorchComm::all_gather"]
            assert shapes == [[[4, 2]]]
    assert sorted(found["torch_overlap"]) == sorted(found["gloo"])
    assert len(found["gloo"]) == (10 if rank < 2 else 9)


def test_profiles_have_the_events_of_gloo():
    run_ranks(events, 2, comm=False)


# --- Joined works --------------------------------------------------------------------------------------------------


class StoreMail(to.TorchCommBackend):
    """Sends by the store, without tags: torch's tags then have a communicator for each."""

    def init(self, device, name, options):
        self.store = options.store
        self.numbers = {}

    def key(self, source, target):
        number = self.numbers[source, target] = self.numbers.get((source, target), 0) + 1
        return f"mail/{source}/{target}/{number}"

    def send(self, tensor, dst, async_op):
        self.store.set(self.key(self.rank, dst), tensor.numpy().tobytes())

    def recv(self, tensor, src, async_op):
        found = self.store.get(self.key(src, self.rank))
        tensor.copy_(torch.frombuffer(bytearray(found), dtype=tensor.dtype).view_as(tensor))


def joined(rank, size, store):
    to.register_backend("storemail", StoreMail)
    init(rank, size, store, pg_options=to.BackendOptions(backends={"cpu": "storemail"}))
    if rank == 0:
        store.set("seed", str(secrets.randbits(32)))
    random = torch.Generator().manual_seed(int(store.get("seed")))
    sent = torch.randn(size, 4, 3, generator=random)
    peer = 1 - rank
    received = [torch.full((3,), float("nan")) for _ in range(4)]
    ops = []
    for number in range(4):
        tag = number % 3
        ops.append(dist.P2POp(dist.isend, sent[rank, number].clone(), peer, tag=tag))
        ops.append(dist.P2POp(dist.irecv, received[number], peer, tag=tag))
    (work,) = dist.batch_isend_irecv(ops)
    future = work.get_future()
    doubled = future.then(lambda done: [2 * value for value in done.value()])
    outputs = future.wait()
    torch.testing.assert_close(torch.stack(received), sent[peer], rtol=0, atol=0)
    # The outputs of the messages with a tag, which are works of their own.
    pointers = [value.data_ptr() for value in outputs]
    assert [pointers.count(value.data_ptr()) for value in received] == [0, 1, 1, 0]
    assert [value.tolist() for value in doubled.wait()] == [(2 * value).tolist() for value in outputs]
    assert work.get_future().done()
    work.wait()


def test_joined_works_have_a_future():
    run_ranks(joined, 2, comm=False)


# --- Functions that know torch's backends only ---------------------------------------------------------------------


def refused(rank, size, store):
    init(rank, size, store)
    before = dist.group.WORLD._get_backend(CPU).options._timeout
    if torch_is_before("2.15"):
        with pytest.warns(UserWarning, match="Set timeout is now only supported for either nccl or gloo"):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))
        assert dist.group.WORLD._get_backend(CPU).options._timeout == before
        with pytest.raises(ValueError, match="monitored_barrier is only implemented for GLOO backend"):
            dist.monitored_barrier()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=60))
    dist.group.WORLD.set_timeout(timedelta(seconds=5))
    assert dist.group.WORLD._get_backend(CPU).options._timeout == timedelta(seconds=5)


def test_functions_of_torch_that_refuse_other_backends_have_methods_of_the_group():
    run_ranks(refused, 2, comm=False)


def windows(rank, size, store):
    init(rank, size, store)
    backend = dist.group.WORLD._get_backend(CPU)
    assert backend.supports_window is True
    tensor = to.symmetric_empty(4, torch.float32, backend.get_comm()).fill_(-1)
    window = backend.new_window(tensor)
    window.put(torch.full((4,), float(rank)), 1 - rank, 0, False, signal=True)
    window.wait_signal(1 - rank, False)
    assert tensor.tolist() == [1.0 - rank] * 4
    window.tensor_deregister()
    empty = backend.new_window()
    with pytest.raises(RuntimeError):
        empty.get_tensor()
    dist.barrier()


def test_a_group_makes_windows():
    run_ranks(windows, 2, comm=False)
