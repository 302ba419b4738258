"""Reduce-scatter of 8-bit products with scales of blocks on GPUs, and MXFP8 on tensor cores that do not support it.

Ranks count wrong elements, and agree on the count after the last call: a rank that fails leaves no other waiting.
"""

import pytest
import torch
import torch.nn.functional as F
from overlap_gpu_cases import AG, BULK, PIPELINE, RING, RS, agree, capture, counting

import torch_overlap as to
from torch_overlap import gemm as layer
from torch_overlap import ops
from torch_overlap.quantize import ScalingMode as Mode

pytestmark = pytest.mark.gpu(2)

E4M3 = torch.float8_e4m3fn
K, N, ROWS = 1024, 512, 256  # ROWS of a rank
BLOCKS = [Mode.MXFP8_1D_SCALING, Mode.BLOCK_1D_SCALING, Mode.BLOCK_2D_SCALING, Mode.ROW_SCALING]


class Blocks:
    """Static operands of every rank, whose rows differ in magnitude, so that a misplaced scale is detected."""

    def __init__(self, comm, mode, name):
        self.comm, self.rank, self.size, self.mode = comm, comm.get_rank(), comm.get_size(), mode
        self.name = f"{name} {mode.name}"
        self.of_rows = Mode.BLOCK_1D_SCALING if mode == Mode.BLOCK_2D_SCALING else mode
        self.x, self.w = self.draw(0)[self.rank]
        self.out = torch.empty(ROWS, N, device="cuda")

    def draw(self, seed):
        """Returns for each rank the data and scales of x [all rows, K] and of its weight [N, K]."""
        gen = torch.Generator(device="cuda").manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=gen, device="cuda")

        tokens, operands = ROWS * self.size, []
        for _ in range(self.size):
            sizes = 2.0 ** torch.randint(-6, 6, (tokens, 1), generator=gen, device="cuda")
            x = ops.quantize(normal(tokens, K) * sizes, self.of_rows, E4M3)[:2]
            operands.append((x, ops.quantize(normal(N, K), self.mode, E4M3)[:2]))
        return operands

    def fill(self, seed):
        self.operands = self.draw(seed)
        for static, new in zip((self.x, self.w), self.operands[self.rank], strict=True):
            for to_part, part in zip(static, new, strict=True):
                to_part.copy_(part)
        self.out.fill_(float("nan"))

    def check(self):
        mine = slice(self.rank * ROWS, (self.rank + 1) * ROWS)
        want, magnitude = 0, 0
        for x, w in self.operands:
            x_value = ops.dequantize(*x, self.of_rows).double()[mine]
            w_value = ops.dequantize(*w, self.mode).double()
            want, magnitude = want + F.linear(x_value, w_value), magnitude + F.linear(x_value.abs(), w_value.abs())
        # Hopper keeps about 14 bits of sums of 8-bit products, and MXFP8 is multiplied in bf16 there.
        self.wrong += (~((self.out.double() - want).abs() <= magnitude * 2.0**-8 + 1e-6)).sum()


def buffer_of(comm, kind, method, shape, dtype, **options):
    config = to.CommOverlapConfig(kind, method, list(shape), dtype, comm.get_size(), **options)
    return (to.CommOverlapP2PBase if method == RING else to.CommOverlapBase)(comm, config)


def summed_by_class(comm, case, method):
    buffer = buffer_of(comm, RS, method, (ROWS * case.size, N), torch.float32, num_splits=2)

    def issue():
        buffer.split_overlap_rs(
            case.w[0], True, case.x[0], False, None, rs_output=case.out, scaling_mode=case.mode,
            A_scale_inv=case.w[1], B_scale_inv=case.x[1], use_split_accumulator=True,
        )  # fmt: skip

    return issue


def summed_by_gemm(comm, case, method):
    """Runs over a buffer of the registry, which is destroyed at the end of the test."""
    id = to.create_comm_overlap_buffer(comm, RS, method, (ROWS * case.size, N), torch.float32, num_splits=2)

    def issue():
        output, *_ = ops.gemm(
            *case.x, *case.w, scaling_mode=case.mode, rhs_transposed=True, out_dtype=torch.float32,
            use_split_accumulator=True, comm_type=int(RS), comm_overlap_method=int(method), comm_overlap_id=id,
        )  # fmt: skip
        case.out.copy_(output)

    return issue


def summed_by_operator(comm, case, algorithm):
    def issue():
        case.out.copy_(
            ops.scaled_matmul_reduce_scatter(
                *case.x, *case.w, comm, out_dtype=torch.float32, use_split_accumulator=True, algorithm=algorithm,
                scaling_mode=case.mode,
            )
        )  # fmt: skip

    return issue


WAYS = [
    (summed_by_class, RING),
    (summed_by_class, PIPELINE),
    (summed_by_gemm, RING),
    (summed_by_gemm, PIPELINE),
    (summed_by_operator, "sequential"),
    (summed_by_operator, "pipelined"),
    (summed_by_operator, "p2p"),
]


@pytest.mark.parametrize("mode", BLOCKS, ids=lambda mode: mode.name)
@pytest.mark.parametrize(("way", "how"), WAYS, ids=lambda v: getattr(v, "__name__", None) or getattr(v, "name", v))
def test_sums_of_blocks(comm, seed, way, how, mode):
    case = counting(Blocks(comm, mode, f"{way.__name__} {how}"))
    issue = way(comm, case, how)
    issue()
    graph = capture(issue)
    for step in range(110):
        case.fill(seed + step)
        if step % 5 == 0 and case.rank == step // 5 % case.size:
            torch.cuda._sleep(5_000_000)  # one rank is late
        issue() if step % 11 == 0 else graph.replay()
        case.check()
    agree(comm, case)
    if way is summed_by_gemm:
        to.destroy_all_comm_overlap_buffers()


def test_native_mxfp8_is_refused_before_anything_is_sent(comm, seed):
    """On all ranks, by every method and operator; then the same calls in bfloat16."""
    if torch.cuda.get_device_capability()[0] >= 10:
        pytest.skip("tensor cores read MXFP8 here")
    mode, size = Mode.MXFP8_1D_SCALING, comm.get_size()
    case = counting(Blocks(comm, mode, "native"))
    gather = buffer_of(comm, AG, RING, (ROWS * size, K), E4M3)
    beside = buffer_of(comm, RS, BULK, (ROWS * size, 64), torch.float32)
    products = torch.empty(ROWS * size, N, device="cuda")
    own = tuple(part[:ROWS].contiguous() for part in case.x)
    scales = {"scaling_mode": mode, "A_scale_inv": case.w[1]}
    calls = {f"{way.__name__} {how}": way(comm, case, how) for way, how in WAYS}
    calls |= {
        "split_overlap_ag": lambda: gather.split_overlap_ag(
            case.w[0], True, own[0], False, products, B_scale_inv=own[1], **scales
        ),
        "bulk_overlap": lambda: beside.bulk_overlap(
            case.w[0], True, case.x[0], False, products, B_scale_inv=case.x[1], comm_type=RS, **scales
        ),
    }
    calls |= {
        f"gather {algorithm}": lambda algorithm=algorithm: ops.scaled_all_gather_matmul(
            *own, [case.w[0]], [case.w[1]], comm, scaling_mode=mode, algorithm=algorithm
        )
        for algorithm in ("sequential", "pipelined", "p2p")
    }
    refused = {}
    layer.set_gemm_mxfp8("native")
    try:
        for name, call in calls.items():
            with pytest.raises(to.UnsupportedError) as info:
                call()
            refused[name] = str(info.value)
    finally:
        layer.set_gemm_mxfp8("dequantize")
    for step, call in enumerate(calls.values()):
        case.fill(seed + step)
        call()
        if step < len(WAYS):
            case.check()
    torch.cuda.synchronize()
    agree(comm, case)
    to.destroy_all_comm_overlap_buffers()
    for name, text in refused.items():
        assert "expected a GPU whose tensor cores read MXFP8 (sm_100 or sm_110), got sm_" in text, name
