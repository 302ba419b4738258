"""Many replays of every operation in one go: inputs, operation and comparison are all in the graph."""

import random
import time

import pytest
import torch
from graph_cases import CASES, Barrier

pytestmark = pytest.mark.gpu(2)

STEPS = 64  # inputs repeat after these


def capture_all(case):
    """One replay: the next step's inputs, the operation, and its result compared."""
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    case.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    is_barrier = isinstance(case, Barrier)  # compares host clocks, not values
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.add_(1).remainder_(STEPS)
        if not is_barrier:
            case.fill(step)
        work = case.issue(True)
        if work is not None:
            work.wait()
        if not is_barrier:
            case.check(step)
    return graph


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_ten_thousand_replays(comm, seed, kind):
    case = kind(comm)
    graph = capture_all(case)
    for i in range(10_000):
        graph.replay()
        if i % 1000 == 999:
            torch.cuda.synchronize()
    assert case.wrong.item() == 0


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_two_hundred_replays_with_a_late_rank(comm, seed, kind):
    case = kind(comm)
    graph = capture_all(case)
    draw = random.Random(seed)
    for _ in range(200):
        late, delay = draw.randrange(comm.get_size()), draw.uniform(1e-3, 10e-3)
        if comm.get_rank() == late:
            time.sleep(delay)
        graph.replay()
    torch.cuda.synchronize()
    assert case.wrong.item() == 0
