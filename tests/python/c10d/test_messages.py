"""Sends and receives of torch.distributed: tags, receives from any rank, any order of issue."""

from __future__ import annotations

import random
import secrets
import threading
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import torch_overlap as to
from torch_overlap.testing import run_ranks


def init(rank, size, store, seconds=60):
    dist.init_process_group(
        "torch_overlap", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )


def value(src, dst, tag, number):
    return torch.full((3,), 1000.0 * src + 100 * dst + 10 * tag + number)


def tags(rank, size, store, seed):
    init(rank, size, store)
    # Every rank sends `count` messages of each tag to each other rank, and issues all of them in an order of its own.
    count, tag_numbers = 3, [0, 1, 2, 2**31 - 1]
    rng = random.Random(seed + rank)
    halves = [(kind, peer, tag) for kind in ("send", "recv") for peer in range(size) if peer != rank
              for tag in tag_numbers]  # fmt: skip
    halves = [half for half in halves for _ in range(count)]
    rng.shuffle(halves)
    numbers = dict.fromkeys(halves, 0)
    works, received = [], []
    for half in halves:
        kind, peer, tag = half
        number, numbers[half] = numbers[half], numbers[half] + 1
        if kind == "send":
            works.append(dist.isend(value(rank, peer, tag % 7, number), peer, tag=tag))
        else:
            buffer = torch.empty(3)
            works.append(dist.irecv(buffer, peer, tag=tag))
            received.append((buffer, value(peer, rank, tag % 7, number)))
    rng.shuffle(works)
    for work in works:
        work.wait()
    for buffer, expected in received:
        torch.testing.assert_close(buffer, expected, rtol=0, atol=0)

    # Blocking calls and a batch, in another order than the peer's.
    peer = 1 - rank
    if rank == 0:
        sent = [dist.isend(value(0, 1, tag, 0), peer, tag=tag) for tag in (1, 2)]
        for work in sent:
            work.wait()
    elif rank == 1:
        for tag in (2, 1):
            buffer = torch.empty(3)
            assert dist.recv(buffer, peer, tag=tag) == 0
            torch.testing.assert_close(buffer, value(0, 1, tag, 0))
    if rank < 2:
        order = [5, 6] if rank == 0 else [6, 5]
        buffers = {tag: torch.empty(3) for tag in order}
        ops = [dist.P2POp(dist.isend, value(rank, peer, tag, 1), peer, tag=tag) for tag in reversed(order)]
        ops += [dist.P2POp(dist.irecv, buffers[tag], peer, tag=tag) for tag in order]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for tag, buffer in buffers.items():
            torch.testing.assert_close(buffer, value(peer, rank, tag, 1))
    # Sizes and tags do not mix: 8 bytes under tag 0 together with 4 bytes under tag 4, and similar pairs.
    for i, tag in enumerate((4, 12, 28, 252)):
        small, large = torch.full((1 + i,), 1.0 + rank), torch.full((2 + i + tag // 4,), 5.0 + rank)
        if rank == 0:
            works = [dist.isend(small, 1, tag=tag), dist.isend(large, 1, tag=0)]
        elif rank == 1:
            works = [
                dist.irecv(torch.full_like(large, -1), 0, tag=0),
                dist.irecv(torch.full_like(small, -1), 0, tag=tag),
            ]
        for work in works if rank < 2 else []:
            work.wait()
        if rank == 1:
            assert (works[0].result()[0] == 5).all()
            assert (works[1].result()[0] == 1).all()
    with pytest.raises(RuntimeError, match=r"send: expected a tag >= 0, got -1"):
        dist.isend(torch.ones(1), (rank + 1) % size, tag=-1)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_messages_match_by_tag_in_any_order(size):
    run_ranks(tags, size, secrets.randbelow(10**6), comm=False)


def any_source(rank, size, store):
    init(rank, size, store)
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            buffer = torch.empty(3)
            source = dist.recv(buffer)
            torch.testing.assert_close(buffer, value(source, 0, 0, 0))
            seen.add(source)
        assert seen == set(range(1, size))
        # A tag does not match another one, and a receive from one rank does not match a message of another.
        buffer = torch.empty(3)
        assert dist.recv(buffer, tag=4) == size - 1
        torch.testing.assert_close(buffer, value(size - 1, 0, 4, 0))
        later = torch.empty(3)
        dist.recv(later, size - 1, tag=3)
        torch.testing.assert_close(later, value(size - 1, 0, 3, 0))
        work = dist.irecv(buffer, None, tag=9)
        work.wait()
        assert work._source_rank() == 1
    else:
        dist.send(value(rank, 0, 0, 0), 0)
        if rank == size - 1:
            works = [dist.isend(value(rank, 0, tag, 0), 0, tag=tag) for tag in (3, 4)]
            for work in works:
                work.wait()
        if rank == 1:
            dist.send(torch.zeros(3), 0, tag=9)
    dist.barrier()
    if rank == 0:
        with pytest.raises(RuntimeError, match="recv: expected a tensor with elements"):
            dist.recv(torch.empty(0))
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_recv_from_any_rank(size):
    run_ranks(any_source, size, comm=False)


def ring_first(rank, size, store):
    """In the first operations of a group, every rank sends before any receives, more than a socket buffers."""
    init(rank, size, store)
    x, y = torch.full((300_000,), float(rank)), torch.empty(300_000)
    works = [dist.isend(x, (rank + 1) % size), dist.irecv(y, (rank - 1) % size)]
    for work in works:
        work.wait()
    assert (y == (rank - 1) % size).all()
    dist.destroy_process_group()


def test_a_ring_of_sends_before_any_receive():
    run_ranks(ring_first, 3, comm=False)


def communicator(comm):
    rank, peer = comm.get_rank(), 1 - comm.get_rank()
    x = torch.full((2,), float(rank))
    if rank == 0:
        batch = comm.batch_op_create()
        batch.recv(x, peer)
        batch.recv(x, peer)
        with pytest.raises(to.InvalidValueError, match="got overlapping ones"):
            batch.issue(async_op=False)
    comm.barrier(async_op=False)


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_a_communicators_batch_refuses_to_receive_twice_into_one_buffer(backend):
    run_ranks(communicator, 2, backend=backend)


def mismatched(rank, size, store):
    """A peer that is present, with other sizes or in another operation, is not reported as absent."""
    init(rank, size, store)
    groups = [dist.new_group(timeout=timedelta(seconds=6)) for _ in range(3)]
    calls = [
        lambda group: dist.all_reduce(torch.ones(4 + 4 * rank), group=group),
        lambda group: (dist.all_reduce if rank else partial(dist.broadcast, src=0))(torch.ones(4), group=group),
        lambda group: dist.recv(torch.ones(6), 0, group) if rank else dist.send(torch.ones(4), 1, group),
    ]
    messages = [""] * len(calls)

    def call(number):
        try:
            calls[number](groups[number])
        except RuntimeError as error:
            messages[number] = str(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    dist.barrier()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    return messages


def test_ranks_that_do_not_fit_are_told_so():
    for messages in run_ranks(mismatched, 2, comm=False, env={"TORCHCOMM_ABORT_ON_ERROR": "0"}):
        assert len(messages) == 3
        for message in messages:
            assert "expected the same operation and sizes on all ranks" in message, message
            assert "arrive" not in message, message
        for number, parts in enumerate([("4 elements", "8 elements"), ("broadcast(", "all_reduce(")]):
            assert all(part in messages[number] for part in parts), messages[number]
        assert "takes" in messages[2]
