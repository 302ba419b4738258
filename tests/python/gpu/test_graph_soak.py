"""Many replays of every operation in one run: inputs, operation and comparison are all in the graph."""

import random
import time

import pytest
import torch
from graph_cases import CASES, Barrier, CountedBarrier, each

pytestmark = pytest.mark.gpu(2)

STEPS = 64  # inputs repeat after these
EACH = each([CountedBarrier if kind is Barrier else kind for kind in CASES])


def capture_all(case):
    """Runs the next step's inputs, the operation, and the comparison of its result: as a graph, and eagerly."""
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    case.wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def once():
        step.add_(1).remainder_(STEPS)
        case.fill(step)
        work = case.issue(True)
        if work is not None:
            work.wait()
        case.check(step)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    return graph, once


@EACH
def test_ten_thousand_replays(on, seed, kind):
    case = kind(on)
    graph, _ = capture_all(case)
    for i in range(10_000):
        graph.replay()
        if i % 1000 == 999:
            torch.cuda.synchronize()
    assert case.wrong.item() == 0


@EACH
def test_two_hundred_replays_with_a_late_rank(on, seed, kind):
    """Also runs eager calls in between."""
    case = kind(on)
    graph, once = capture_all(case)
    draw = random.Random(seed)  # the same on all ranks
    for _ in range(200):
        late, delay, eager = draw.randrange(on.get_size()), draw.uniform(1e-3, 10e-3), draw.random() < 0.2
        if on.get_rank() == late:
            time.sleep(delay)
        once() if eager else graph.replay()
    torch.cuda.synchronize()
    assert case.wrong.item() == 0
