"""Tags of TorchComm's sends and receives, by keyword, in the options and in a batch."""

from __future__ import annotations

import pickle
import secrets
from datetime import timedelta

import pytest
import torch

import torch_overlap as to
from torch_overlap.testing import run_ranks

BACKENDS = ["local", "gloo"]


def messages(comm: to.TorchComm, seed: int) -> None:
    """Rank 0 sends by one order of tags, rank 1 receives by another."""
    rank, peer = comm.get_rank(), 1 - comm.get_rank()
    values = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    tags = [0, 7, 2**31 - 1]
    for number in range(2):  # two messages of each tag, which match in order
        for index, tag in enumerate(tags if rank == 0 else reversed(tags)):
            place = (index if rank == 0 else len(tags) - 1 - index) * 2 + number
            if rank == 0:
                option = to.SendOptions(tag=tag) if number else None
                comm.send(values[place], peer, True, options=option, tag=None if number else tag)
            else:
                out = torch.full((5,), float("nan"), dtype=torch.float64)
                option = to.RecvOptions(tag=tag) if number else None
                comm.recv(out, peer, True, options=option, tag=None if number else tag).wait()
                torch.testing.assert_close(out, values[place], rtol=0, atol=0)
    comm.barrier(False)
    # The keyword wins over the options, which also carry a timeout.
    options = (to.SendOptions if rank == 0 else to.RecvOptions)(tag=3, timeout=timedelta(seconds=60))
    if rank == 0:
        works = [
            comm.send(values[0], peer, True, options=options, tag=4),
            comm.send(values[1], peer, True, options=options),
        ]
        for work in works:
            work.wait()
    else:
        outs = [torch.empty(5, dtype=torch.float64) for _ in range(2)]
        comm.recv(outs[1], peer, False, options=options)
        comm.recv(outs[0], peer, False, options=options, tag=4)
        torch.testing.assert_close(torch.stack(outs), values[:2], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_messages_match_by_tag(backend: str) -> None:
    run_ranks(messages, 2, secrets.randbits(32), backend=backend)


def batch(comm: to.TorchComm, seed: int) -> None:
    rank, peer = comm.get_rank(), 1 - comm.get_rank()
    values = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(seed))  # by sender and tag
    made = comm.batch_op_create()
    outs = [torch.full((4,), float("nan")) for _ in range(4)]
    order = [0, 1] if rank == 0 else [1, 0]
    for tag in order:
        made.send(values[rank, tag], peer, tag=tag)
        made.recv(outs[1 - tag], peer, 1 - tag)
        made.send(values[rank, tag], rank, tag)  # to itself
        made.recv(outs[2 + 1 - tag], rank, tag=1 - tag)
    assert [(op.peer, op.tag) for op in made.ops[:2]] == [(peer, order[0]), (peer, order[1])]
    made.issue(True).wait()
    for tag in range(2):
        torch.testing.assert_close(outs[tag], values[peer, tag], rtol=0, atol=0)
        torch.testing.assert_close(outs[2 + tag], values[rank, tag], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_matches_by_tag(backend: str) -> None:
    run_ranks(batch, 2, secrets.randbits(32), backend=backend)


def test_fake_takes_tags_and_bad_ones_are_named() -> None:
    with to.new_comm("fake", "cpu", rank=0, size=2) as comm:
        x = torch.ones(3)
        comm.send(x, 1, False, tag=5)
        comm.recv(x, 1, False, options=to.RecvOptions(tag=6))
        assert x.tolist() == [0.0, 0.0, 0.0]  # nobody has sent
        with pytest.raises(to.InvalidValueError, match="send: expected a tag >= 0, got -1"):
            comm.send(x, 1, False, tag=-1)
        with pytest.raises(to.InvalidTypeError, match=r"recv: expected an int for tag, got 'a' \(str\)"):
            comm.recv(x, 1, False, tag="a")  # type: ignore[arg-type]
        with pytest.raises(to.InvalidValueError, match="send: expected a number of 32 bits for tag, got 2147483648"):
            comm.send(x, 1, False, tag=2**31)
        with pytest.raises(to.InvalidTypeError, match="SendOptions"):
            comm.send(x, 1, False, options=to.RecvOptions(tag=1))  # type: ignore[arg-type]


class Untagged(to.TorchCommBackend):
    def batch_op_issue(self, ops: list[to.P2POp], async_op: bool) -> None:
        ops[1].tensor.copy_(ops[0].tensor)


def test_a_backend_without_tags_refuses_them() -> None:
    to.register_backend("untagged", Untagged)
    with to.new_comm("untagged", "cpu") as comm:
        x, y = torch.randn(2), torch.zeros(2)
        batch = comm.batch_op_create()
        batch.send(x, 0, tag=0)
        batch.recv(y, 0)
        batch.issue(False)
        assert torch.equal(x, y)
        batch.send(x, 0, tag=1)
        batch.recv(y, 0, tag=1)
        expected = r"expected tag 0 on backend 'untagged', which sends no tags, got 1; .* torch.distributed"
        with pytest.raises(to.UnsupportedError, match=expected):
            batch.issue(False)


def test_options_keep_their_tag() -> None:
    for kind in (to.SendOptions, to.RecvOptions):
        options = kind({"a": "b"}, timedelta(seconds=3), 9)
        copy = pickle.loads(pickle.dumps(options))
        assert (dict(copy.hints), copy.timeout, copy.tag) == ({"a": "b"}, timedelta(seconds=3), 9)
        assert repr(copy).endswith("tag=9)")
        copy.tag = 10
        assert copy.tag == 10
        with pytest.raises(TypeError):
            copy.tag = "x"  # type: ignore[assignment]
    assert to.P2POp(to.P2POpType.RECV, torch.ones(1), 1, tag=4).tag == 4
    assert to.P2POp(to.P2POpType.RECV, torch.ones(1), 1).tag == 0
    assert not hasattr(to.BroadcastOptions(), "tag")
