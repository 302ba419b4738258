"""The fused kernels where several are under way on streams that nothing orders, and where ranks have no rows."""

import random

import pytest
import torch
from test_fused import KINDS, AllReduce, capture, replay

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="the kernels are for sm_90"
    ),
]

# Few tiles: kernels that wait for other ranks find room side by side.
SHAPE = (100, 264, 520)


def test_channels_at_once(make_comm, seed):
    """One of each kind, for a communicator of its own, in an order that changes."""
    comms = [make_comm(f"fused_at_once_{kind.__name__}") for kind in KINDS]
    cases = [kind(comm, *SHAPE, torch.bfloat16) for kind, comm in zip(KINDS, comms, strict=True)]
    captured = [capture(case.run) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    order = random.Random(seed)  # the same on all ranks
    for turn in range(40):
        for case in cases:
            case.fill()
        torch.cuda.synchronize()
        results = [None] * len(cases)
        for i in order.sample(range(len(cases)), len(cases)):
            graph, outs = captured[i]
            with torch.cuda.stream(streams[i]):
                for out in outs:
                    out.view(torch.uint8).fill_(0xFF)
                if turn % 4 == 0:
                    results[i] = cases[i].run()
                else:
                    graph.replay()
                    results[i] = outs
        torch.cuda.synchronize()
        for case, outs in zip(cases, results, strict=True):
            case.check(outs)


def test_one_channel_on_several_streams(comm, seed):
    """Eager calls come one after the other, whatever stream each is on."""
    draw = random.Random(seed)
    streams = [torch.cuda.Stream() for _ in range(3)]
    cases = [kind(comm, *SHAPE, torch.bfloat16) for kind in KINDS for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for i in range(30):
        case, late = draw.choice(cases), draw.randrange(3 * comm.get_size())
        with torch.cuda.stream(streams[i % len(streams)]):
            if comm.get_rank() == late:
                torch.cuda._sleep(4_000_000)
            results.append((case, case.run()))
    torch.cuda.synchronize()
    for case, outs in results:
        case.check(outs)


def test_sums_of_which_some_ranks_own_no_rows(comm, seed):
    size, cases = comm.get_size(), []
    for rows in sorted({1, size - 1, size + 1, 2 * size - 1, 129}):
        case = AllReduce(comm, 1, 264, 520, torch.bfloat16)
        case.x = torch.empty(rows, 264, dtype=torch.bfloat16, device="cuda")
        cases.append(case)
    replay(comm, seed, cases)
