"""Operators of every family on odd sizes, by the dtype of their operands, and replays of them: see test_op_soak.py.

Operands are small integers, those of 8 bits times powers of two: all sums are exact in every dtype.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from op_cases import (
    CASES,
    OVER_CHANNELS,
    ROWS,
    Case,
    Sizes,
    bulk_cases,
    exchange_cases,
    fused_cases,
    gathered,
    poison,
    summed,
)

import torch_overlap as to
from torch_overlap import ReduceOp, ops
from torch_overlap.quantize import ScalingMode as Mode

EPS = 1e-6
STEPS = 64  # inputs repeat after these
# Numbers of rows are divisible by every number of ranks up to 4 for the operators that need it.
ODD = Sizes(rows=21, k=7, n=5)
OF_VECTORS = Sizes(rows=21, k=40, n=24)  # sizes that TMA supports
OF_8_BITS = Sizes(rows=21, k=128, n=48)
FUSED_DTYPES = (torch.bfloat16, torch.float16)


# --- Collectives on tensors in windows ---------------------------------------------------------------------------


class WindowCase(Case):
    """A case that gets, in place of its communicator, one with two tensors of a window, for input and output."""

    class Lent(NamedTuple):
        comm: to.TorchComm
        window: to.TorchCommWindow
        tensors: torch.Tensor

    def on(self, comm, dtype):
        tensors = to.symmetric_empty((2, *self.shapes[0]), dtype, comm)
        lent = self.Lent(comm, comm.new_window(tensors), tensors)
        return Case(self.name, self.shapes, lambda _, x: self.run(lent, x), self.reference)


def every_collective_in_place(lent, x):
    comm, options = lent.comm, {"async_op": False, "hints": {"custom_collectives": "zero_copy"}}
    here, there = lent.tensors
    own = len(x) // comm.get_size()
    found = []
    comm.all_reduce(here.copy_(x), ReduceOp.SUM, **options)
    found.append(here.clone())
    comm.reduce_scatter_single(there[:own], here.copy_(x), ReduceOp.SUM, **options)
    found.append(there[:own].clone())
    comm.all_gather_single(there, x[:own], **options)
    found.append(there.clone())
    comm.all_to_all_single(there, x, **options)
    found.append(there.clone())
    comm.broadcast(here.copy_(x), 1, **options)
    return torch.cat([*found, here])


def every_collective(every, r):
    total, size = summed([x for (x,) in every]), len(every)
    parts = [x.chunk(size) for (x,) in every]
    return torch.cat([total, total.chunk(size)[r], gathered([p[0] for p in parts]), gathered([p[r] for p in parts]),
                      every[1][0]])  # fmt: skip


# Parts that are whole vectors: other parts are staged.
IN_WINDOWS = WindowCase("in_windows", [(4 * ROWS, 32)], every_collective_in_place, every_collective)


# --- Norms -------------------------------------------------------------------------------------------------------


def norm_is_right(out, hidden, gain):
    """Returns 1 where `out` is the norm of `hidden`, as a number of its dtype."""
    wide = hidden.double()
    want = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * gain.double()
    return ((out.double() - want).abs() <= 0.02 * want.abs() + 1e-6).to(hidden.dtype)


def normed(hidden):
    return torch.cat([hidden, torch.ones_like(hidden)], dim=1)


def norm_case(sizes):
    def run(comm, x, residual, gain, bias):
        out, hidden = ops.all_reduce_rms_norm(x, residual, gain, comm, bias, eps=EPS)
        return torch.cat([hidden, norm_is_right(out, hidden, gain)], dim=1)

    def reference(every, r):
        _, residual, _, bias = every[r]
        return normed(residual + summed([e[0] for e in every]) + bias)

    rows, _, n = sizes
    return Case("all_reduce_rms_norm", [(rows, n), (rows, n), (n,), (n,)], run, reference, shared=(1, 2, 3))


def product_norm_case(algorithm, sizes):
    def run(comm, x, w, residual, gain, bias):
        out, hidden = ops.matmul_all_reduce_rms_norm(x, w, residual, gain, comm, bias, eps=EPS, algorithm=algorithm)
        return torch.cat([hidden, norm_is_right(out, hidden, gain)], dim=1)

    def reference(every, r):
        _, _, residual, _, bias = every[r]
        return normed(residual + summed([F.linear(e[0], e[1]) for e in every]) + bias)

    rows, k, n = sizes
    shapes = [(rows, k), (n, k), (rows, n), (n,), (n,)]
    return Case(f"matmul_all_reduce_rms_norm-{algorithm}", shapes, run, reference, shared=(2, 3, 4))


# --- 8-bit operands ----------------------------------------------------------------------------------------------


def magnitudes(x):
    """Returns rows of three magnitudes, so that a misplaced scale is detected."""
    return x * 2.0 ** (torch.arange(x.shape[0], device=x.device) % 3)[:, None]


def quantized(x, mode):
    data, scale_inv, *_ = ops.quantize(x, mode, power_of_two=True)
    return data, scale_inv


def scaled_cases(algorithm, mode, sizes=OF_8_BITS):
    """Operands are quantized before the operator, so that a graph contains that too."""
    of_x = Mode.BLOCK_1D_SCALING if mode == Mode.BLOCK_2D_SCALING else mode
    has_blocks = mode not in (Mode.CURRENT_TENSOR_SCALING, Mode.ROW_SCALING)
    rows, k, n = sizes._replace(rows=24) if has_blocks else sizes
    options = {"algorithm": algorithm, "scaling_mode": mode, "out_dtype": torch.float16}
    options["use_split_accumulator"] = algorithm != "fused"

    def gather_matmul(comm, x, w):
        (data, scale_inv), (weight, weight_scale_inv) = quantized(magnitudes(x), of_x), quantized(w, mode)
        (product,), whole, scales = ops.scaled_all_gather_matmul(
            data, scale_inv, [weight], [weight_scale_inv], comm, return_gathered=True, **options
        )
        values = ops.dequantize(whole, scales if scales.numel() else scale_inv, of_x)
        return torch.cat([product.float(), values.float()], dim=1)

    def gathered(every, r):
        x = torch.cat([magnitudes(e[0]) for e in every])
        return torch.cat([F.linear(x, every[r][1]), x], dim=1)

    def reduced(operator):
        def run(comm, x, w):
            return operator(*quantized(magnitudes(x), of_x), *quantized(w, mode), comm, **options).float()

        return run

    def total(every):
        return summed([F.linear(magnitudes(e[0]), e[1]) for e in every])

    name = f"{mode.name}-{algorithm}"
    return [
        Case(f"scaled_all_gather_matmul-{name}", [(rows, k), (n, k)], gather_matmul, gathered),
        Case(f"scaled_matmul_reduce_scatter-{name}", [(4 * rows, k), (n, k)],
             reduced(ops.scaled_matmul_reduce_scatter), lambda every, r: total(every).chunk(len(every))[r]),
        Case(f"scaled_matmul_all_reduce-{name}", [(rows, k), (n, k)],
             reduced(ops.scaled_matmul_all_reduce), lambda every, r: total(every)),
    ]  # fmt: skip


MODES = [Mode.CURRENT_TENSOR_SCALING, Mode.ROW_SCALING, Mode.BLOCK_1D_SCALING, Mode.BLOCK_2D_SCALING,
         Mode.MXFP8_1D_SCALING]  # fmt: skip
SCALED = [("sequential", MODES[0]), *((a, mode) for a in ("pipelined", "p2p") for mode in MODES)]


# --- All of a dtype ----------------------------------------------------------------------------------------------


def of_products(algorithm, sizes):
    yield from fused_cases(algorithm, sizes)
    if algorithm not in ("fused", "low_latency"):
        yield from exchange_cases(algorithm, sizes)
    yield product_norm_case(algorithm, sizes)


# "low_latency" with rows that are no whole number of vectors, for which there is no kernel.
STEP_BY_STEP = [Case(f"{case.name}-odd", case.shapes, case.run, case.reference)
                for case in fused_cases("low_latency", ODD) if "gather" not in case.name]  # fmt: skip


def cases_of(dtype, has_fused):
    """Returns the cases of one dtype; float8_e4m3fn stands for operands with scales."""
    if dtype == torch.float8_e4m3fn:
        pairs = [*SCALED, *(("fused", mode) for mode in MODES[:2] if has_fused)]
        return [case for pair in pairs for case in scaled_cases(*pair)]
    products = [("sequential", ODD), ("pipelined", ODD), ("p2p", ODD), ("low_latency", OF_VECTORS)]
    if has_fused and dtype in FUSED_DTYPES:
        products.append(("fused", OF_VECTORS))
    return [
        *(case for case in CASES if case.name in COLLECTIVES),
        IN_WINDOWS,
        norm_case(ODD),
        *(case for pair in products for case in of_products(*pair)),
        *STEP_BY_STEP,
        *(case for algorithm in ("sequential", "pipelined", "bulk") for case in bulk_cases(algorithm, ODD)),
    ]


COLLECTIVES = ["all_reduce", "all_gather_async", "reduce_scatter", "all_to_all_async", "broadcast", "permute",
               "all_to_all_v_async"]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
# Operators that wait on the device over their channels.
WAITING = [*OVER_CHANNELS, *STEP_BY_STEP, product_norm_case("p2p", ODD), *scaled_cases("p2p", Mode.ROW_SCALING)]
# Operators of WAITING that wait in one kernel, which does everything but the product.
IN_ONE_KERNEL = [case for case in WAITING if case.name.endswith("low_latency")]


class Inputs:
    """The inputs of all ranks in a step that a tensor counts; drawn once, equal on all ranks."""

    def __init__(self, comm, case, seed, dtype=torch.float32, device="cuda"):
        self.comm = comm
        self.has_8_bits = dtype == torch.float8_e4m3fn
        self.dtype = torch.float32 if self.has_8_bits else dtype
        self.case = case.on(comm, self.dtype)
        self.largest = 6 if dtype in (torch.float32, torch.float64) else 1
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        draws = torch.Generator().manual_seed(seed)
        self.bases = [torch.randint(1 << 20, shape, generator=draws).to(device) for shape in case.shapes]

    def of(self, rank):
        """Returns rank `rank`'s inputs in this step, in a dtype in which all results are exact."""
        wide = torch.promote_types(self.dtype, torch.float32)
        count = 2 * self.largest + 1
        shifts = [5 * self.step + (0 if i in self.case.shared else 3 * rank) for i in range(len(self.bases))]
        return [
            ((base + base // 13 * shift + shift) % count - self.largest).to(wide)
            for base, shift in zip(self.bases, shifts, strict=True)
        ]

    def run(self):
        """Runs one step; returns the number of wrong elements, on the device. All memory that it writes, including
        staging memory, holds NaN before."""
        self.step.add_(1).remainder_(STEPS)
        rank, every = self.comm.get_rank(), [self.of(r) for r in range(self.comm.get_size())]
        mine = [x.to(self.dtype) for x in every[rank]]
        poison(self.comm, self.case, mine)
        got, want = self.case.run(self.comm, *mine), self.case.reference(every, rank)
        assert got.shape == want.shape, self.case.name
        return (got.to(want.dtype) != want).sum()


class Replay:
    """Steps in a graph, which accumulates the number of wrong elements; run() runs one step eagerly."""

    def __init__(self, comm, case, seed, dtype=torch.float32, stream=None):
        """Captures on `stream`: graphs that run concurrently must not share cuBLAS's workspace, of which each stream
        has one."""
        self.case, self.inputs = case, Inputs(comm, case, seed, dtype)
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries allocate their workspaces
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.run()

    def run(self):
        self.wrong += self.inputs.run()
