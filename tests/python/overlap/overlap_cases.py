"""Overlapped products of random data; every element is compared with products in fp64."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

import torch_overlap as to
from torch_overlap import CommOverlapMethod as Method
from torch_overlap import CommOverlapType as Type
from torch_overlap import TorchComm

AG, RS = Type.AG, Type.RS
BULK, PIPELINE, RING = Method.BULK, Method.PIPELINE, Method.RING_EXCHANGE
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PLAIN = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
CURRENT_SCALING = 3

# Storage of the weight A and the activations B: (transa, transb).
LAYOUTS = {"TN": (True, False), "NN": (False, False), "NT": (False, True), "TT": (True, True)}


def share(tokens: int, size: int, rank: int) -> slice:
    """Returns the rows of a rank: equal parts, rounded up."""
    largest = -(-tokens // size)
    return slice(min(rank * largest, tokens), min((rank + 1) * largest, tokens))


def rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def gelu_derivative(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(gelu(x).sum(), x)
    return grad


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=torch.float32).to(dtype)


def check(actual: Tensor, expected: Tensor, error: Tensor, what: str) -> None:
    """Checks every element, to its dtype's rounding and an `error` before that."""
    dtype = actual.dtype
    allowed = error + expected.abs() * rounding(dtype) + torch.finfo(dtype).smallest_normal
    off = (actual.double() - expected).abs()
    wrong = ~(off <= allowed)
    if wrong.any():
        worst = int((off / allowed).nan_to_num(float("inf")).argmax())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong; element {worst} is "
            f"{actual.flatten()[worst].item()}, expected {expected.flatten()[worst].item()} "
            f"to within {allowed.flatten()[worst].item():.3g}"
        )


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class Draw:
    """Random numbers that are equal for equal seeds."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype)


class Matrix:
    """A random matrix as it is stored, and its values."""

    def __init__(self, draw: Draw, rows: int, columns: int, dtype: torch.dtype, transposed: bool = False) -> None:
        values = draw(rows, columns)
        self.scale_inv: Tensor | None = None
        if dtype in (E4M3, E5M2):
            scale = torch.finfo(dtype).max / 16  # no normal value drawn reaches 16
            self.scale_inv = torch.tensor([1 / scale], dtype=torch.float32)
            values = (values / self.scale_inv.double()).to(dtype)
            self.values = values.double() * self.scale_inv.double()
        else:
            values = values.to(dtype)
            self.values = values.double()
        self.data = values.t().contiguous() if transposed else values


def product(x: Tensor, w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns x w^T in fp64, and the error allowed for sums in fp32 (fp64 for fp64)."""
    unit = rounding(torch.float64 if dtype == torch.float64 else torch.float32)
    return x @ w.T, (x.abs() @ w.abs().T) * unit * (x.shape[1] + 8)


Ranks = TorchComm | to.OverlapGroup


def make(ranks: Ranks, kind: Type, method: Method, shape: tuple[int, int], dtype: torch.dtype, **options: Any) -> Any:
    config = to.CommOverlapConfig(kind, method, list(shape), dtype, ranks.get_size(), **options)
    return (to.CommOverlapP2PBase if method == RING else to.CommOverlapBase)(ranks, config)


def store_group(rank: int, size: int, store: Any, *, name: str = "outside", seconds: float = 30) -> to.OverlapGroup:
    """Returns a group of two callbacks over a Store."""
    steps = itertools.count()

    def all_gather(mine: bytes) -> list[bytes]:
        step = next(steps)
        store.set(f"{name}/{step}/{rank}", mine)
        return [store.get(f"{name}/{step}/{r}") for r in range(size)]

    return to.OverlapGroup(all_gather, lambda: all_gather(b"here") and None, rank, size, torch.device("cpu"), name,
                           timedelta(seconds=seconds))  # fmt: skip


def logged(call: Callable[[], Any]) -> str:
    """Returns the output of `call` on stderr."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            call()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return file.read().decode()


@contextmanager
def interleaving(seed: int) -> Iterator[None]:
    to._C._set_interleaving(seed)
    try:
        yield
    finally:
        to._C._set_interleaving(0)


class Case:
    """One buffer and a call on it, repeated with new data."""

    def __init__(self, comm: Ranks, tokens: int = 13, active: int | None = None, k: int = 32, n: int = 48) -> None:
        self.comm, self.rank, self.size = comm, comm.get_rank(), comm.get_size()
        self.tokens, self.active, self.k, self.n = tokens, tokens if active is None else active, k, n
        self.mine = share(self.active, self.size, self.rank)
        self.rows = self.mine.stop - self.mine.start
        self.buffer: Any = None
        self.what = ""

    def step(self, seed: int) -> None:
        raise NotImplementedError


class Gather(Case):
    """split_overlap_ag and atomic_gemm_overlap_ag."""

    def __init__(self, comm: Ranks, dtype: torch.dtype = torch.float32, *, layout: str = "TN",
                 epilogue: str = "none", accumulate: bool = False, copy: bool = True, fill: bool = False,
                 buffer_dtype: torch.dtype | None = None, weight_dtype: torch.dtype | None = None,
                 out_dtype: torch.dtype | None = None, atomic: bool = False, options: dict[str, Any] | None = None,
                 **sizes: Any) -> None:  # fmt: skip
        super().__init__(comm, **sizes)
        self.dtype, self.layout, self.epilogue, self.accumulate = dtype, layout, epilogue, accumulate
        self.copy, self.fill, self.atomic = copy, fill, atomic
        self.is_8_bit = dtype in (E4M3, E5M2)
        self.weight_dtype = weight_dtype or dtype
        self.out_dtype = out_dtype or (torch.bfloat16 if self.is_8_bit else dtype)
        self.buffer = make(comm, AG, RING, (self.tokens, self.k), buffer_dtype or dtype, atomic_gemm=atomic,
                           **(options or {}))  # fmt: skip
        self.buffer.set_active_tokens(self.active)
        self.what = f"AG {dtype} {layout} {epilogue} {options} accumulate={accumulate} of {self.active} on {self.rank}"

    def step(self, seed: int) -> None:
        draw, mine = Draw(seed), Draw(seed + 7919 * (self.rank + 1))
        transa, _ = LAYOUTS[self.layout]
        x = Matrix(draw, self.active, self.k, self.dtype)
        w = Matrix(mine, self.n, self.k, self.weight_dtype, transposed=not transa)
        value, error = product(x.values, w.values, self.dtype)
        extra = self.out_dtype
        out = poison((self.active, self.n), self.out_dtype)
        call: dict[str, Any] = {}
        results: list[tuple[str, Tensor, Tensor, Tensor]] = []
        if self.is_8_bit:
            call |= {"scaling_mode": CURRENT_SCALING, "A_scale_inv": w.scale_inv, "B_scale_inv": x.scale_inv}
        if self.epilogue in ("bias", "bias_gelu"):
            call["bias"] = mine(self.n, dtype=extra)
            value = value + call["bias"].double()
            error = error + value.abs() * 2 * rounding(torch.float32 if extra != torch.float64 else extra)
        if self.epilogue in ("gelu", "bias_gelu"):
            call["pre_gelu_out"] = poison((self.active, self.n), extra)
            results.append(("pre_gelu_out", call["pre_gelu_out"], value, error))
            error = error * 1.2 + value.abs() * (1e-13 if extra == torch.float64 else 2e-6)
            value = gelu(value)
        if self.epilogue == "dgelu":
            call |= {"grad": True, "pre_gelu_out": mine(self.active, self.n, dtype=extra)}
            error = error * 1.2 + value.abs() * (1e-13 if extra == torch.float64 else 2e-6)
            value = value * gelu_derivative(call["pre_gelu_out"].double())
        if self.accumulate:
            call["accumulate"] = True
            out.copy_(mine(self.active, self.n))
            value = value + out.double()
            error = error + (out.double().abs() + value.abs()) * 4 * rounding(
                torch.float64 if extra == torch.float64 else torch.float32
            )
        results.append(("D", out, value, error))
        copied = poison((self.active, self.k), self.dtype) if self.copy else None
        own = x.data[self.mine].clone()
        if self.fill:
            self.buffer.copy_into_buffer(own, local_chunk=True)
        if self.is_8_bit and self.fill:
            self.buffer.set_ubuf_scale_inv(call.pop("B_scale_inv"))
        run = self.buffer.atomic_gemm_overlap_ag if self.atomic else self.buffer.split_overlap_ag
        run(w.data, transa, None if self.fill else own, False, out, B_copy=copied, **call)
        for name, got, want, off in results:
            check(got, want, off, f"{name} of {self.what}")
        if copied is not None:
            assert same(copied, x.data), f"B_copy of {self.what}"
        if self.fill:
            self.expected = x.data
            self.still_there()

    def still_there(self) -> None:
        """Checks that the gathered rows are in the buffer."""
        assert same(self.buffer.get_buffer(), self.expected), f"buffer of {self.what}"
        for r in range(self.size):
            part = self.expected[share(self.active, self.size, r)]
            assert same(self.buffer.get_buffer_chunk_by_id(r), part), f"chunk {r} of {self.what}"


class Scatter(Case):
    """split_overlap_rs and atomic_gemm_overlap_rs."""

    def __init__(self, comm: Ranks, method: Method, dtype: torch.dtype = torch.float32, *, layout: str = "TN",
                 bias: bool = True, operand_dtype: torch.dtype | None = None, out_dtype: torch.dtype | None = None,
                 atomic: bool = False, options: dict[str, Any] | None = None, **sizes: Any) -> None:  # fmt: skip
        super().__init__(comm, **sizes)
        self.dtype, self.layout, self.bias, self.atomic = dtype, layout, bias, atomic
        self.is_8_bit = dtype in (E4M3, E5M2)
        self.operand_dtype = operand_dtype or (torch.bfloat16 if self.is_8_bit else dtype)
        self.out_dtype = out_dtype or (torch.float32 if self.is_8_bit else dtype)
        self.buffer = make(comm, RS, method, (self.tokens, self.n), dtype, atomic_gemm=atomic, **(options or {}))
        self.buffer.set_active_tokens(self.active)
        self.what = f"RS {method.name} {dtype} {layout} {options} of {self.active} on {self.rank}"

    def step(self, seed: int) -> None:
        transa, transb = LAYOUTS[self.layout]
        draw = Draw(seed)
        xs, ws, values = [], [], []
        error = torch.zeros(self.active, self.n, dtype=torch.float64)
        for _ in range(self.size):
            xs.append(Matrix(draw, self.active, self.k, self.operand_dtype, transposed=transb))
            ws.append(Matrix(draw, self.n, self.k, self.operand_dtype, transposed=not transa))
            value, off = product(xs[-1].values, ws[-1].values, self.operand_dtype)
            values.append(value)
            error += off + value.abs() * rounding(self.dtype)
        call: dict[str, Any] = {}
        largest = max([v.abs().max().item() for v in values if v.numel()] or [1.0])
        if self.is_8_bit:
            scale = torch.finfo(self.dtype).max / (1.1 * largest)
            call |= {"D_scale": torch.tensor([scale]), "D_amax": torch.full((1,), float("nan"))}
            scale_inv = 1 / call["D_scale"]
            self.buffer.set_ubuf_scale_inv(scale_inv)
            tiny = torch.finfo(self.dtype)
            error += self.size * tiny.smallest_normal * tiny.eps * scale_inv.double()
        elif self.operand_dtype in (E4M3, E5M2):
            pass
        else:
            error += self.size * torch.finfo(self.dtype).smallest_normal
        if self.operand_dtype in (E4M3, E5M2):
            x, w = xs[self.rank], ws[self.rank]
            call |= {"scaling_mode": CURRENT_SCALING, "A_scale_inv": w.scale_inv, "B_scale_inv": x.scale_inv}
        value = sum(values[1:], start=values[0])
        if self.bias:
            call["bias"] = draw(self.n, dtype=self.out_dtype)
            value = value + call["bias"].double()
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        error += sum(v.abs() for v in [value, *values]) * rounding(wide) * 2 * (self.size + 2)
        out = poison((self.rows, self.n), self.out_dtype)
        run = self.buffer.atomic_gemm_overlap_rs if self.atomic else self.buffer.split_overlap_rs
        run(ws[self.rank].data, transa, xs[self.rank].data, transb, None, rs_output=out, **call)
        check(out, value[self.mine], error[self.mine], self.what)
        if self.is_8_bit:
            amax = values[self.rank].abs().max() if self.active else torch.zeros((), dtype=torch.float64)
            check(call["D_amax"], amax.reshape(1), error.max().reshape(1) if self.active else amax.reshape(1),
                  f"D_amax of {self.what}")  # fmt: skip


class Bulk(Case):
    """bulk_overlap: a product concurrent with an independent collective."""

    def __init__(self, comm: Ranks, kind: Type, dtype: torch.dtype = torch.float32, *, in_place: bool = True,
                 both: bool = False, out_dtype: torch.dtype | None = None, product_dtype: torch.dtype | None = None,
                 method: Method = BULK, options: dict[str, Any] | None = None, **sizes: Any) -> None:  # fmt: skip
        super().__init__(comm, **sizes)
        self.kind, self.dtype, self.in_place = kind, dtype, in_place
        self.is_8_bit = dtype in (E4M3, E5M2)
        self.product_dtype = product_dtype or (torch.bfloat16 if self.is_8_bit else dtype)
        self.out_dtype = out_dtype or (torch.float32 if self.is_8_bit else dtype)
        self.buffer = make(comm, Type.NONE if both else kind, method, (self.tokens, self.n), dtype, **(options or {}))
        self.buffer.set_active_tokens(self.active)
        self.what = f"bulk {kind.name} {method.name} {dtype} in_place={in_place} of {self.active} on {self.rank}"

    def step(self, seed: int) -> None:
        draw, mine = Draw(seed), Draw(seed + 7919 * (self.rank + 1))
        parts = [Matrix(draw, self.active, self.n, self.dtype) for _ in range(self.size)]
        # The product of a weight gradient, dw += dy^T x; the collective belongs to another part of the layer.
        dy = Matrix(mine, 16, self.k, self.product_dtype, transposed=True)
        x = Matrix(mine, self.k, 24, self.product_dtype)
        value, error = product(dy.values, x.values.T, self.product_dtype)
        unit = rounding(torch.float64 if self.product_dtype == torch.float64 else torch.float32)
        out = mine(16, 24, dtype=self.product_dtype)
        value = value + out.double()
        error = error + (out.double().abs() + value.abs()) * 4 * unit
        call: dict[str, Any] = {"accumulate": True, "comm_type": self.kind}
        rs_output = None
        if self.kind == AG:
            self.buffer.copy_into_buffer(parts[0].data[self.mine].clone(), local_chunk=True)
        else:
            self.buffer.copy_into_buffer(parts[self.rank].data)
            if self.is_8_bit:
                self.buffer.set_ubuf_scale_inv(parts[0].scale_inv)
            if not self.in_place:
                rs_output = poison((self.rows, self.n), self.out_dtype)
        self.buffer.bulk_overlap(x.data, False, dy.data, True, out, rs_output=rs_output, **call)
        check(out, value, error, f"product of {self.what}")
        if self.kind == AG:
            self.expected = parts[0].data
            self.still_there()
            return
        total = sum((p.values for p in parts[1:]), start=parts[0].values)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        off = sum(p.values.abs() for p in parts) * rounding(wide) * (self.size + 2)
        got = self.buffer.get_buffer(local_chunk=True) if rs_output is None else rs_output
        check(got, total[self.mine], off[self.mine], self.what)

    def still_there(self) -> None:
        assert same(self.buffer.get_buffer(), self.expected), f"buffer of {self.what}"


class External(Case):
    """bulk_overlap_external_ag, on the streams of another buffer, which is used before and after."""

    def __init__(self, comm: Ranks, dtype: torch.dtype = torch.bfloat16, lender: str = "ring", kind: Type = AG,
                 **sizes: Any) -> None:  # fmt: skip
        super().__init__(comm, **sizes)
        self.dtype = dtype
        self.lender: Any = Gather(comm, **sizes) if lender == "ring" else Bulk(comm, RS, **sizes)
        self.buffer = make(comm, kind, BULK, (self.tokens, self.n), dtype)
        self.buffer.set_active_tokens(self.active)
        self.what = f"external AG {dtype} of {self.active} on {self.rank}"

    def step(self, seed: int) -> None:
        self.lender.step(seed + 1)
        x = Matrix(Draw(seed), self.active, self.n, self.dtype)
        self.buffer.copy_into_buffer(x.data[self.mine].clone(), local_chunk=True)
        self.buffer.bulk_overlap_external_ag(self.lender.buffer)
        self.expected = x.data
        self.still_there()
        self.lender.step(seed + 2)
        self.still_there()

    def still_there(self) -> None:
        assert same(self.buffer.get_buffer(), self.expected), f"buffer of {self.what}"
