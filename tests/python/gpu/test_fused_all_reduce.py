"""Product and all-reduce of few rows in one kernel: values of every tile, by LL and Simple, in any order, with late
ranks; the same bits on all ranks; errors."""

from datetime import timedelta

import pytest
import torch
from replays import replay_ten_thousand_times, replay_with_late_ranks
from test_low_latency import (
    Problem,
    Sums,
    capture,
    check_eager_and_captured,
    check_replays,
    differ,
    have_the_same_bits,
    late,
    replay_two_at_once,
    stay_away,
    take_turns,
)

import torch_overlap as to
from torch_overlap import _C, _tuning, ops
from torch_overlap.quantize import ScalingMode as Mode

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="the kernels are for sm_90"
    ),
]
DTYPES = [torch.float16, torch.bfloat16]
# Rows, features, inner size: on both sides of each kernel's limits, with tiles that are partial in both dimensions, k
# of less than a stage, of one, of more than the number of stages, and features for more blocks than a GPU has SMs.
SHAPES = [
    (1, 8, 8), (5, 520, 64), (16, 4096, 1032), (17, 264, 72), (32, 9000, 128), (33, 1000, 2056), (64, 1024, 520),
    (65, 520, 4104), (128, 264, 72), (129, 136, 128), (200, 4104, 264), (256, 2048, 1000), (255, 9000, 200),
]  # fmt: skip
VECTORS_OF_FEW_ROWS = [(16, 49_168, 16), (60, 12_808, 72)]


class Few(Problem):
    def __init__(self, comm, shape, dtype=torch.bfloat16, op="sum", biased=True):
        super().__init__(comm, "sum", shape, dtype, op, biased)

    def run(self, algorithm="fused"):
        return super().run(algorithm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *VECTORS_OF_FEW_ROWS], ids=str)
def test_eager_and_captured(comm, seed, shape, dtype):
    check_eager_and_captured(
        comm, seed, [Few(comm, shape, dtype, op, biased) for op, biased in (("sum", False), ("avg", True))]
    )


@pytest.mark.parametrize("rows", [16, 100, 256])
def test_operands_that_lie_in_other_ways(comm, seed, rows):
    """Operands are laid out differently on each rank: a weight stored along its features, misaligned rows,
    transposed rows."""
    problem = Few(comm, (rows, 520, 136))
    x, w = problem.x, problem.w
    for turn in range(3):
        way = (comm.get_rank() + turn) % 3
        problem.x, problem.w = x, w
        if way == 0:
            problem.w = torch.empty_like(w.t().contiguous()).t()
        elif way == 1:
            problem.x = torch.empty(x.numel() + 3, dtype=x.dtype, device="cuda")[3:].view(x.shape)
        else:
            problem.x = torch.empty_like(x.t().contiguous()).t()
        problem.fill(seed + turn)
        problem.check(problem.run())


@pytest.mark.parametrize("shape", [(7, 520, 136), (64, 4096, 512), (128, 2048, 512), (256, 4096, 512)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_sums_have_the_same_bits_everywhere_and_in_every_call(comm, seed, shape, biased):
    problem = Few(comm, shape, biased=biased)
    problem.fill(seed)
    have_the_same_bits(comm, problem)


SOAKED = [((1, 64, 32), torch.bfloat16), ((60, 2048, 96), torch.float16), ((128, 4096, 32), torch.bfloat16),
          ((250, 2056, 72), torch.float16), ((16, 49_168, 16), torch.bfloat16)]  # fmt: skip


def soaked(comm, case):
    """Leaves NaN in both slots of the shared memory."""
    return Sums(Few(comm, *SOAKED[case], biased=False), poisonings=2)


def test_any_order_with_late_ranks(comm, make_comm, seed):
    """LL and Simple, over the memory of two communicators."""
    comms = [comm, make_comm("fused_all_reduce_beside")]
    take_turns(comm, seed, [soaked(one, case) for one in comms for case in range(len(SOAKED))])


@pytest.mark.parametrize("case", range(len(SOAKED)))
def test_two_hundred_replays_with_a_late_rank(comm, seed, case):
    check_replays(soaked(comm, case), lambda graph: replay_with_late_ranks(comm, graph, seed))


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(SOAKED)))
def test_ten_thousand_replays(comm, case):
    check_replays(soaked(comm, case), replay_ten_thousand_times)


def test_sizes_in_turn_with_nothing_between(comm, seed):
    """Each call writes while the previous one, of another size, may still be read."""
    shapes = [
        (16, 9000, 16),
        (16, 4096, 16),
        (1, 264, 16),
        (60, 2048, 16),
        (128, 520, 16),
        (256, 4104, 16),
        (65, 64, 16),
    ]
    problems = [Few(comm, shape, biased=False) for shape in shapes]
    for i, problem in enumerate(problems):
        problem.fill(seed + i)
    order = [i for first in range(len(problems)) for second in range(len(problems)) for i in (first, second)]
    wanted = [problem.run()[0] for problem in problems]
    for problem, want in zip(problems, wanted, strict=True):
        problem.check([want])
    graph, results = capture(lambda: [problems[i].run()[0] for i in order])
    for step in range(20):
        for result in results:
            result.fill_(float("nan"))
        late(comm, step)
        graph.replay()
        for i, result in zip(order, results, strict=True):
            assert torch.equal(result, wanted[i]), (step, i)
    graph.reset()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", [Mode.CURRENT_TENSOR_SCALING, Mode.ROW_SCALING], ids=lambda mode: mode.name)
@pytest.mark.parametrize("shape", [(3, 520, 144), (17, 1000, 1040), (128, 264, 4112), (250, 4104, 272)], ids=str)
def test_scaled_operands(comm, seed, shape, mode, out_dtype):
    """One factor for a tensor, or for each row and feature; magnitudes differ."""
    rows, features, inner = shape
    draw = torch.Generator().manual_seed(seed)
    total, magnitude = 0, 0
    for rank in range(comm.get_size()):
        x, w = (
            torch.randn(n, inner, generator=draw) * torch.rand(n, 1, generator=draw).mul(2).exp()
            for n in (rows, features)
        )
        (data, scale_inv, *_), (weight, weight_scale_inv, *_) = (ops.quantize(t.cuda(), mode) for t in (x, w))
        xs, ws = (ops.dequantize(*pair, mode).double() for pair in ((data, scale_inv), (weight, weight_scale_inv)))
        total, magnitude = total + xs @ ws.t(), magnitude + xs.abs() @ ws.abs().t()
        if rank == comm.get_rank():
            mine = (data, scale_inv, weight, weight_scale_inv)
    got = ops.scaled_matmul_all_reduce(*mine, comm, out_dtype=out_dtype, scaling_mode=mode, algorithm="fused")
    step = torch.finfo(out_dtype).eps
    bound = step * total.abs() + (2.0**-10 + step) * magnitude + 1e-5
    assert ((got.double() - total).abs() <= bound).all()


def test_more_room_between_graphs_and_other_algorithms(comm, seed):
    """A larger call allocates new memory; the graph of the smaller one keeps the old memory."""
    small, large = Few(comm, (8, 264, 64)), Few(comm, (256, 8192, 64))
    small.fill(seed)
    small.run()
    graph, results = capture(small.run)
    for step, algorithm in enumerate(("fused", "low_latency", "p2p", "fused")):
        large.fill(seed + step)
        large.check(large.run(algorithm))
        small.fill(seed + 10 + step)
        graph.replay()
        small.check(results)
        small.check(small.run())
    graph.reset()


@pytest.mark.parametrize("rows", [16, 200])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_rank_that_stays_away(comm, make_comm, seed, rows, mode):
    problem = Few(make_comm(f"fused_all_reduce_away_{rows}_{mode}"), (rows, 512, 64))
    problem.fill(seed)
    stay_away(comm, problem, mode)


@pytest.mark.parametrize("rows", [16, 200])
def test_rows_that_differ(comm, make_comm, rows):
    other = make_comm(f"fused_all_reduce_rows_{rows}", timeout=timedelta(seconds=60))
    Few(other, (rows, 512, 64)).run()  # allocates the memory
    differ(Few(other, (rows - 8 if other.get_rank() == other.get_size() - 1 else rows, 512, 64)))


@pytest.mark.parametrize("alone", [0, -1], ids=["first", "last"])
def test_two_replays_at_once(comm, make_comm, seed, alone):
    problem = Few(make_comm(f"fused_all_reduce_apart_{alone}", timeout=timedelta(seconds=60)), (16, 512, 64))
    problem.fill(seed)
    replay_two_at_once(comm, problem, alone)


def test_what_was_measured_of_few_rows_says_nothing_of_more(comm):
    x, w = (torch.empty(n, 512, dtype=torch.bfloat16, device="cuda") for n in (300, 1024))
    size, device = comm.get_size(), torch.cuda.get_device_name()
    key = _C._tuning_key("matmul_all_reduce", 128, 1024, 512 * size, torch.bfloat16, size, device, False)
    _C._set_tuning("table", {key: "fused"})
    try:
        found = to.explain("matmul_all_reduce", x[:128], w, comm)
        assert (found.algorithm, found.decided_by) == ("fused", "table")
        assert to.explain("matmul_all_reduce", x, w, comm).decided_by == "rule"
    finally:
        _C._set_tuning("table", {})
        _tuning.load()


def test_explain(comm):
    x, w = (torch.empty(64, 512, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    found = to.explain("matmul_all_reduce", x, w, comm, algorithm="fused")
    assert (found.algorithm, found.decided_by) == ("fused", "caller")
    residual, gain = torch.empty(64, 64, dtype=x.dtype, device="cuda"), torch.ones(64, dtype=x.dtype, device="cuda")
    out, _ = ops.matmul_all_reduce_rms_norm(x.zero_(), w.zero_(), residual.zero_(), gain, comm, algorithm="fused")
    assert torch.equal(out, torch.zeros_like(out))
