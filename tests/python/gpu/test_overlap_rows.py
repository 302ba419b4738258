"""Over NVLink: scales of blocks that travel with their rows, chunks that are forwarded, ranks whose rows differ,
recovery."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from overlap_gpu_cases import AG, RING, SMALL, Gather, Scatter, agree, capture, counting, eager, hundred_replays, late

import torch_overlap as to
from torch_overlap import _tuning, ops
from torch_overlap.quantize import ScalingMode as Mode
from torch_overlap.tools import tune

pytestmark = pytest.mark.gpu(2)

E4M3 = torch.float8_e4m3fn
K, N = 1024, 512
BLOCKS = [Mode.MXFP8_1D_SCALING, Mode.BLOCK_1D_SCALING, Mode.BLOCK_2D_SCALING, Mode.ROW_SCALING]
SECONDS = 3


def of_rows(mode):
    return Mode.BLOCK_1D_SCALING if mode == Mode.BLOCK_2D_SCALING else mode


def quantized(x, mode):
    data, scale_inv, *_ = ops.quantize(x, mode, E4M3)
    return data, scale_inv


def value(data, scale_inv, mode):
    return ops.dequantize(data, scale_inv, mode).double()


class Blocks:
    """Operands of all ranks whose rows differ in magnitude, so that a misplaced scale is detected."""

    def __init__(self, comm, seed, mode, rows):
        gen = torch.Generator(device="cuda").manual_seed(seed)
        self.rank, size = comm.get_rank(), comm.get_size()

        def draw(*shape):
            return torch.randn(*shape, generator=gen, device="cuda")

        sizes = 2.0 ** torch.randint(-6, 6, (size, rows, 1), generator=gen, device="cuda")
        self.parts = [quantized(x, of_rows(mode)) for x in draw(size, rows, K) * sizes]
        self.weight = quantized(draw(N, K), mode)
        values = torch.cat([value(*part, of_rows(mode)) for part in self.parts])
        weight = value(*self.weight, mode)
        self.want = F.linear(values, weight)
        # Hopper keeps about 14 bits of sums of 8-bit products, and MXFP8 is multiplied in bf16 there.
        self.allowed = F.linear(values.abs(), weight.abs()) * 2.0**-8 + 1e-6
        self.gathered = torch.cat([data.view(torch.uint8) for data, _ in self.parts])

    @property
    def own(self):
        return self.parts[self.rank]

    def wrong(self, out):
        """Returns the number of wrong elements, on the device."""
        return (~((out.double() - self.want).abs() <= self.allowed)).sum()


@pytest.mark.parametrize("mode", BLOCKS, ids=lambda mode: mode.name)
@pytest.mark.parametrize("options", [{}, {"aggregate_ag": True}, {"relay_ag": True}, {"use_ce": False}], ids=str)
def test_scales_are_gathered_with_their_rows(comm, seed, mode, options):
    if options.get("aggregate_ag") and comm.get_size() % 2:
        pytest.skip("needs an even number of ranks")
    rows = 256
    config = to.CommOverlapConfig(AG, RING, [rows * comm.get_size(), K], E4M3, comm.get_size(), **options)
    buffer = to.CommOverlapP2PBase(comm, config)
    problem = Blocks(comm, seed, mode, rows)
    out = torch.empty_like(problem.want, dtype=torch.float32)
    copy = torch.empty(config.buffer_shape, dtype=E4M3, device="cuda")
    data, scale = (t.clone() for t in problem.own)
    weight = [t.clone() for t in problem.weight]

    def issue():
        buffer.split_overlap_ag(
            weight[0], True, data, False, out, B_copy=copy, scaling_mode=mode, A_scale_inv=weight[1], B_scale_inv=scale,
            use_split_accumulator=True,
        )  # fmt: skip

    issue()
    graph = capture(issue)
    found = counting(SimpleNamespace(rank=comm.get_rank(), name=f"{mode.name} {options}"))
    for step in range(110):
        problem = Blocks(comm, seed + step, mode, rows)
        for static, new in zip((data, scale, *weight), (*problem.own, *problem.weight), strict=True):
            static.copy_(new)
        out.fill_(float("nan"))
        if step % 5 == 0 and comm.get_rank() == step // 5 % comm.get_size():
            torch.cuda._sleep(10_000_000)  # one rank is late
        issue() if step % 11 == 0 else graph.replay()
        found.wrong += problem.wrong(out) + (copy.view(torch.uint8) != problem.gathered).sum()
    agree(comm, found)


@pytest.mark.parametrize("algorithm", ["sequential", "pipelined", "p2p"])
@pytest.mark.parametrize("mode", BLOCKS, ids=lambda mode: mode.name)
def test_scaled_operators_with_blocks(comm, seed, mode, algorithm):
    problem = Blocks(comm, seed, mode, 256)
    (out,), gathered, scales = ops.scaled_all_gather_matmul(
        *problem.own, [problem.weight[0]], [problem.weight[1]], comm, out_dtype=torch.float32,
        use_split_accumulator=True, algorithm=algorithm, scaling_mode=mode, return_gathered=True,
    )  # fmt: skip
    assert problem.wrong(out).item() == 0
    assert torch.equal(gathered.view(torch.uint8), problem.gathered)
    want = torch.cat([value(*part, of_rows(mode)) for part in problem.parts])
    assert torch.equal(value(gathered, scales, of_rows(mode)), want)


@pytest.mark.parametrize("use_ce", [True, False])
def test_chunks_that_are_passed_on(comm, use_ce):
    case = Gather(comm, torch.bfloat16, relay_ag=True, use_ce=use_ce, **SMALL)
    for step in range(3):
        late(case, step, 2)
        eager(case, step)
    hundred_replays(comm, capture(case.issue), case, 3)


@pytest.mark.parametrize("kind", [Gather, Scatter], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_active_tokens_that_differ(comm, make_comm, kind, how):
    """An error on all ranks, before the timeout; afterwards the other communicators work."""
    other = make_comm(f"differing_{kind.__name__}_{how}", timeout=timedelta(seconds=60))
    case = kind(other, torch.bfloat16, **SMALL)
    eager(case, 0)
    torch.cuda.synchronize()
    differs = other.get_rank() == other.get_size() - 1
    case = kind(other, torch.bfloat16, active=128 if differs else 256, **SMALL)
    torch.cuda.synchronize()
    graph = capture(case.issue) if how == "graph" else None

    def call():
        graph.replay() if graph else case.issue()
        torch.cuda.synchronize()
        case.buffer.check()

    with pytest.raises(to.Error, match=r"expected the same number of rows on all ranks, got \d+ here|has given up"):
        call()
    other.abort()
    eager(Gather(comm, torch.bfloat16, **SMALL), 1)


def test_operators_after_a_timeout_and_reconfigure(comm, make_comm):
    rank, size = comm.get_rank(), comm.get_size()
    hit = make_comm("operators_again", timeout=timedelta(seconds=60), enable_reconfigure=True)
    handles = [None] * size
    to.objcol.all_gather_object(hit, handles, hit.get_init_handle())
    x, w = torch.randn(512, 256, device="cuda").bfloat16(), torch.randn(128, 256, device="cuda").bfloat16()

    def product():
        (y,), gathered = ops.all_gather_matmul(x, [w], hit, return_gathered=True, algorithm="p2p")
        torch.cuda.synchronize()
        torch.testing.assert_close(y.double(), F.linear(gathered.double(), w.double()), rtol=2e-2, atol=0.5)

    def products():
        for _ in range(3):  # the first only issues the wait that expires
            ops.all_gather_matmul(x, [w], hit, algorithm="p2p")
            torch.cuda.synchronize()

    product()
    hit.set_timeout(timedelta(seconds=SECONDS))
    if rank != size - 1:  # the last stays away
        with pytest.raises(to.Error):
            products()
    comm.barrier(async_op=False)
    torch.cuda.synchronize()
    hit.set_timeout(timedelta(seconds=60))
    hit.reconfigure(1, handles)
    for _ in range(5):
        product()
    hit.finalize()


def test_the_shipped_table_decides(comm):
    size, device = comm.get_size(), torch.cuda.get_device_name()
    names = ("all_gather_matmul", "matmul_reduce_scatter")
    entries = [e for e in _tuning.current(_tuning.shipped())
               if (e["tp"], e["device"], e["mode"]) == (size, device, "eager") and e["op"] in names]  # fmt: skip
    if not entries:
        pytest.skip(f"no entries for {size} {device}")
    for entry in entries:
        m, n, k = entry["shape"]
        gathers = entry["op"] == "all_gather_matmul"
        shapes = [(m // size, k), (n // size, k)] if gathers else [(m, k // size), (n, k // size)]
        x, weight = (torch.empty(shape, dtype=getattr(torch, entry["dtype"]), device="meta") for shape in shapes)
        found = to.explain(entry["op"], x, [weight] if gathers else weight, comm)
        assert (found.algorithm, found.decided_by) == (entry["algorithm"], "table"), (entry, found)


def test_a_capture_takes_what_the_eager_call_did_not(make_comm):
    """The eager call allocated the memory of "p2p", which it did not use."""
    comm = make_comm("tuned_by_mode")
    size = comm.get_size()
    x, weight = torch.randn(512, 64, device="cuda").bfloat16(), torch.randn(96, 64, device="cuda").bfloat16()
    one = {"op": "all_gather_matmul", "shape": [512 * size, 96 * size, 64], "dtype": "bfloat16", "tp": size,
           "device": torch.cuda.get_device_name()}  # fmt: skip
    modes = {"eager": "sequential", "graph": "p2p"}
    to._C._set_tuning("table", {_tuning.key({**one, "mode": mode}): name for mode, name in modes.items()})
    try:
        (wanted,), _ = to.ops.all_gather_matmul(x, [weight], comm)
        assert to.explain("all_gather_matmul", x, [weight], comm).algorithm == "sequential"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = to.explain("all_gather_matmul", x, [weight], comm)
            (out,), _ = to.ops.all_gather_matmul(x, [weight], comm)
        assert (found.algorithm, found.decided_by) == ("p2p", "table")
        graph.replay()
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    finally:
        _tuning.load()
    graph.reset()


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_measure(comm, mode):
    found = tune.measure(comm, "matmul_reduce_scatter", (1024, 512, 1024 * comm.get_size()), mode=mode, rounds=3)
    assert found["mode"] == mode
    assert {"sequential", "pipelined", "p2p"} <= set(found["us"])
    assert all(us > 0 for us in found["us"].values())
