"""Many calls in any order of streams and ranks: several buffers, late ranks, random interleavings, groups."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest
import torch
from overlap_cases import (
    AG,
    BULK,
    E4M3,
    PIPELINE,
    RING,
    RS,
    Bulk,
    Case,
    Draw,
    External,
    Gather,
    Scatter,
    interleaving,
    make,
    same,
)

import torch_overlap as to
from torch_overlap.testing import run_ranks

STRESS = int(os.environ.get("TORCH_OVERLAP_STRESS", "1"))


def all_methods(comm: to.TorchComm) -> dict[str, Case]:
    cases: dict[str, Case] = {
        "ag": Gather(comm, fill=True, options={"num_max_streams": 4}),
        "ag of a tensor": Gather(comm, torch.bfloat16, epilogue="bias_gelu"),
        "ag atomic, 8 bits": Gather(comm, E4M3, atomic=True),
        "ag passed on": Gather(comm, fill=True, options={"relay_ag": True, "num_max_streams": 4}),
        "rs ring": Scatter(comm, RING, options={"num_max_streams": 4}),
        "rs ring atomic, 8 bits": Scatter(comm, RING, E4M3, atomic=True),
        "rs pipeline": Scatter(comm, PIPELINE, torch.bfloat16),
        "rs pipeline, first": Scatter(comm, PIPELINE, options={"rs_overlap_first_gemm": True, "num_splits": 3}),
        "bulk ag": Bulk(comm, AG, torch.bfloat16),
        "bulk rs": Bulk(comm, RS),
        "bulk rs, output": Bulk(comm, RS, E4M3, in_place=False),
        "external ag": External(comm),
        "external ag, bulk": External(comm, lender="bulk"),
    }
    if comm.get_size() % 2 == 0:
        cases["ag pairs"] = Gather(comm, options={"aggregate_ag": True, "num_max_streams": 2})
        cases["ag pairs, filled"] = Gather(comm, E4M3, fill=True, options={"aggregate_ag": True})
    return cases


def run_interleaved(comm: to.TorchComm, seed: int, seeds: int, unreachable: bool) -> None:
    if unreachable:
        pretence = to._C._PretendUnreachable()
        cases = all_methods(comm)
        del pretence
    else:
        cases = all_methods(comm)
    for turn in range(seeds):
        own = 1 + seed % 1000 + turn * comm.get_size() + comm.get_rank()
        with interleaving(own):
            for name, case in cases.items():
                try:
                    case.step(seed + turn)
                except Exception as error:
                    raise AssertionError(f"{name}: interleaving {own}, data {seed + turn}: {error}") from error


@pytest.mark.stress
@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("gloo", 3), ("gloo", 4), ("local", 6)])
def test_random_interleavings(backend: str, size: int, seed: int) -> None:
    """50 orders of every method's streams, drawn by each rank for itself (threads: by the last that set it)."""
    run_ranks(run_interleaved, size, seed, 50 * STRESS, False, backend=backend, timeout=100 + 300 * STRESS)


@pytest.mark.stress
@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("gloo", 3), ("local", 4)])
def test_random_interleavings_of_sends_and_receives(backend: str, size: int, seed: int) -> None:
    run_ranks(run_interleaved, size, seed, 50 * STRESS, True, backend=backend, timeout=100 + 300 * STRESS)


def run_many(comm: to.TorchComm, seed: int, calls: int, sleeps: bool, mixed: bool) -> None:
    """Each call uses a random buffer, equal on all ranks; sleeps differ by rank."""
    dice, own = random.Random(seed), random.Random(seed + comm.get_rank() + 1)
    cases = all_methods(comm)
    names = list(cases) if mixed else ["ag", "rs ring", "rs pipeline", "bulk rs", "bulk ag"]
    for call in range(calls):
        if sleeps and own.random() < 0.1:
            time.sleep(own.uniform(0, 0.02))
        cases[dice.choice(names)].step(seed + call)


@pytest.mark.parametrize("sleeps", [False, True], ids=["no sleeps", "late ranks"])
@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("gloo", 4), ("local", 8)])
def test_two_hundred_calls_one_after_another(backend: str, size: int, sleeps: bool, seed: int) -> None:
    run_ranks(run_many, size, seed, 200, sleeps, True, backend=backend, timeout=300)


def run_same_again(comm: to.TorchComm, seed: int, name: str) -> None:
    """The same call 200 times back to back; results are compared afterwards."""
    rank, size = comm.get_rank(), comm.get_size()
    tokens, k, n = 8 * size, 16, 24
    own = random.Random(seed + rank)
    draw = Draw(seed)
    xs = [draw(tokens, k, dtype=torch.float32) for _ in range(4)]
    ws = [draw(n, k, dtype=torch.float32) for _ in range(size)]
    rows = slice(8 * rank, 8 * rank + 8)
    method = PIPELINE if name == "rs pipeline" else BULK if name == "bulk rs" else RING
    buffer = make(comm, AG if name == "ag" else RS, method, (tokens, k if name == "ag" else n), torch.float32)
    outs = []
    for call in range(200):
        if own.random() < 0.05:
            time.sleep(own.uniform(0, 0.01))
        x = xs[call % 4]
        out = torch.full((tokens if name == "ag" else 8, n), float("nan"))
        if name == "ag":
            buffer.split_overlap_ag(ws[rank], True, x[rows], False, out)
        elif name == "bulk rs":
            buffer.copy_into_buffer(x @ ws[rank].T)
            buffer.bulk_overlap(ws[rank], True, x, False, torch.empty(tokens, n), rs_output=out, comm_type=RS)
        else:
            buffer.split_overlap_rs(ws[rank], True, x, False, None, rs_output=out)
        outs.append(out)
    for call, out in enumerate(outs):
        x = xs[call % 4].double()
        want = x @ ws[rank].double().T if name == "ag" else sum(x[rows] @ w.double().T for w in ws)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-4, msg=lambda m, call=call: f"call {call}: {m}")


@pytest.mark.parametrize("name", ["ag", "rs ring", "rs pipeline", "bulk rs"])
@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), ("local", 4)])
def test_a_call_may_follow_another_at_once(backend: str, size: int, name: str, seed: int) -> None:
    run_ranks(run_same_again, size, seed, name, backend=backend, timeout=120)


def run_content_stays(comm: to.TorchComm, seed: int) -> None:
    """One rank still reads the result of a call while the others have started the next one."""
    cases = [Gather(comm, fill=True), Bulk(comm, AG, torch.bfloat16), External(comm)]
    rs = Bulk(comm, RS)
    for turn in range(2 * comm.get_size()):
        for case in cases:
            case.step(seed + turn)
            if turn % comm.get_size() == comm.get_rank():
                time.sleep(0.03)
                case.still_there()
        rs.step(seed + turn)
        left = rs.buffer.get_buffer().clone()
        if turn % comm.get_size() == comm.get_rank():
            time.sleep(0.03)
        assert same(rs.buffer.get_buffer(), left)


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("gloo", 4), ("local", 3)])
@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "unreachable"])
def test_what_a_call_leaves_stays_until_the_next_call_of_this_rank(
    backend: str, size: int, mapped: bool, seed: int
) -> None:
    run_ranks(run_content_stays if mapped else run_content_stays_unreachable, size, seed, backend=backend, timeout=120)


def run_content_stays_unreachable(comm: to.TorchComm, seed: int) -> None:
    pretence = to._C._PretendUnreachable()
    try:
        run_content_stays(comm, seed)
    finally:
        del pretence


def run_groups(comm: to.TorchComm, seed: int) -> None:
    """Buffers of all ranks, of even and odd ones, and of pairs of neighbours, used in turns."""
    rank, size = comm.get_rank(), comm.get_size()
    halves = comm.split([r for r in range(size) if r % 2 == rank % 2], f"half{rank % 2}")
    pairs = comm.split([r for r in range(size) if r // 2 == rank // 2], f"pair{rank // 2}")
    alone = comm.split([rank], f"alone{rank}")
    groups = [comm, halves, pairs, alone]
    cases = [all_methods(group) for group in groups]
    dice = random.Random(seed)
    for call in range(60):
        which = dice.randrange(len(groups))
        name = dice.choice(sorted(cases[3]))  # every group has these
        cases[which][name].step(seed + call)
    del cases
    for group in groups[1:]:
        group.finalize()


@pytest.mark.parametrize(("backend", "size"), [("gloo", 4), ("local", 6)])
def test_buffers_of_several_groups_at_once(backend: str, size: int, seed: int) -> None:
    run_ranks(run_groups, size, seed, backend=backend, timeout=200)


def run_threads(comm: to.TorchComm, seed: int) -> None:
    """Each buffer is used on a thread of its own."""
    cases = list(all_methods(comm).values())
    failures: list[BaseException] = []

    def body(case: Case) -> None:
        try:
            for turn in range(10):
                case.step(seed + turn)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("local", 3)])
def test_buffers_on_several_threads(backend: str, size: int, seed: int) -> None:
    run_ranks(run_threads, size, seed, backend=backend, timeout=120)


def run_deleted(comm: to.TorchComm, seed: int) -> None:
    """A rank may drop a buffer while others still use its memory; views keep their memory alive."""
    kept = []
    for turn in range(10):
        case = Gather(comm, fill=True)
        case.step(seed + turn)
        kept.append((case.buffer.get_buffer(), case.expected))
        if comm.get_rank() == turn % comm.get_size():
            time.sleep(0.01)
        del case
    for view, expected in kept:
        assert same(view, expected)


@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), ("local", 3)])
def test_buffers_come_and_go(backend: str, size: int, seed: int) -> None:
    run_ranks(run_deleted, size, seed, backend=backend, timeout=120)
