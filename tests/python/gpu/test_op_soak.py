"""Many replays of operators that move data and multiply: inputs, operator and comparison are all in the graph. Before
each call what it writes to, on the way too, is NaN."""

import random
import time

import pytest
import torch
from op_cases import CASES, OVER_CHANNELS, poison

pytestmark = [pytest.mark.gpu(2), pytest.mark.slow]

STEPS = 64  # inputs repeat after these
NAMES = ["all_reduce", "all_gather_async", "reduce_scatter", "all_to_all_async", "broadcast", "permute",
         "all_to_all_v_async", "all_gather_matmul-chunked", "all_gather_matmul-ring",
         "matmul_reduce_scatter-sequential", "matmul_reduce_scatter-ring", "matmul_all_reduce-chunked",
         "all_to_all_matmul-chunked", "all_to_all_matmul-ring", "matmul_all_to_all-chunked",
         "matmul_all_to_all-ring", "matmul_all_reduce-ring", "bulk_overlap_matmul-all_gather-chunked",
         "bulk_overlap_matmul-reduce_scatter-chunked", "bulk_overlap_matmul-all_gather-bulk",
         "bulk_overlap_matmul-reduce_scatter-bulk"]  # fmt: skip
assert set(NAMES) <= {case.name for case in CASES}
assert {case.name for case in OVER_CHANNELS} <= set(NAMES)
EACH = pytest.mark.parametrize("case", [case for case in CASES if case.name in NAMES], ids=lambda case: case.name)


class Replay:
    """One replay: the next inputs, small integers, the operator, and its result compared. run() does it eagerly."""

    def __init__(self, comm, case, stream=None):
        """Captured on `stream`: what runs at once may not share the workspace of cuBLAS, which each stream has."""
        self.comm, self.case = comm, case
        self.step = torch.zeros((), dtype=torch.int64, device="cuda")
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.bases = [torch.arange(torch.Size(shape).numel(), device="cuda").view(shape) for shape in case.shapes]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries make their workspaces
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.run()

    def of(self, rank):
        """Rank `rank`'s inputs in this replay. Sums of their products are exact."""
        shift = 3 * rank + 5 * self.step
        return [((base * 7 + base // 13 + shift + 11 * i) % 13 - 6).float() for i, base in enumerate(self.bases)]

    def run(self):
        self.step.add_(1).remainder_(STEPS)
        rank, every = self.comm.get_rank(), [self.of(r) for r in range(self.comm.get_size())]
        poison(self.comm, self.case, every[rank])
        got = self.case.run(self.comm, *every[rank])
        self.wrong += (got != self.case.reference(every, rank)).sum()


@EACH
def test_ten_thousand_replays(comm, case):
    replay = Replay(comm, case)
    for i in range(10_000):
        replay.graph.replay()
        if i % 1000 == 999:
            assert replay.wrong.item() == 0, i


@EACH
def test_two_hundred_replays_with_a_late_rank(comm, seed, case):
    """And eager calls in between."""
    replay = Replay(comm, case)
    draw = random.Random(seed)  # the same on all ranks
    for _ in range(200):
        late, delay, eager = draw.randrange(comm.get_size()), draw.uniform(1e-3, 10e-3), draw.random() < 0.2
        if comm.get_rank() == late:
            time.sleep(delay)
        replay.run() if eager else replay.graph.replay()
    assert replay.wrong.item() == 0


def test_two_communicators_at_once(make_comm, seed):
    """Each with channels, and a stream that nothing orders: replays of one operator beside those of another."""
    comms = [make_comm(f"operators_at_once_{i}") for i in range(2)]
    streams = [torch.cuda.Stream() for _ in comms]
    draw = random.Random(seed)
    for case in OVER_CHANNELS:
        beside = draw.choice(OVER_CHANNELS)
        replays = [Replay(*one) for one in zip(comms, (case, beside), streams, strict=True)]
        torch.cuda.synchronize()
        for _ in range(100):
            for replay, stream in zip(replays, streams, strict=True):
                with torch.cuda.stream(stream):
                    replay.graph.replay()
        torch.cuda.synchronize()
        assert [replay.wrong.item() for replay in replays] == [0, 0], [replay.case.name for replay in replays]


def test_eager_calls_on_several_streams(comm, seed):
    """Each operator comes after the one before it, whatever stream either is called on."""
    draw = random.Random(seed)
    streams = [torch.cuda.Stream() for _ in range(3)]
    replays = [Replay(comm, case) for case in OVER_CHANNELS for _ in streams]
    torch.cuda.synchronize()
    for _ in range(60):
        i, late = draw.randrange(len(replays)), draw.randrange(4 * comm.get_size())
        with torch.cuda.stream(streams[i % len(streams)]):
            if comm.get_rank() == late:
                torch.cuda._sleep(5_000_000)
            replays[i].run()
    torch.cuda.synchronize()
    for replay in replays:
        assert replay.wrong.item() == 0, replay.case.name
