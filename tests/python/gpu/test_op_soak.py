"""Many replays of operators that move data and multiply: inputs, operator and comparison are all in the graph. All
memory that a call writes, including staging memory, holds NaN before it."""

import random
import time

import pytest
import torch
from op_cases import CASES, OVER_CHANNELS
from shared_gpus import SHARES_GPU
from soak_cases import DTYPES, FUSED_DTYPES, WAITING, Replay, cases_of

pytestmark = pytest.mark.gpu(2)

NAMES = ["all_reduce", "all_gather_async", "reduce_scatter", "all_to_all_async", "broadcast", "permute",
         "all_to_all_v_async", "all_gather_matmul-pipelined", "all_gather_matmul-p2p",
         "matmul_reduce_scatter-sequential", "matmul_reduce_scatter-p2p", "matmul_all_reduce-pipelined",
         "all_to_all_matmul-pipelined", "all_to_all_matmul-p2p", "matmul_all_to_all-pipelined",
         "matmul_all_to_all-p2p", "matmul_all_reduce-p2p", "bulk_overlap_matmul-all_gather-pipelined",
         "bulk_overlap_matmul-reduce_scatter-pipelined", "bulk_overlap_matmul-all_gather-bulk",
         "bulk_overlap_matmul-reduce_scatter-bulk", "all_gather_matmul-low_latency",
         "matmul_reduce_scatter-low_latency", "matmul_all_reduce-low_latency"]  # fmt: skip
assert set(NAMES) <= {case.name for case in CASES}
assert {case.name for case in OVER_CHANNELS} <= set(NAMES)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
IS_HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9


def all_of(dtype):
    """Fused gathers are refused if ranks share a GPU."""
    cases = cases_of(dtype, has_fused=IS_HOPPER)
    return [case for case in cases if not (SHARES_GPU and "all_gather" in case.name and case.name.endswith("fused"))]


def each_of(grid):
    ids = [f"{case.name}-{str(dtype).rsplit('.', maxsplit=1)[-1]}" for case, dtype in grid]
    return pytest.mark.parametrize(("case", "dtype"), grid, ids=ids)


EACH = each_of([
    *((case, torch.float32) for case in CASES if case.name in NAMES),
    *((case, BF16) for case in all_of(BF16) if "rms_norm" in case.name or case.name.endswith("to_all-p2p")),
    *((case, E4M3) for case in all_of(E4M3) if case.name.endswith("p2p") or "all_reduce" in case.name),
])  # fmt: skip


@pytest.mark.slow
@EACH
def test_ten_thousand_replays(comm, seed, case, dtype):
    replay = Replay(comm, case, seed, dtype)
    for i in range(10_000):
        replay.graph.replay()
        if i % 1000 == 999:
            assert replay.wrong.item() == 0, i


@pytest.mark.slow
@EACH
def test_two_hundred_replays_with_a_late_rank(comm, seed, case, dtype):
    """Also runs eager calls in between."""
    replay = Replay(comm, case, seed, dtype)
    draw = random.Random(seed)  # the same on all ranks
    for _ in range(200):
        late, delay, eager = draw.randrange(comm.get_size()), draw.uniform(1e-3, 10e-3), draw.random() < 0.2
        if comm.get_rank() == late:
            time.sleep(delay)
        replay.run() if eager else replay.graph.replay()
    assert replay.wrong.item() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_operators_in_turns(comm, seed, dtype):
    """Runs 200 rounds of all operators of a dtype, on one communicator, in an order that changes: replays and eager
    calls, with one device that is 1 to 10 ms late in each round."""
    replays = [Replay(comm, case, seed + i, dtype) for i, case in enumerate(all_of(dtype))]
    draw = random.Random(seed)  # the same on all ranks
    for _ in range(200):
        late, before, milliseconds = draw.randrange(comm.get_size()), draw.choice(replays), draw.uniform(1, 10)
        for replay in draw.sample(replays, len(replays)):
            if replay is before and comm.get_rank() == late:
                torch.cuda._sleep(int(milliseconds * 1_800_000))
            replay.run() if draw.random() < 0.05 else replay.graph.replay()
    torch.cuda.synchronize()
    assert {replay.case.name for replay in replays if replay.wrong.item()} == set()


@pytest.mark.parametrize("dtype", [torch.float32, *FUSED_DTYPES, E4M3], ids=str)
def test_two_communicators_at_once(make_comm, seed, dtype):
    """Each one has channels, and a stream that nothing orders: replays of one operator run concurrently with those
    of another."""
    comms = [make_comm(f"operators_at_once_{dtype}_{i}") for i in range(2)]
    streams = [torch.cuda.Stream() for _ in comms]
    draw = random.Random(seed)
    cases = OVER_CHANNELS
    if dtype != torch.float32:
        ways = ("p2p", "bulk", "fused", "low_latency", "in_windows")
        cases = [case for case in all_of(dtype) if case.name.endswith(ways) or "norm" in case.name]
    for case in cases:
        replays = [
            Replay(comm, one, seed, dtype, stream)
            for comm, one, stream in zip(comms, (case, draw.choice(cases)), streams, strict=True)
        ]
        torch.cuda.synchronize()
        for _ in range(100):
            for replay, stream in zip(replays, streams, strict=True):
                with torch.cuda.stream(stream):
                    replay.graph.replay()
        torch.cuda.synchronize()
        assert [replay.wrong.item() for replay in replays] == [0, 0], [replay.case.name for replay in replays]


def test_eager_calls_on_several_streams(comm, seed):
    """Each operator runs after the previous one, on any streams."""
    draw = random.Random(seed)
    streams = [torch.cuda.Stream() for _ in range(3)]
    replays = [Replay(comm, case, seed) for case in WAITING for _ in streams]
    torch.cuda.synchronize()
    for _ in range(80):
        i, late = draw.randrange(len(replays)), draw.randrange(4 * comm.get_size())
        with torch.cuda.stream(streams[i % len(streams)]):
            if comm.get_rank() == late:
                torch.cuda._sleep(5_000_000)
            replays[i].run()
    torch.cuda.synchronize()
    for replay in replays:
        assert replay.wrong.item() == 0, replay.case.name
