"""The overlap classes over NVLink in CUDA graphs: changing inputs, late ranks, several graphs, soaks; and timeouts."""

import gc
import random
import time
from datetime import timedelta

import pytest
import torch
from overlap_gpu_cases import (
    EACH,
    EPILOGUES,
    FULL,
    KINDS,
    ONE,
    SMALL,
    SOAKED,
    Gather,
    GatherEpilogue,
    GatherFilled,
    Pipeline,
    Scatter,
    agree,
    capture,
    counting,
    eager,
    hundred_replays,
    late,
    replay,
)
from replays import replay_ten_thousand_times, replay_with_late_ranks

import torch_overlap as to

pytestmark = pytest.mark.gpu(2)


# --- Graphs ---------------------------------------------------------------------------------------------------------


@EACH
def test_a_hundred_replays_with_changing_inputs_and_a_late_rank(comm, seed, kind, dtype):
    case = counting(kind(comm, dtype, **FULL))
    eager(case, 0)
    graph = capture(case.issue)
    draw = random.Random(seed)
    for step in range(100):
        if step % 5 == 0:
            late(case, step // 5, draw.uniform(1, 10))
        case.poison(graph.replay)
        replay(graph, case, step)
        if step % 10 == 3:
            case.poison(case.issue)
            eager(case, step + 1000)
    agree(comm, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_hundred_replays_of_other_dtypes(comm, kind, dtype):
    case = kind(comm, dtype, **SMALL)
    eager(case, 0)
    hundred_replays(comm, capture(case.issue), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_hundred_replays_with_an_epilogue(comm, epilogue, dtype):
    case = GatherEpilogue(comm, dtype, epilogue=epilogue, **SMALL)
    eager(case, 0)
    hundred_replays(comm, capture(case.issue), case)


@pytest.mark.parametrize("active", [0, 1, 7, 255])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_hundred_replays_of_few_tokens(comm, kind, active):
    """Ranks have unequal numbers of tokens, and some have none."""
    case = kind(comm, active=active, **SMALL)
    eager(case, 0)
    hundred_replays(comm, capture(case.issue), case)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_first_call_of_a_buffer_may_be_captured(comm, kind):
    case = kind(comm, **SMALL)
    hundred_replays(comm, capture(case.issue), case)
    eager(case, 9)


@ONE
def test_two_graphs_on_one_buffer_and_eager_calls(comm, seed, kind):
    case = kind(comm, **SMALL)
    eager(case, 0)

    def twice():
        case.issue()
        case.issue()

    graphs = [capture(case.issue), capture(twice), case]
    draw = random.Random(seed)  # the same on all ranks
    for step in range(60):
        chosen = draw.choice(graphs)
        if draw.random() < 0.2:
            late(case, step, 3)
        if chosen is case:
            eager(case, step)
        else:
            replay(chosen, case, step)


def test_all_methods_in_one_graph(comm):
    cases = [counting(kind(comm, **SMALL)) for kind in KINDS]

    def issue():
        for case in cases:
            case.issue()

    for case in cases:
        eager(case, 0)
    graph = capture(issue)
    for step in range(100):
        if step % 5 == 0:
            late(cases[0], step // 5, 2)
        for case in cases:
            case.fill(step)
        graph.replay()
        for case in cases:
            case.check(step)
    for case in cases:
        agree(comm, case)


@ONE
def test_the_buffer_goes_before_its_graph(comm, kind):
    case = kind(comm, **SMALL)
    eager(case, 0)
    graph = capture(case.issue)
    torch.cuda.synchronize()
    if kind in (Gather, GatherFilled, Pipeline, Scatter):  # results are outside of the buffer
        case.fills = False
        case.buffer = None
        gc.collect()
        filler = [torch.full((1 << 22,), 7.0, device="cuda") for _ in range(8)]
        hundred_replays(comm, graph, case)
        del filler
    comm.barrier(async_op=False)
    torch.cuda.synchronize()
    graph.reset()


# --- Soaks ----------------------------------------------------------------------------------------------------------


def capture_all(case):
    """Inputs, call and comparison are all in the graph, after a call that leaves NaN in the memory that receives
    data."""
    eager(case, 0)
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    case.wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def issue():
        step.add_(1).remainder_(64)
        case.poison(case.issue)
        case.fill(step)
        case.issue()
        case.check(step)

    return capture(issue)


@pytest.mark.slow
@SOAKED
def test_ten_thousand_replays(comm, kind, dtype):
    """No rank is delayed."""
    case = kind(comm, dtype, **SMALL)
    replay_ten_thousand_times(capture_all(case))
    assert case.wrong.item() == 0


@pytest.mark.slow
@EACH
def test_two_hundred_replays_with_a_late_rank(comm, seed, kind, dtype):
    case = kind(comm, dtype, **SMALL)
    replay_with_late_ranks(comm, capture_all(case), seed)
    assert case.wrong.item() == 0


# --- Timeouts -------------------------------------------------------------------------------------------------------

TIMEOUT = 2.0


@pytest.mark.parametrize("mode", ["eager", "graph"])
@ONE
def test_a_rank_that_stays_away(comm, make_comm, kind, mode):
    """The device continues after the timeout, and the host raises; no rank hangs."""
    name = f"away_{kind.__name__}_{mode}"
    lonely = make_comm(name, timeout=timedelta(seconds=TIMEOUT))
    case = kind(lonely, **SMALL)
    eager(case, 0)
    graph = capture(case.issue)
    replay(graph, case, 1)
    torch.cuda.synchronize()
    comm.barrier(async_op=False)
    torch.cuda.synchronize()
    last = comm.get_size() - 1
    if comm.get_rank() != last:
        case.fill(2)
        torch.cuda.synchronize()
        begin = time.monotonic()
        (graph.replay if mode == "graph" else case.issue)()
        assert time.monotonic() - begin < TIMEOUT / 2  # the host does not wait
        torch.cuda.synchronize()
        took = time.monotonic() - begin
        assert TIMEOUT * 0.9 < took < 2 * TIMEOUT + 5
        deadline = time.monotonic() + 10
        while True:
            try:
                case.issue()
            except to.Error as raised:
                error = raised
                break
            assert time.monotonic() < deadline, "no error came"
            time.sleep(0.05)
        # If several ranks wait, the first one to give up notifies the others.
        others = comm.get_size() > 2 and "got one that has given up" in str(error)
        assert f"rank {last} to " in str(error) or others, error
        assert "operation 3" in str(error), error
        with pytest.raises(to.Error):
            case.issue()
    else:
        time.sleep(2 * TIMEOUT + 1)
    graph.reset()
    if not lonely.is_aborted():
        lonely.abort()
    comm.barrier(async_op=True).wait_blocking()
