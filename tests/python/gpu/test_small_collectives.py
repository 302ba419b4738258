"""Collectives that custom kernels run instead of NCCL: their values, and the algorithm of a call. See
docs/design/kernels.md."""

import random

import pytest
import torch
from small_cases import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    KI,
    MODES,
    OPS,
    OTHERS,
    Framed,
    algorithms,
    check_reduced,
    draw,
    draw_all,
    draw_bytes,
    edges,
    reduced,
)

import torch_overlap as to
from torch_overlap import ReduceOp

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(scope="module")
def always(make_comm):
    return make_comm("always_custom", hints={"custom_collectives": "always"})


# --- Values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_all_reduce_of_every_size(comm, seed, dtype):
    for mode in MODES:
        for count in edges(dtype.itemsize):
            parts = draw_all(comm, seed + count, dtype, count)
            frame = Framed(count, dtype, count % 4)
            frame.inside.copy_(parts[comm.get_rank()])
            comm.all_reduce(frame.inside, ReduceOp.SUM, async_op=False, hints={"custom_collectives": mode})
            check_reduced(frame.inside, ReduceOp.SUM, parts, mode != "auto" or frame.inside.nbytes <= 128 * KI)
            frame.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", OPS, ids=lambda op: str(op).rsplit(".", maxsplit=1)[-1])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_every_reduction(comm, seed, op, dtype, mode):
    if op == ReduceOp.AVG and dtype in INTEGERS:
        pytest.skip("NCCL does it")
    hints = {"custom_collectives": mode}
    rank, size = comm.get_rank(), comm.get_size()
    for count in (1, 13, 3001, 70_001, 200_003):
        parts = draw_all(comm, seed + count, dtype, count)
        x = parts[rank].clone()
        comm.all_reduce(x, op, async_op=False, hints=hints)
        check_reduced(x, op, parts, mode != "auto")
        whole = draw_all(comm, seed + count + 1, dtype, count * size)
        out = torch.full((count,), 77, dtype=dtype, device="cuda")
        comm.reduce_scatter_single(out, whole[rank], op, async_op=False, hints=hints)
        check_reduced(out, op, [part.view(size, count)[rank] for part in whole], mode in ("ll", "ll128", "simple"))


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_sums_of_complex_numbers(comm, seed, dtype):
    rank, size = comm.get_rank(), comm.get_size()
    real = dtype.to_real()
    for mode in ("ll", "ll128", "simple", "two_shot"):
        for count in (1, 13, 3001, 70_001):
            parts = draw_all(comm, seed + count, real, 2 * count * size)
            mine = torch.view_as_complex(parts[rank].clone().view(-1, 2))
            for op in (ReduceOp.SUM, ReduceOp.AVG):
                x = mine[:count].clone()
                comm.all_reduce(x, op, async_op=False, hints={"custom_collectives": mode})
                check_reduced(torch.view_as_real(x).flatten(), op, [part[: 2 * count] for part in parts])
                out = torch.full((count,), 77, dtype=dtype, device="cuda")
                comm.reduce_scatter_single(out, mine, op, async_op=False, hints={"custom_collectives": mode})
                check_reduced(torch.view_as_real(out).flatten(), op,
                              [part.view(size, 2 * count)[rank] for part in parts], mode != "two_shot")  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + COMPLEX + OTHERS, ids=str)
def test_data_movement_of_every_dtype(comm, seed, dtype):
    """Compares random bytes as bytes."""
    rank, size = comm.get_rank(), comm.get_size()
    for mode in ("ll", "ll128", "simple"):
        options = {"async_op": False, "hints": {"custom_collectives": mode}}
        for count in (1, 13, 3001, 70_001):
            every = draw_bytes(comm, seed + count, dtype, count * size)
            parts = every.view(size, size, -1)  # from, to
            out = torch.zeros_like(every[0])
            comm.all_gather_single(out.view(dtype), parts[rank][0].view(dtype), **options)
            assert torch.equal(out, parts[:, 0].flatten())
            comm.all_to_all_single(out.view(dtype), every[rank].view(dtype), **options)
            assert torch.equal(out, parts[:, rank].flatten())
            counts = [max(count - abs(rank - r), 0) for r in range(size)]  # equal in both directions
            sent = torch.cat([parts[rank][r][: n * dtype.itemsize] for r, n in enumerate(counts)])
            out = torch.zeros_like(sent)
            comm.all_to_all_v_single(out.view(dtype), sent.view(dtype), counts, counts, **options)
            assert torch.equal(out, torch.cat([parts[r][rank][: n * dtype.itemsize] for r, n in enumerate(counts)]))
            x = parts[rank][0].clone()
            comm.broadcast(x.view(dtype), count % size, **options)
            assert torch.equal(x, parts[count % size][0])


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_data_movement_of_every_size_and_alignment(comm, seed, dtype, offset):
    rank, size = comm.get_rank(), comm.get_size()
    for mode in ("auto", "ll", "ll128", "simple"):
        hints = {"custom_collectives": mode}
        for count in edges(dtype.itemsize, high=1024 * KI):
            parts = draw_all(comm, seed + count, dtype, count)
            mine = Framed(count, dtype, offset)
            mine.inside.copy_(parts[rank])
            out = Framed(count * size, dtype, (offset + rank) % 4)  # alignment may differ by rank
            comm.all_gather_single(out.inside, mine.inside, async_op=False, hints=hints)
            assert torch.equal(out.inside, torch.cat(parts))
            out.check()

            root = count % size
            comm.broadcast(mine.inside, root, async_op=False, hints=hints)
            assert torch.equal(mine.inside, parts[root])
            mine.check()

            whole = draw_all(comm, seed + count + 1, dtype, count * size)
            out = Framed(count * size, dtype, (offset + rank) % 4)
            comm.all_to_all_single(out.inside, whole[rank], async_op=False, hints=hints)
            assert torch.equal(out.inside, torch.cat([one.view(size, count)[rank] for one in whole]))
            out.check()


def test_lists_and_in_place(always, seed):
    rank, size = always.get_rank(), always.get_size()
    for count in (1, 1001, 100_003, 1_000_003):
        parts = draw_all(always, seed + count, torch.float32, count)
        outs = [Framed(count, torch.float32, r % 3) for r in range(size)]
        always.all_gather([out.inside for out in outs], parts[rank], async_op=False)
        for out, part in zip(outs, parts, strict=True):
            assert torch.equal(out.inside, part)
            out.check()

        whole = torch.zeros(size, count, device="cuda")
        whole[rank] = parts[rank]
        always.all_gather_single(whole.view(-1), whole[rank], async_op=False)
        assert torch.equal(whole, torch.stack(parts))

        inputs = draw_all(always, seed + count + 1, torch.float32, count * size)
        expected = reduced(ReduceOp.SUM, [one.view(size, count)[rank] for one in inputs], torch.float32)
        into = inputs[rank].clone().view(size, count)
        always.reduce_scatter_single(into[rank], into.view(-1), ReduceOp.SUM, async_op=False)
        assert torch.equal(into[rank], expected)
        got = torch.empty(count, device="cuda")
        always.reduce_scatter(got, list(inputs[rank].view(size, count)), ReduceOp.SUM, async_op=False)
        assert torch.equal(got, expected)

        into = inputs[rank].clone()
        always.all_to_all_single(into, into, async_op=False)
        assert torch.equal(into, torch.cat([one.view(size, count)[rank] for one in inputs]))


@pytest.mark.parametrize("mode", ["always", "ll", "ll128"])
def test_unequal_parts(comm, seed, mode):
    """Parts may be empty: a rank and its peer need not have data for each other."""
    rank, size = comm.get_rank(), comm.get_size()
    choose = random.Random(seed)
    for step in range(30):
        most = choose.choice([3, 300, 30_000, 3_000_000])
        splits = [[choose.choice([0, choose.randrange(most)]) for _ in range(size)] for _ in range(size)]
        inputs = [draw(comm, seed + step, torch.float16, sum(splits[r]), r) for r in range(size)]
        out = Framed(sum(splits[r][rank] for r in range(size)), torch.float16, step % 3)
        comm.all_to_all_v_single(out.inside, inputs[rank], [splits[r][rank] for r in range(size)], splits[rank],
                                   async_op=False, hints={"custom_collectives": mode})  # fmt: skip
        expected = [inputs[r].split(splits[r])[rank] for r in range(size)]
        assert torch.equal(out.inside, torch.cat(expected))
        out.check()


@pytest.mark.parametrize("who", ["all ranks", "rank 0"])
def test_registered_tensors(comm, seed, who):
    """Sends from and receives into registered memory, also while other ranks have plain tensors, which NCCL forbids;
    in graphs too."""
    rank, size = comm.get_rank(), comm.get_size()
    is_registered = who == "all ranks" or rank == 0
    for count in (1001, 400_003):
        parts = draw_all(comm, seed + count, torch.bfloat16, count)
        room = count * (size + 2)
        memory = torch.empty(room, dtype=torch.bfloat16, device="cuda")
        if is_registered:
            memory = to.symmetric_empty(room, torch.bfloat16, comm)
            comm.tensor_register(memory)
        x, part, whole = memory.split([count, count, count * size])
        for mode in MODES:
            if mode == "two_shot" and who != "all ranks":
                continue  # has no gather: NCCL does it
            options = {"async_op": False, "hints": {"custom_collectives": mode}}

            def calls(x=x, part=part, whole=whole, options=options):
                comm.all_gather_single(whole, x, **options)
                comm.reduce_scatter_single(part, whole, ReduceOp.MAX, **options)
                comm.all_reduce(x, ReduceOp.SUM, **options)

            graph = torch.cuda.CUDAGraph()
            x.copy_(parts[rank])
            calls()
            with torch.cuda.graph(graph):
                calls()
            for run in (calls, graph.replay):
                memory.fill_(float("nan"))
                x.copy_(parts[rank])
                run()
                check_reduced(x, ReduceOp.SUM, parts, mode != "auto" or x.nbytes <= 128 * KI)
                assert torch.equal(whole, torch.cat(parts))
                assert torch.equal(part, parts[rank])
            del graph
        if is_registered:
            comm.tensor_deregister(memory)


def test_gathers_between_sums_in_two_shots(make_comm):
    """Calls one after the other, of many rounds and of one: a rank with more data is ahead in its slots."""
    wide = make_comm("wide_in_turns", hints={"custom_collectives": "ll128"})
    rank, size = wide.get_rank(), wide.get_size()
    for step in range(200):
        many = torch.full((1_000_003 if step % 3 else 250_001,), float(rank + step), device="cuda")
        parts = torch.arange(300_001, dtype=torch.float32, device="cuda") + rank * step
        gathered, few = many.new_empty(size, 300_001), many.new_empty(size, 4001)
        if step % 2:
            wide.all_gather_single(gathered.view(-1), parts, async_op=False)
        wide.all_reduce(many, ReduceOp.SUM, async_op=False)
        wide.all_gather_single(few.view(-1), parts[:4001].contiguous(), async_op=False)
        assert (many == size * step + size * (size - 1) // 2).all()
        of_rank = torch.arange(size, device="cuda").unsqueeze(1) * step
        every = torch.arange(300_001, dtype=torch.float32, device="cuda") + of_rank
        assert torch.equal(few, every[:, :4001])
        assert step % 2 == 0 or torch.equal(gathered, every)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_all_ranks_have_the_same_bits(comm, always, seed, dtype):
    size = comm.get_size()
    for count in (5, 3001, 50_001, 300_007, 2_000_003):
        x = draw(comm, seed, dtype, count, comm.get_rank())
        always.all_reduce(x, ReduceOp.SUM, async_op=False)
        bits = x.view(torch.uint8)
        all_bits = torch.empty(size * bits.numel(), dtype=torch.uint8, device="cuda")
        comm.all_gather_single(all_bits, bits, async_op=False, hints={"custom_collectives": "off"})
        for other in all_bits.view(size, -1):
            assert torch.equal(other, bits)


def test_nan_and_infinity_pass_through(always):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0], device="cuda")
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN):
        y = x.clone()
        always.all_reduce(y, op, async_op=False)
        assert y[0].isnan()
        assert y[1] == float("inf")
        assert y[2] == -float("inf")


# --- Which algorithm -----------------------------------------------------------------------------------------


def test_the_recorder_names_the_way(comm, always, make_comm):
    small, large = torch.ones(100, device="cuda"), torch.ones(32 << 20, device="cuda")
    never = make_comm("never_custom", hints={"custom_collectives": "off"})

    def calls():
        for on in (comm, always, never):
            for x in (small, large):
                on.all_reduce(x, ReduceOp.SUM, async_op=False)
        for mode in ("off", "auto", "always"):
            never.all_reduce(small, ReduceOp.SUM, async_op=False, hints={"custom_collectives": mode})
        comm.all_reduce(small.to(torch.int8), ReduceOp.SUM, async_op=False)
        comm.reduce(small, 0, ReduceOp.SUM, async_op=False)

    is_pair, has_bulk = comm.get_size() == 2, torch.cuda.get_device_capability()[0] >= 9
    by_itself = "bulk" if is_pair and has_bulk else "nccl"
    asked_for = "bulk" if has_bulk else "simple" if is_pair else "two_shot"
    few = "ll"  # 400 bytes
    assert algorithms(calls) == [few, by_itself, few, asked_for, "nccl", "nccl", "nccl", few, few, "nccl", "nccl"]


def test_switched_off_all_is_left_to_nccl(nccl_comm):
    """test_values.py, test_graphs.py and test_graph_soak.py rely on this."""
    size = nccl_comm.get_size()
    x, whole = torch.ones(100, device="cuda"), torch.ones(100 * size, device="cuda")
    outs = [torch.empty_like(x) for _ in range(size)]

    def calls():
        nccl_comm.all_reduce(x, ReduceOp.SUM, async_op=False)
        nccl_comm.broadcast(x, 1, async_op=False)
        nccl_comm.all_gather(outs, x, async_op=False)
        nccl_comm.all_gather_single(whole, x, async_op=False)
        nccl_comm.reduce_scatter(x, list(whole.chunk(size)), ReduceOp.SUM, async_op=False)
        nccl_comm.reduce_scatter_single(x, whole, ReduceOp.SUM, async_op=False)
        nccl_comm.all_to_all_single(torch.empty_like(whole), whole, async_op=False)

    assert algorithms(calls) == ["nccl"] * 7


def test_a_bad_mode_is_an_error(comm):
    x = torch.ones(4, device="cuda")
    with pytest.raises(
        to.InvalidValueError,
        match="hint custom_collectives: expected off, auto, always, ll, ll128, simple, two_shot, bulk or zero_copy, "
        "got 'fast'",
    ):
        comm.all_reduce(x, ReduceOp.SUM, async_op=False, hints={"custom_collectives": "fast"})


def test_the_environment_is_the_default(make_comm, monkeypatch):
    monkeypatch.setenv("TORCH_OVERLAP_CUSTOM_COLLECTIVES", "off")
    without = make_comm("by_environment")
    x = torch.ones(4, device="cuda")
    assert algorithms(lambda: without.all_reduce(x, ReduceOp.SUM, async_op=False)) == ["nccl"]


def test_a_capture_before_the_first_call_leaves_it_to_nccl(make_comm):
    fresh = make_comm("captures_first", hints={"custom_collectives": "off"})
    x = torch.ones(1000, device="cuda")
    fresh.all_reduce(x, ReduceOp.SUM, async_op=False)
    fresh.set_hints({"custom_collectives": "auto"})
    graph = torch.cuda.CUDAGraph()

    def record():
        with torch.cuda.graph(graph):
            fresh.all_reduce(x, ReduceOp.SUM, async_op=False)

    assert algorithms(record) == ["nccl"]
    x.fill_(1)
    graph.replay()
    fresh.all_reduce(x, ReduceOp.SUM, async_op=False)
    assert (x == fresh.get_size() ** 2).all()


def test_split_and_nccl_in_between(comm, seed):
    """Operations of both kinds take turns, async and not, on the parent and on a child."""
    child = comm.split(list(range(comm.get_size())), "custom_child")
    rank, size = comm.get_rank(), comm.get_size()
    for step in range(50):
        for on in (comm, child):
            parts = draw_all(comm, seed + step, torch.bfloat16, 4000 + step)
            x, y = parts[rank].clone(), parts[rank].clone()
            gathered = torch.empty(size * x.numel(), dtype=x.dtype, device="cuda")
            works = [
                on.all_reduce(x, ReduceOp.SUM, async_op=True),
                on.all_gather_single(gathered, parts[rank], async_op=True, hints={"custom_collectives": "off"}),
                on.all_reduce(y, ReduceOp.MAX, async_op=step % 2 == 0),
            ]
            for work in works:
                work.wait()
            check_reduced(x, ReduceOp.SUM, parts)
            check_reduced(y, ReduceOp.MAX, parts)
            assert torch.equal(gathered, torch.cat(parts))
    child.finalize()


def test_streams_of_the_user(comm, seed):
    """Each operation waits on the device for the previous one."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    parts = draw_all(comm, seed, torch.float32, 30_000)
    x = [parts[comm.get_rank()].clone() for _ in range(30)]
    torch.cuda.synchronize()
    for i, one in enumerate(x):
        with torch.cuda.stream(streams[i % 3]):
            if i % 5 == 0:
                torch.cuda._sleep(1_000_000)
            comm.all_reduce(one, ReduceOp.SUM, async_op=False)
    torch.cuda.synchronize()
    for one in x:
        check_reduced(one, ReduceOp.SUM, parts)
