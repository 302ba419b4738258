"""Overlapped products of small integers in static tensors, which are exact: see test_overlap.py and the graphs.

Sums of products of small integers are exact in fp32. Values that are rounded (the partial products of a
reduce-scatter to the buffer's dtype, each result to its own) are rounded once, as in the reference. So results are
compared bit by bit.
"""

import pytest
import torch

import torch_overlap as to
from torch_overlap import CommOverlapMethod as Method
from torch_overlap import CommOverlapType as Type

AG, RS = Type.AG, Type.RS
BULK, PIPELINE, RING = Method.BULK, Method.PIPELINE, Method.RING_EXCHANGE
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CURRENT_SCALING = 3
FULL = {"tokens": 2048, "hidden": 1536, "ffn": 6144}
SMALL = {"tokens": 256, "hidden": 64, "ffn": 768}


def share(tokens, size, rank):
    """Returns the rows of a rank: equal parts, rounded up."""
    largest = -(-tokens // size)
    return slice(min(rank * largest, tokens), min((rank + 1) * largest, tokens))


def integers(rows, columns, key):
    """Returns integers in [-2, 2], in another pattern for every key, which may be a tensor on the device."""
    i = torch.arange(rows, device="cuda").unsqueeze(1)
    j = torch.arange(columns, device="cuda").unsqueeze(0)
    return ((i * 131 + j * 71 + (i * j) % 17 + key * 37) % 101 % 5 - 2).float()


def nan(*shape, dtype=torch.bfloat16):
    return torch.full(shape, float("nan"), device="cuda").to(dtype)


class Case:
    """A case with static tensors: `fill(step)` sets the inputs, `issue()` calls, `check(step)` compares all
    elements. `poison(run)` runs first and leaves NaN in the memory that receives data of other ranks."""

    def __init__(self, comm, dtype=torch.bfloat16, *, tokens, hidden, ffn, active=None, **options):
        self.comm, self.rank, self.size, self.dtype = comm, comm.get_rank(), comm.get_size(), dtype
        self.is_8_bit = dtype in (E4M3, E5M2)
        self.plain = torch.bfloat16 if self.is_8_bit else dtype
        self.tokens = tokens if active is None else active
        self.capacity, self.hidden, self.ffn = tokens, hidden, ffn // self.size // 16 * 16
        self.mine = share(self.tokens, self.size, self.rank)
        self.rows = self.mine.stop - self.mine.start
        self.options = options
        self.one = torch.ones(1, device="cuda")
        self.wrong = None  # a soak counts differences here, on the device
        self.name = f"{type(self).__name__} {dtype} {options}"

    def make(self, kind, method, columns, dtype=None):
        config = to.CommOverlapConfig(
            kind, method, [self.capacity, columns], dtype or self.dtype, self.size, **self.options
        )
        self.buffer = (to.CommOverlapP2PBase if method == RING else to.CommOverlapBase)(self.comm, config)
        self.buffer.set_active_tokens(self.tokens)

    def same(self, got, expected, what=""):
        expected = expected.to(got.dtype)
        # Compared as values: zeros may differ in sign.
        if self.wrong is not None:
            self.wrong += (got.float() != expected.float()).sum()
            return
        off = got.float() != expected.float()
        count = int(off.sum())
        if count:
            row, column = (int(i) for i in off.nonzero()[0])
            raise AssertionError(
                f"{self.name} {what} on rank {self.rank}: {count} of {off.numel()} are wrong; [{row}, {column}] is "
                f"{got[row, column].item()}, expected {expected[row, column].item()}; path {self.buffer.last_path()}"
            )

    def poison(self, run):
        self.x.view(torch.uint8).fill_(0xFF)  # NaN in all types
        run()

    def scales(self):
        return (
            {"scaling_mode": CURRENT_SCALING, "A_scale_inv": self.one, "B_scale_inv": self.one} if self.is_8_bit else {}
        )


class Gather(Case):
    """D [tokens, ffn / size] = gathered x [tokens, hidden] times the weight of this rank."""

    fills = False  # gathers the contents of the buffer
    atomic = False

    def __init__(self, comm, dtype=torch.bfloat16, **options):
        super().__init__(comm, dtype, atomic_gemm=self.atomic, **options)
        self.make(AG, RING, self.hidden)
        self.w = integers(self.ffn, self.hidden, 1000 + self.rank).to(self.dtype)
        self.x = torch.zeros(self.rows, self.hidden, device="cuda").to(self.dtype)
        self.out, self.copy = (
            nan(self.tokens, self.ffn, dtype=self.plain),
            nan(self.tokens, self.hidden, dtype=self.dtype),
        )

    def fill(self, step):
        self.x.copy_(integers(self.tokens, self.hidden, step)[self.mine])
        self.out.fill_(float("nan"))
        self.copy.fill_(float("nan"))

    def issue(self):
        method = self.buffer.atomic_gemm_overlap_ag if self.atomic else self.buffer.split_overlap_ag
        if self.fills:
            self.buffer.copy_into_buffer(self.x, local_chunk=True)
        method(self.w, True, None if self.fills else self.x, False, self.out, B_copy=self.copy, **self.scales())

    def check(self, step):
        x = integers(self.tokens, self.hidden, step)
        self.same(self.copy, x, "B_copy")
        self.same(self.out, x @ self.w.float().T, "D")
        if self.fills:
            self.same(self.buffer.get_buffer(), x, "buffer")


class GatherFilled(Gather):
    fills = True


class GatherAtomic(Gather):
    atomic = True


def gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


EPILOGUES = ["bias", "accumulate", "gelu", "bias_gelu", "dgelu"]


class GatherEpilogue(Gather):
    """D = epilogue(gathered x w^T). For SMALL the product itself is exact, also in 16 bits."""

    def __init__(self, comm, dtype=torch.bfloat16, *, epilogue, **options):
        super().__init__(comm, dtype, **options)
        self.epilogue = epilogue
        self.name += f" {epilogue}"
        self.bias = integers(1, self.ffn, 5)[0].to(self.plain)
        self.aux = nan(self.tokens, self.ffn, dtype=self.plain)

    def other(self, step):
        """Returns the accumulated addend, or the input of the derivative of GELU."""
        return integers(self.tokens, self.ffn, 3 * step + 1)

    def fill(self, step):
        super().fill(step)
        if self.epilogue == "accumulate":
            self.out.copy_(self.other(step))
        if self.epilogue == "dgelu":
            self.aux.copy_(self.other(step))
        else:
            self.aux.fill_(float("nan"))

    def issue(self):
        more = {"bias": self.bias} if "bias" in self.epilogue else {}
        if "gelu" in self.epilogue:
            more["pre_gelu_out"] = self.aux
        more |= {"grad": self.epilogue == "dgelu", "accumulate": self.epilogue == "accumulate"}
        self.buffer.split_overlap_ag(self.w, True, self.x, False, self.out, B_copy=self.copy, **more, **self.scales())

    def check(self, step):
        x = integers(self.tokens, self.hidden, step)
        self.same(self.copy, x, "B_copy")
        before = x @ self.w.float().T + (self.bias.float() if "bias" in self.epilogue else 0)
        if "gelu" not in self.epilogue:
            self.same(self.out, before + (self.other(step) if self.epilogue == "accumulate" else 0), "D")
            return
        if self.epilogue == "dgelu":
            at = self.other(step).requires_grad_()
            want = before * torch.autograd.grad(gelu(at).sum(), at)[0]
        else:
            self.same(self.aux, before, "pre_gelu_out")
            want = gelu(before)
        # Fused epilogues use the hardware's tanh; the result is rounded.
        most = want.abs() * 2 * torch.finfo(self.out.dtype).eps + before.abs() * 2**-7 + 1e-5
        right = (self.out.float() - want).abs() <= most
        self.same(right, torch.ones_like(right), "D")


class Scatter(Case):
    """rs_output [own tokens, hidden] = sum over ranks of x [tokens, ffn / size] times their weights, and a bias."""

    method = RING
    atomic = False
    sums_8_bits = False

    def __init__(self, comm, dtype=torch.bfloat16, **options):
        super().__init__(comm, dtype, atomic_gemm=self.atomic, **options)
        self.buffer_dtype = E4M3 if self.sums_8_bits else self.plain
        self.make(RS, self.method, self.hidden, self.buffer_dtype)
        self.ws = [integers(self.hidden, self.ffn, 2000 + r).to(self.dtype) for r in range(self.size)]
        self.x = torch.zeros(self.tokens, self.ffn, device="cuda").to(self.dtype)
        self.bias = integers(1, self.hidden, 5)[0].to(self.plain)
        self.out = nan(self.rows, self.hidden, dtype=self.plain)
        self.scale = torch.full((1,), 1 / 64, device="cuda")
        if self.sums_8_bits:
            self.buffer.set_ubuf_scale_inv(1 / self.scale)

    def of(self, rank, step):
        return integers(self.tokens, self.ffn, 11 * rank + step)

    def fill(self, step):
        self.x.copy_(self.of(self.rank, step))
        self.out.fill_(float("nan"))

    def issue(self):
        method = self.buffer.atomic_gemm_overlap_rs if self.atomic else self.buffer.split_overlap_rs
        more = {"D_scale": self.scale} if self.sums_8_bits else {}
        method(self.ws[self.rank], True, self.x, False, None, self.bias, rs_output=self.out, **more, **self.scales())

    def check(self, step):
        total = torch.zeros(self.rows, self.hidden, device="cuda")
        for r in range(self.size):
            part = self.of(r, step)[self.mine] @ self.ws[r].float().T
            if self.sums_8_bits:
                total += (part * self.scale).clamp(-448, 448).to(E4M3).float() / self.scale
            else:
                total += part.to(self.buffer_dtype).float()
        self.same(self.out, total + self.bias.float(), "rs_output")


class ScatterAtomic(Scatter):
    atomic = True


class Scatter8Bits(Scatter):
    sums_8_bits = True


class Pipeline(Scatter):
    method = PIPELINE


class PipelineAtomic(Pipeline):
    atomic = True


class Pipeline8Bits(Pipeline):
    sums_8_bits = True


class BulkGather(Case):
    """The whole buffer is gathered concurrently with a product."""

    kind = AG
    in_place = True

    def __init__(self, comm, dtype=torch.bfloat16, **options):
        super().__init__(comm, dtype, **options)
        self.make(self.kind, BULK, self.hidden)
        whole = self.kind == RS
        self.x = torch.zeros(self.tokens if whole else self.rows, self.hidden, device="cuda").to(self.dtype)
        self.dy = integers(self.tokens, self.hidden, 77).to(self.plain)
        self.w = integers(self.ffn, self.hidden, 78).to(self.plain)
        self.out = nan(self.tokens, self.ffn, dtype=self.plain)
        self.rs_output = None if self.in_place or not whole else nan(self.rows, self.hidden, dtype=self.plain)
        if self.is_8_bit:
            self.buffer.set_ubuf_scale_inv(self.one)

    def of(self, rank, step):
        return integers(self.tokens, self.hidden, 11 * rank + step)

    def fill(self, step):
        self.x.copy_(self.of(self.rank, step) if self.kind == RS else self.of(0, step)[self.mine])
        self.out.fill_(float("nan"))
        if self.rs_output is not None:
            self.rs_output.fill_(float("nan"))

    def issue(self):
        self.buffer.copy_into_buffer(self.x, local_chunk=self.kind == AG)
        self.buffer.bulk_overlap(self.w, True, self.dy, False, self.out, rs_output=self.rs_output, comm_type=self.kind)

    def check(self, step):
        self.same(self.out, self.dy.float() @ self.w.float().T, "D")
        if self.kind == AG:
            self.same(self.buffer.get_buffer(), self.of(0, step), "buffer")
            return
        total = sum(self.of(r, step)[self.mine] for r in range(self.size))
        self.same(self.buffer.get_buffer(True) if self.rs_output is None else self.rs_output, total, "sum")


class BulkScatter(BulkGather):
    kind = RS


class BulkScatterOutput(BulkScatter):
    in_place = False


class External(BulkGather):
    """The all-gather without a product, on the streams of a buffer that has one in flight."""

    def __init__(self, comm, dtype=torch.bfloat16, **options):
        super().__init__(comm, dtype, **options)
        self.lender = Gather(comm, **options)

    def poison(self, run):
        self.lender.x.fill_(float("nan"))
        super().poison(run)

    def fill(self, step):
        super().fill(step)
        self.lender.fill(step)

    def issue(self):
        self.buffer.copy_into_buffer(self.x, local_chunk=True)
        self.lender.issue()
        self.buffer.bulk_overlap_external_ag(self.lender.buffer)

    def check(self, step):
        self.lender.wrong = self.wrong
        self.lender.check(step)
        self.same(self.buffer.get_buffer(), self.of(0, step), "buffer")


KINDS = [
    Gather,
    GatherFilled,
    GatherAtomic,
    Scatter,
    ScatterAtomic,
    Scatter8Bits,
    Pipeline,
    PipelineAtomic,
    Pipeline8Bits,
    BulkGather,
    BulkScatter,
    BulkScatterOutput,
    External,
]
# One for each class and direction.
SOME = [GatherFilled, Scatter, Pipeline, BulkGather, BulkScatter]
OF_8_BITS = [
    Gather,
    GatherFilled,
    GatherAtomic,
    Scatter,
    Scatter8Bits,
    Pipeline,
    Pipeline8Bits,
    BulkGather,
    BulkScatterOutput,
]


def counting(case):
    """Returns the case, which counts wrong elements on the device until agree() reads the count."""
    case.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    return case


def agree(comm, case):
    """Fails on all ranks alike: if only one stopped, the others would wait for it."""
    total = case.wrong.clone()
    comm.all_reduce(total, to.ReduceOp.SUM, async_op=False)
    assert total.item() == 0, f"{case.name}: {case.wrong.item()} elements are wrong on rank {case.rank}"


def capture(issue):
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        issue()
    return graph


def of_dtypes(grid):
    return pytest.mark.parametrize(
        ("kind", "dtype"), grid, ids=lambda value: getattr(value, "__name__", str(value).split(".")[-1])
    )


EACH = of_dtypes([(kind, torch.bfloat16) for kind in KINDS] + [(kind, E4M3) for kind in OF_8_BITS])
SOAKED = of_dtypes(
    [(kind, torch.bfloat16) for kind in SOME]
    + [(kind, E4M3) for kind in (GatherFilled, Scatter8Bits, Pipeline8Bits, BulkScatterOutput)]
)
ONE = pytest.mark.parametrize("kind", SOME, ids=lambda kind: kind.__name__)


def late(case, step, milliseconds):
    """Delays the device of one rank, another one in each step."""
    if case.rank == step % case.size:
        torch.cuda._sleep(int(milliseconds * 1_800_000))


def eager(case, step):
    case.fill(step)
    case.issue()
    case.check(step)


def replay(graph, case, step):
    case.fill(step)
    graph.replay()
    case.check(step)


def hundred_replays(comm, graph, case, first=0, *, lateness=2):
    """Runs with other inputs each time; one rank is occasionally late by this number of milliseconds. The host
    checks at the end."""
    counting(case)
    for step in range(first, first + 100):
        if step % 5 == 0:
            late(case, step // 5, lateness)
        replay(graph, case, step)
    agree(comm, case)
    case.wrong = None
