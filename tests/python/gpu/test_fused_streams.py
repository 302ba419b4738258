"""The fused kernels with several in flight on streams that nothing orders, and with ranks that have no rows."""

import json
import random

import pytest
import torch
from shared_gpus import SHARES_GPU
from test_fused import KINDS, AllReduce, Scatter, capture, replay

import torch_overlap as to

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="the kernels are for sm_90"
    ),
]

separate = pytest.mark.skipif(SHARES_GPU, reason="ranks that share a GPU take no turns")
# Few tiles: kernels that wait for other ranks fit concurrently.
SHAPE = (100, 264, 520)
# Rows of a rank, input and output features, of kernels that leave two SMs to other groups: tiles that the kernel sends,
# and pieces that copy engines send.
WHOLE = {"one wave": (512, 512, 4096), "tiles": (768, 512, 4096), "pieces": (2048, 512, 4096)}
MILLISECOND = 2_000_000  # of clocks, approximately


def test_channels_at_once(make_comm, seed):
    """Runs one of each kind on a communicator of its own, in an order that changes."""
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


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("way", ["ll128", "simple"])
@pytest.mark.parametrize("shape", WHOLE)
def test_a_collective_of_another_group_beside_a_reduction(make_comm, seed, shape, way, mode):
    """On rank 0 the reduction has its SMs before the collective is launched, after a product. On the others the
    collective's blocks are resident (with two ranks, on all SMs) when the reduction is launched."""
    name = f"{shape}_{way}_{mode}"
    own, other = make_comm(f"reduces_{name}"), make_comm(f"beside_{name}")
    case = Scatter(own, *WHOLE[shape], torch.bfloat16)
    x = torch.empty(1 << 22, dtype=torch.float32, device="cuda")
    square = torch.randn(1024, 1024, dtype=torch.bfloat16, device="cuda")

    def reduce_beside():
        other.all_reduce(x, to.ReduceOp.SUM, False, hints={"custom_collectives": way})

    reduce_beside()
    if (taken := json.loads(to.flight_recorder.dump_json())["entries"][-1]["algorithm"]) != way:
        pytest.skip(f"here it is {taken}")
    square @ square
    graph, outs = capture(case.run) if mode == "graph" else (None, case.run())
    first = own.get_rank() == 0
    streams = [torch.cuda.Stream() for _ in range(2)]
    for i in range(4):
        case.fill()
        x.fill_(i + 1)
        torch.cuda.synchronize()
        own.barrier(False)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(1 if first else 3 * MILLISECOND)
            if graph is not None:
                graph.replay()
            else:
                outs = case.run()
        with torch.cuda.stream(streams[1]):
            torch.cuda._sleep(12 * MILLISECOND if first else 1)
            if first:
                square @ square
            reduce_beside()
        torch.cuda.synchronize()
        case.check(outs)
        assert (x == (i + 1) * own.get_size()).all()


@separate  # otherwise kernels take no turns
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_reductions_of_several_groups_in_the_order_of_the_calls(make_comm, seed, mode):
    """Runs on streams, or on branches of a graph, each of which is late on some rank."""
    draw = random.Random(seed)  # the same on all ranks
    cases = [Scatter(make_comm(f"turns_{mode}_{i}"), *WHOLE[shape], torch.bfloat16)
             for i, shape in enumerate(["pieces", "tiles", "one wave", "pieces"])]  # fmt: skip
    streams = [torch.cuda.Stream() for _ in cases]

    def run():
        results = []
        here = torch.cuda.current_stream()
        for i in draw.sample(range(len(cases)), len(cases)):
            late, ms = draw.randrange(2 * cases[i].comm.get_size()), draw.randrange(1, 4)
            streams[i].wait_stream(here)
            with torch.cuda.stream(streams[i]):
                if cases[i].comm.get_rank() == late:
                    torch.cuda._sleep(ms * MILLISECOND)
                results.append((cases[i], cases[i].run()))
        for stream in streams:
            here.wait_stream(stream)
        return results

    run()
    graphs = [capture(run) for _ in range(6)] if mode == "graph" else []
    for i in range(30):
        for case in cases:
            case.fill()
        torch.cuda.synchronize()
        if graphs:
            graph, results = graphs[i % len(graphs)]
            graph.replay()
        else:
            results = run()
        torch.cuda.synchronize()
        for case, outs in results:
            case.check(outs)


def test_one_channel_on_several_streams(comm, seed):
    """Eager calls run one after the other, on any streams."""
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
