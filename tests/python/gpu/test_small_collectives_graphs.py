"""Custom collectives in graphs, and their aborts and timeouts."""

import random
import threading
import time
from datetime import timedelta

import pytest
import torch
from replays import replay_and_call_in_turn, replay_at_once, replay_ten_thousand_times, replay_with_late_ranks
from small_cases import (
    FLOATS,
    INTEGERS,
    KI,
    NOT_BFLOAT16,
    WAYS,
    Poison,
    Step,
    algorithms,
    at_call,
    call_of,
)
from timeout_cases import run_until_an_error

import torch_overlap as to
from torch_overlap import ReduceOp

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(scope="module")
def always(make_comm):
    return make_comm("always_in_graphs", hints={"custom_collectives": "always"})


@pytest.mark.parametrize("count", [1, 5000, 80_001])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_slots_that_hold_nan(always, seed, dtype, count):
    """Replays and eager calls take turns, on inputs that change; one rank is occasionally late."""
    step = Step(always, count, dtype, before=Poison(always))
    graph = step.capture()
    replay_and_call_in_turn(always, step, graph, seed, 20)
    step.check()


@pytest.mark.parametrize("count", [1, 7, 3001, 40_001, 300_001])
def test_graphs_and_eager_calls_take_turns(comm, always, seed, count):
    choose = random.Random(seed)
    steps = [Step(on, count + i) for i, on in enumerate((comm, always, comm))]
    graphs = [step.capture() for step in steps]
    for _ in range(60):
        which = choose.randrange(len(steps))
        graphs[which].replay()
        if choose.random() < 0.5:
            steps[choose.randrange(len(steps))]()
    torch.cuda.synchronize()
    for step in steps:
        step.check()


def test_two_communicators_at_once(make_comm):
    """Replays on streams of their own, which nothing orders."""
    comms = [make_comm(f"at_once_{i}", hints={"custom_collectives": "always"}) for i in range(2)]
    counts = (3001, 80_001)
    steps = [Step(one, count, has_unequal=False) for one, count in zip(comms, counts, strict=True)]
    graphs = [step.capture() for step in steps]
    replay_at_once(graphs, 300)
    for step in steps:
        step.check()


LATE = [(count, torch.bfloat16) for count in (64, 5000, 200_001)] + [(5000, dtype) for dtype in NOT_BFLOAT16]


@pytest.mark.parametrize(("count", "dtype"), LATE, ids=str)
def test_two_hundred_replays_with_a_late_rank(always, seed, count, dtype):
    step = Step(always, count, dtype, before=Poison(always))
    graph = step.capture()
    replay_with_late_ranks(always, graph, seed)
    step.check()


@pytest.mark.parametrize("count", [1_500_001, 4_000_003])
def test_many_rounds_with_late_ranks(make_comm, seed, count):
    """Copies, sums of both kinds, unequal and empty parts take turns with small ones, which use other blocks."""
    wide = make_comm(f"wide_{count}", hints={"custom_collectives": "ll128"})
    steps = [Step(wide, n) for n in (count, 7, 5000)]
    graphs = [step.capture() for step in steps]
    for i in range(10):
        for graph in graphs:
            replay_with_late_ranks(wide, graph, seed + i, times=3)
    for step in steps:
        step.check()


@pytest.mark.slow
@pytest.mark.parametrize("count", [64, 5000, 60_001, 300_001])
def test_ten_thousand_replays(always, count):
    step = Step(always, count, before=Poison(always))
    graph = step.capture()
    replay_ten_thousand_times(graph)
    step.check()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NOT_BFLOAT16, ids=str)
def test_ten_thousand_replays_of_other_dtypes(always, dtype):
    """Graphs take turns; in each one the slots are filled with NaN before another of the operations: a fill before
    each would take most of the time."""
    poison, calls = Poison(always), Step.CALLS + 1
    steps = [Step(always, 5000, dtype, before=at_call(i, calls, poison)) for i in range(calls)]
    replay_ten_thousand_times(*[step.capture() for step in steps])
    for step in steps:
        step.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "words", "lines"), [("ll", 3, 16 * KI), ("ll128", 30, 1000), ("ll128", 30, 8000), ("ll128", 30, 70_000)]
)
def test_no_line_is_ever_torn(comm, nccl_comm, seed, mode, words, lines):
    """The data of a packet is written and read as a unit: each one repeats one random pattern. NCCL keeps the links
    busy concurrently."""
    if mode == "ll128" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("NCCL does it")
    rank, size = comm.get_rank(), comm.get_size()
    patterns = torch.zeros(size, lines, dtype=torch.int32, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    index = torch.arange(lines, device="cuda")
    hints = {"custom_collectives": mode}

    def once():
        step.add_(1)
        for r in range(size):
            patterns[r] = ((index + lines * r) * 2654435761 + step * 40503).to(torch.int32)
        mine = patterns[rank].repeat_interleave(words)
        out = torch.full((size * mine.numel(),), -1, dtype=torch.int32, device="cuda")
        comm.all_gather_single(out, mine, async_op=False, hints=hints)
        wrong.add_((out.view(size, lines, words) != patterns.unsqueeze(2)).sum())

    assert algorithms(once) == [mode]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    beside = torch.ones(size, 16 << 20, dtype=torch.uint8, device="cuda")
    for i in range(5000):
        graph.replay()
        if i % 20 == 0:
            work = nccl_comm.all_gather_single(beside.view(-1), beside[rank], async_op=True)
        if i % 1000 == 999:
            work.wait()
            torch.cuda.synchronize()
    assert wrong.item() == 0


def test_a_graph_outlives_its_communicator(comm, make_comm):
    ending = make_comm("ends_before_its_graph")
    x = torch.ones(5000, device="cuda")
    ending.all_reduce(x, ReduceOp.SUM, async_op=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ending.all_reduce(x, ReduceOp.SUM, async_op=False)
    ending.finalize()
    del ending
    x.fill_(1)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert (x == comm.get_size() ** 3).all()
    graph.reset()


# --- Failures ----------------------------------------------------------------------------------------------------


TIMEOUT = timedelta(milliseconds=700)


@pytest.fixture
def lonely(comm, make_comm):
    """A communicator, and a call that all ranks have made once, and rank 0 makes again. It is aborted after the
    test."""
    made = []

    def make(what, name, mode):
        one = make_comm(f"lonely_{what}_{name}_{mode}", hints={"custom_collectives": mode})
        made.append(one)
        call = call_of(one, name)
        call()
        torch.cuda.synchronize()
        one.set_timeout(TIMEOUT)
        return one, call

    yield make
    comm.barrier(async_op=True).wait_blocking()
    for one in made:
        one.abort()
    torch.cuda.synchronize()  # the kernels have ended


@pytest.mark.parametrize(("name", "mode"), WAYS)
def test_a_missing_rank_is_named(lonely, name, mode):
    silent, call = lonely("call", name, mode)
    if silent.get_rank() != 0:
        return
    call()
    torch.cuda.synchronize()
    message = (
        r"'lonely_.*'.*700 ms.*rank [1-9] is missing: expected step (2 of block 0, got step 1|3 of block 0, got step 2)"
    )
    with pytest.raises(to.OperationTimeoutError, match=message):
        run_until_an_error(call)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("all_reduce", "two_shot"),
        ("large_all_reduce", "ll128"),
        ("all_gather", "ll128"),
        ("all_gather", "bulk"),
        ("reduce_scatter", "simple"),
        ("all_to_all", "simple"),
        ("all_to_all", "ll128"),
        ("all_to_all_v", "ll"),
        ("broadcast", "ll128"),
        ("rms_norm", "ll"),
        ("rms_norm", "ll128"),
        ("rms_norm", "simple"),
    ],
)
def test_a_replay_that_nobody_watches_ends_too(comm, lonely, name, mode):
    silent, call = lonely("replay", name, mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    comm.barrier(async_op=False)
    graph.replay()
    comm.barrier(async_op=False)
    torch.cuda.synchronize()
    if comm.get_rank() == 0:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        time.sleep(0.3)
        assert silent.is_aborted()
        message = (
            r"custom collectives of 'lonely_.*': expected rank [1-9] to come to step (2 of block \d+ within 700 ms, "
            r"got step 1|3 of block \d+ within 700 ms, got step 2)"
        )
        with pytest.raises(to.OperationTimeoutError, match=message):
            call()
    comm.barrier(async_op=True).wait_blocking()
    graph.reset()


@pytest.mark.parametrize("count", [1000, 1 << 20])
def test_abort_ends_what_is_under_way(comm, make_comm, count):
    hung = make_comm(f"hung_custom_{count}", hints={"custom_collectives": "always"})
    x = torch.ones(count, device="cuda")
    hung.all_reduce(x, ReduceOp.SUM, async_op=False)
    torch.cuda.synchronize()
    comm.barrier(async_op=True).wait_blocking()
    if comm.get_rank() == 0:
        work = hung.all_reduce(x, ReduceOp.SUM, async_op=True)
        time.sleep(0.3)
        assert not work.is_completed()
    begin = time.monotonic()
    hung.abort()
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 5
    with pytest.raises(to.StateError):
        hung.all_reduce(x, ReduceOp.SUM, async_op=True)
    comm.barrier(async_op=True).wait_blocking()


def test_abort_ends_a_first_call_that_others_do_not_make(comm, make_comm):
    first = make_comm("first_custom", timeout=timedelta(seconds=5))
    if comm.get_rank() == 0:
        threading.Timer(1, first.abort).start()
        begin = time.monotonic()
        with pytest.raises(to.StateError, match="was aborted"):
            first.all_reduce(torch.ones(8, device="cuda"), ReduceOp.SUM, async_op=False)
        assert time.monotonic() - begin < 10
    else:
        time.sleep(2)
        first.abort()
    comm.barrier(async_op=True).wait_blocking()


def test_reconfigure_makes_it_anew(make_comm, comm):
    regrouped = make_comm("regrouped_custom", enable_reconfigure=True)
    x = torch.ones(1000, device="cuda")
    regrouped.all_reduce(x, ReduceOp.SUM, async_op=False)  # nothing is chosen before the ranks have met
    before = algorithms(lambda: regrouped.all_reduce(x, ReduceOp.SUM, async_op=False))
    assert before != ["nccl"]
    handles = [None] * comm.get_size()
    to.objcol.all_gather_object(comm, handles, regrouped.get_init_handle())
    regrouped.reconfigure(uuid=1, init_handles=handles)
    x.fill_(1)
    assert algorithms(lambda: regrouped.all_reduce(x, ReduceOp.SUM, async_op=False)) == before
    assert (x == comm.get_size()).all()


def test_replays_that_overlap_are_an_error(comm, make_comm):
    careless = make_comm("careless")
    x = [torch.ones(1000, device="cuda") for _ in range(2)]
    careless.all_reduce(x[0], ReduceOp.SUM, async_op=False)
    graphs = [torch.cuda.CUDAGraph() for _ in x]
    for one, graph in zip(x, graphs, strict=True):
        with torch.cuda.graph(graph):
            careless.all_reduce(one, ReduceOp.SUM, async_op=False)
    torch.cuda.synchronize()
    comm.barrier(async_op=True).wait_blocking()
    if comm.get_rank() == 0:  # both wait for rank 1, concurrently
        for graph in graphs:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.replay()
        torch.cuda.synchronize()
        time.sleep(0.3)
        with pytest.raises(to.Error, match="custom collectives of 'careless': expected one replay at a time"):
            careless.all_reduce(x[0], ReduceOp.SUM, async_op=False)
    else:
        time.sleep(2)
        careless.abort()
    for graph in graphs:
        graph.reset()
    comm.barrier(async_op=True).wait_blocking()
