"""Custom collectives by bulk copies: values, algorithms, graphs, and concurrent protocols.

See docs/design/kernels.md."""

import random

import pytest
import torch
from replays import replay_and_call_in_turn, replay_at_once, replay_ten_thousand_times, replay_with_late_ranks
from small_cases import (
    FLOATS,
    INTEGERS,
    KI,
    NOT_BFLOAT16,
    OPS,
    OTHERS,
    Framed,
    Step,
    algorithms,
    at_call,
    check_reduced,
    draw_all,
    draw_bytes,
    reduced,
)

import torch_overlap as to
from torch_overlap import ReduceOp

pytestmark = pytest.mark.gpu(2)

MIB = 1024 * KI
BULK = {"custom_collectives": "bulk"}
BLOCKS, SLOTS, VECTOR = 64, 16, 16


def chunk_bytes(size):
    return 16 * KI if size == 2 else 8 * KI if size <= 4 else 4 * KI


@pytest.fixture(scope="module")
def bulk(make_comm):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("bulk copies are Hopper's")
    return make_comm("bulk_copies", hints=BULK)


def sizes_of(size, seed):
    """Returns sizes in bytes, whole vectors: around a full block, a full round of all blocks, and all slots, and
    random ones."""
    choose = random.Random(seed)
    chunk = chunk_bytes(size)
    edges = (KI, 4 * KI, chunk, BLOCKS * 4 * KI, BLOCKS * chunk, 3 * BLOCKS * chunk, SLOTS * BLOCKS * chunk)
    found = {VECTOR, 3 * VECTOR} | {edge + d * VECTOR for edge in edges for d in (-1, 0, 1)}
    return sorted(found | {VECTOR * choose.randrange(1, most) for most in (300, 20_000, 1_000_000) for _ in range(3)})


class Poison:
    """Leaves NaN in all slots of all blocks by an all-reduce, whose sum is NaN too. With two ranks it has only
    parts. With more, it uses half of the blocks, with a slice for each rank and then its sum, which has slots of its
    own."""

    def __init__(self, comm):
        self.comm = comm
        size = comm.get_size()
        slots = BLOCKS * SLOTS if size == 2 else size * BLOCKS // 2 * SLOTS
        nans = torch.full((slots * chunk_bytes(size),), 0xFF, dtype=torch.uint8, device="cuda")
        self.nans = nans.view(torch.float32)

    def __call__(self):
        self.comm.all_reduce(self.nans, ReduceOp.SUM, async_op=False, hints=BULK)


# --- Values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_reductions_of_every_size(bulk, seed, dtype):
    rank, size = bulk.get_rank(), bulk.get_size()
    for bytes_ in sizes_of(size, seed):
        count = bytes_ // dtype.itemsize
        whole = draw_all(bulk, seed + bytes_, dtype, count * size)
        frame = Framed(count, dtype, (bytes_ // VECTOR + rank) % 3)  # alignment may differ by rank
        frame.inside.copy_(whole[rank][:count])
        bulk.all_reduce(frame.inside, ReduceOp.SUM, async_op=False)
        check_reduced(frame.inside, ReduceOp.SUM, [one[:count] for one in whole])
        frame.check()
        out = Framed(count, dtype, bytes_ // VECTOR % 2)
        bulk.reduce_scatter_single(out.inside, whole[rank], ReduceOp.SUM, async_op=False)
        check_reduced(out.inside, ReduceOp.SUM, [one.view(size, count)[rank] for one in whole])
        out.check()


@pytest.mark.parametrize("op", OPS, ids=lambda op: str(op).rsplit(".", maxsplit=1)[-1])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_every_reduction(bulk, seed, op, dtype):
    if op == ReduceOp.AVG and dtype in INTEGERS:
        pytest.skip("NCCL does it")
    rank, size = bulk.get_rank(), bulk.get_size()
    for count in (8, 3008, 200_000, 1_500_000):
        whole = draw_all(bulk, seed + count, dtype, count * size)
        x = whole[rank][:count].clone()
        out = torch.full((count,), 77, dtype=dtype, device="cuda")

        def calls(x=x, out=out, whole=whole):
            bulk.all_reduce(x, op, async_op=False)
            bulk.reduce_scatter_single(out, whole[rank], op, async_op=False)

        assert algorithms(calls) == ["bulk"] * 2
        check_reduced(x, op, [one[:count] for one in whole])
        check_reduced(out, op, [one.view(size, count)[rank] for one in whole])


@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_data_movement_of_every_size_and_alignment(bulk, seed, dtype, offset):
    rank, size = bulk.get_rank(), bulk.get_size()
    for bytes_ in sizes_of(size, seed + offset):
        count = bytes_ // dtype.itemsize
        every = draw_bytes(bulk, seed + bytes_, dtype, count * size).view(dtype).view(size, size, count)  # from, to
        mine = Framed(count, dtype, offset)
        mine.inside.copy_(every[rank][0])
        out = Framed(count * size, dtype, (offset + rank) % 3)
        bulk.all_gather_single(out.inside, mine.inside, async_op=False)
        assert torch.equal(out.inside.view(torch.uint8), every[:, 0].flatten().view(torch.uint8))
        out.check()

        out = Framed(count * size, dtype, (offset + rank) % 3)
        bulk.all_to_all_single(out.inside, every[rank].flatten(), async_op=False)
        assert torch.equal(out.inside.view(torch.uint8), every[:, rank].flatten().view(torch.uint8))
        out.check()

        root = bytes_ // VECTOR % size
        bulk.broadcast(mine.inside, root, async_op=False)
        assert torch.equal(mine.inside.view(torch.uint8), every[root][0].view(torch.uint8))
        mine.check()


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_data_of_every_dtype(bulk, seed, dtype):
    size, count = bulk.get_size(), 64_000
    every = draw_bytes(bulk, seed, dtype, count)
    out = torch.zeros(size * count, dtype=dtype, device="cuda")
    mine = every[bulk.get_rank()].view(dtype)
    assert algorithms(lambda: bulk.all_gather_single(out, mine, async_op=False)) == ["bulk"]
    assert torch.equal(out.view(torch.uint8), every.flatten())


@pytest.mark.parametrize("offset", [0, 1])
def test_lists_and_in_place(bulk, seed, offset):
    rank, size = bulk.get_rank(), bulk.get_size()
    for count in (4, 10_000, 1_000_000):
        parts = draw_all(bulk, seed + count, torch.float32, count)
        outs = [Framed(count, torch.float32, (r + offset) % 3) for r in range(size)]
        bulk.all_gather([out.inside for out in outs], parts[rank], async_op=False)
        for out, part in zip(outs, parts, strict=True):
            assert torch.equal(out.inside, part)
            out.check()

        frame = Framed(size * count, torch.float32, offset)
        whole = frame.inside.view(size, count)
        whole[rank] = parts[rank]
        bulk.all_gather_single(frame.inside, whole[rank], async_op=False)
        assert torch.equal(whole, torch.stack(parts))
        frame.check()

        inputs = draw_all(bulk, seed + count + 1, torch.float32, count * size)
        frame = Framed(size * count, torch.float32, offset)
        into = frame.inside.view(size, count)
        into.copy_(inputs[rank].view(size, count))
        bulk.reduce_scatter_single(into[rank], frame.inside, ReduceOp.SUM, async_op=False)
        expected = reduced(ReduceOp.SUM, [one.view(size, count)[rank] for one in inputs], torch.float32)
        assert torch.equal(into[rank], expected)
        frame.check()

        frame.inside.copy_(inputs[rank])
        bulk.all_to_all_single(frame.inside, frame.inside, async_op=False)
        assert torch.equal(frame.inside, torch.cat([one.view(size, count)[rank] for one in inputs]))


def test_all_ranks_have_the_same_bits(comm, bulk, seed):
    size = bulk.get_size()
    for count in (8, 3000, 2_000_000):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            x = draw_all(bulk, seed, dtype, count)[bulk.get_rank()]
            bulk.all_reduce(x, ReduceOp.SUM, async_op=False)
            bits = x.view(torch.uint8)
            others = torch.empty(size * bits.numel(), dtype=torch.uint8, device="cuda")
            comm.all_gather_single(others, bits, async_op=False, hints={"custom_collectives": "off"})
            for other in others.view(size, -1):
                assert torch.equal(other, bits)


def test_a_norm_comes_behind(bulk, seed):
    rows, features = 512, 4096
    x = draw_all(bulk, seed, torch.bfloat16, rows * features)
    mine = x[bulk.get_rank()].view(rows, features)
    weight = torch.rand(features, dtype=torch.bfloat16, device="cuda")
    out, residual = to.ops.all_reduce_rms_norm(mine.clone(), torch.zeros_like(mine), weight, bulk)
    total = reduced(ReduceOp.SUM, x, torch.bfloat16).view(rows, features)
    assert torch.equal(residual, total)
    exact = torch.nn.functional.rms_norm(total.double(), (features,), weight.double(), 1e-6)
    assert (out.double() - exact).abs().max() <= 2**-7 * exact.abs().max()


def test_what_stands_in_for_parts_that_are_not_aligned_is_small(bulk, seed):
    """Sizes have no limit: pieces of 128 MiB, also on ranks whose parts are aligned."""
    rank, size, most = bulk.get_rank(), bulk.get_size(), 128 * MIB
    count = (2 * most + 48 * KI) // 2
    whole = torch.empty(count + 8, dtype=torch.bfloat16, device="cuda")
    x = whole[rank % 2 : rank % 2 + count]
    parts = [(torch.arange(count, device="cuda") * (r + 3) % 251).to(torch.bfloat16) for r in range(size)]
    x.copy_(parts[rank])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    bulk.all_reduce(x, ReduceOp.SUM, async_op=False)
    assert torch.cuda.max_memory_allocated() - before <= most + 2 * MIB
    check_reduced(x, ReduceOp.SUM, parts)
    gathered = torch.empty(size, count, dtype=torch.bfloat16, device="cuda")
    bulk.all_gather_single(gathered, whole[1 - rank % 2 :][:count].copy_(parts[rank]), async_op=False)
    assert torch.equal(gathered, torch.stack(parts))


# --- Which algorithm ---------------------------------------------------------------------------------------------


def test_large_whole_vectors_go_by_bulk_copies(comm, bulk):
    large = torch.ones(8 * MIB, device="cuda")
    odd = torch.ones(8 * MIB + 1, device="cuda")

    def calls(on, hints):
        for x in (large, large[1:-3], odd):
            on.all_reduce(x, ReduceOp.SUM, async_op=False, hints=hints)

    assert algorithms(lambda: calls(bulk, None)) == ["bulk", "bulk", "nccl"]
    automatic = algorithms(lambda: calls(comm, {"custom_collectives": "auto"}))
    if comm.get_size() == 2:
        assert automatic == ["bulk", "bulk", "nccl"]
    else:
        assert "bulk" not in automatic


def test_few_blocks_do_it_too(make_comm, seed):
    """Tests the hint maxCTAs."""
    few = make_comm("bulk_of_few_blocks", hints={**BULK, "maxCTAs": "3"})
    for count in (8, 100_000, 3_000_000):
        parts = draw_all(few, seed + count, torch.bfloat16, count)
        x = parts[few.get_rank()].clone()
        assert algorithms(lambda x=x: few.all_reduce(x, ReduceOp.SUM, async_op=False)) == ["bulk"]
        check_reduced(x, ReduceOp.SUM, parts)


# --- In graphs, and concurrently with other operations -----------------------------------------------------------


@pytest.mark.parametrize("count", [8, 5000, 80_000, 1_200_000])
def test_slots_that_hold_nan(bulk, seed, count):
    """Replays and eager calls take turns, on inputs that change; one rank is occasionally late."""
    step = Step(bulk, count, before=Poison(bulk))
    graph = step.capture()
    replay_and_call_in_turn(bulk, step, graph, seed, 12)
    step.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64], ids=str)
def test_protocols_take_turns(bulk, seed, dtype):
    """Protocols share epochs, and each has flags and slots of its own: tests every order of two."""
    rank, choose = bulk.get_rank(), random.Random(seed)
    inputs = {n: draw_all(bulk, seed + n, dtype, n) for n in (16, 4000, 100_000, 2_000_000)}
    for _ in range(150):
        mode = choose.choice(["bulk", "bulk", "simple", "ll", "ll128", "two_shot", "always"])
        parts = inputs[choose.choice(list(inputs))]
        x = parts[rank].clone()
        bulk.all_reduce(x, ReduceOp.SUM, async_op=False, hints={"custom_collectives": mode})
        assert torch.equal(x, reduced(ReduceOp.SUM, parts, dtype))


def test_two_communicators_at_once(make_comm, bulk):
    """Replays on streams of their own, which nothing orders."""
    comms = [bulk, make_comm("bulk_at_once", hints=BULK)]
    steps = [Step(one, count, has_unequal=False) for one, count in zip(comms, (40_000, 1_000_000), strict=True)]
    graphs = [step.capture() for step in steps]
    replay_at_once(graphs, 200)
    for step in steps:
        step.check()


LATE = [(count, torch.bfloat16) for count in (64, 200_000)] + [(60_000, dtype) for dtype in NOT_BFLOAT16]


@pytest.mark.parametrize(("count", "dtype"), LATE, ids=str)
def test_two_hundred_replays_with_a_late_rank(bulk, seed, count, dtype):
    step = Step(bulk, count, dtype, before=Poison(bulk))
    graph = step.capture()
    replay_with_late_ranks(bulk, graph, seed)
    step.check()


@pytest.mark.slow
@pytest.mark.parametrize("count", [64, 60_000, 600_000])
def test_ten_thousand_replays(bulk, count):
    step = Step(bulk, count, before=Poison(bulk), has_unequal=False)
    graph = step.capture()
    replay_ten_thousand_times(graph)
    step.check()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NOT_BFLOAT16, ids=str)
def test_ten_thousand_replays_of_other_dtypes(bulk, dtype):
    """Graphs take turns; in each one the slots are filled with NaN before another of the operations."""
    poison, calls = Poison(bulk), Step.CALLS
    steps = [Step(bulk, 60_000, dtype, before=at_call(i, calls, poison), has_unequal=False) for i in range(calls)]
    replay_ten_thousand_times(*[step.capture() for step in steps])
    for step in steps:
        step.check()
