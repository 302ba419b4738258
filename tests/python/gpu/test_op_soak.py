"""Many replays of operators that move data and multiply: inputs, operator and comparison are all in the graph."""

import random
import time

import pytest
import torch
from op_cases import CASES

pytestmark = [pytest.mark.gpu(2), pytest.mark.slow]

STEPS = 64  # inputs repeat after these
NAMES = ["all_reduce", "all_gather_async", "reduce_scatter", "all_to_all_async", "broadcast", "permute",
         "all_to_all_v_async", "all_gather_matmul-chunked", "all_gather_matmul-ring",
         "matmul_reduce_scatter-sequential", "matmul_reduce_scatter-ring", "matmul_all_reduce-chunked",
         "all_to_all_matmul-chunked", "all_to_all_matmul-ring", "matmul_all_to_all-chunked",
         "matmul_all_to_all-ring", "bulk_overlap_matmul-all_gather-chunked",
         "bulk_overlap_matmul-reduce_scatter-chunked"]  # fmt: skip
assert set(NAMES) <= {case.name for case in CASES}
EACH = pytest.mark.parametrize("case", [case for case in CASES if case.name in NAMES], ids=lambda case: case.name)


class Replay:
    """One replay: the next inputs, small integers, the operator, and its result compared."""

    def __init__(self, comm, case):
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
        with torch.cuda.graph(self.graph):
            self.run()

    def of(self, rank):
        """Rank `rank`'s inputs in this replay. Sums of their products are exact."""
        shift = 3 * rank + 5 * self.step
        return [((base * 7 + base // 13 + shift + 11 * i) % 13 - 6).float() for i, base in enumerate(self.bases)]

    def run(self):
        self.step.add_(1).remainder_(STEPS)
        rank, every = self.comm.get_rank(), [self.of(r) for r in range(self.comm.get_size())]
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
    replay = Replay(comm, case)
    draw = random.Random(seed)
    for _ in range(200):
        late, delay = draw.randrange(comm.get_size()), draw.uniform(1e-3, 10e-3)
        if comm.get_rank() == late:
            time.sleep(delay)
        replay.graph.replay()
    assert replay.wrong.item() == 0
