"""Inputs that every rank can compute for every rank, poisoned outputs, and expected results of reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_overlap._C import RedOpType, ReduceOp

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
# Dtypes that are sent but not reduced.
OTHERS = (
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
    torch.bits8, torch.bits16,
)  # fmt: skip
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)

_LINEAR = (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM)
_BITWISE = (RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR)


def rank_input(seed: int, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns the input of a rank, on the CPU: different for every seed, and the same wherever it is computed."""
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    shape = tuple(shape)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    if dtype in OTHERS:
        count = math.prod(shape) * dtype.itemsize
        raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
        return raw.view(dtype).view(shape)
    if dtype in INTEGERS:
        low = -5 if dtype.is_signed else 0
        return torch.randint(low, 6, shape, generator=generator).to(dtype)
    # Away from zero and near one: a product over the ranks stays within the range of fp8.
    magnitude = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    real = magnitude * sign
    if dtype.is_complex:
        return torch.complex(real, torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5).to(dtype)
    return real.to(dtype)


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Returns a buffer whose old bytes show up in a comparison: NaN in most float types, a large number in integers."""
    if dtype is torch.bool:
        return torch.ones(tuple(shape), dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    return torch.full((count,), 0x7F, dtype=torch.uint8, device=device).view(dtype).view(tuple(shape))


def is_legal(op: RedOpType, dtype: torch.dtype) -> bool:
    """Returns True if the reduction is defined for the dtype, by the table of docs/reference/errors.md."""
    if dtype.is_complex:
        return op in _LINEAR
    if dtype is torch.bool:
        return op not in (RedOpType.AVG, RedOpType.PREMUL_SUM)
    if dtype.is_floating_point:
        return op not in _BITWISE
    return op is not RedOpType.PREMUL_SUM


def reduced(op: ReduceOp, inputs: Sequence[Tensor], factors: Sequence[float] | None = None) -> Tensor:
    """Returns the result in fp64, int64 or complex128; `factors` of a PREMUL_SUM, by rank."""
    dtype = inputs[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    parts = torch.stack([part.to(wide) for part in inputs])
    kind = op.type
    if dtype is torch.bool:
        truth = parts.sum(0)
        if kind in (RedOpType.SUM, RedOpType.MAX, RedOpType.BOR):
            return truth > 0
        return truth % 2 == 1 if kind is RedOpType.BXOR else truth == len(inputs)
    if kind is RedOpType.PREMUL_SUM:
        assert factors is not None
        scale = torch.tensor(list(factors), dtype=wide).view(-1, *[1] * (parts.dim() - 1))
        return (parts * scale).sum(0)
    if kind is RedOpType.AVG:
        total = parts.sum(0)
        return total / len(inputs) if wide is not torch.int64 else total.div(len(inputs), rounding_mode="trunc")
    if kind is RedOpType.SUM:
        return parts.sum(0)
    if kind is RedOpType.PRODUCT:
        return parts.prod(0)
    if kind is RedOpType.MIN:
        return parts.amin(0)
    if kind is RedOpType.MAX:
        return parts.amax(0)
    out = parts[0]
    for part in parts[1:]:
        out = out & part if kind is RedOpType.BAND else out | part if kind is RedOpType.BOR else out ^ part
    return out


def assert_reduced(got: Tensor, op: ReduceOp, inputs: Sequence[Tensor], factors: Sequence[float] | None = None) -> None:
    """Checks that every element is within the rounding of len(inputs) additions in its type; integers and bools
    exactly."""
    expected = reduced(op, inputs, factors)
    dtype = inputs[0].dtype
    assert got.dtype is dtype, f"expected {dtype}, got {got.dtype}"
    assert got.shape == expected.shape, f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    got = got.detach().cpu()
    if dtype is torch.bool:
        bad = got != expected
    elif not dtype.is_floating_point and not dtype.is_complex:
        # Through bytes: overflow wraps, as in C.
        bad = got.to(torch.int64) != expected.to(dtype).to(torch.int64)
    else:
        wide = expected.dtype
        sizes = torch.stack([part.to(wide).abs() for part in inputs])
        weight = sizes.prod(0) if op.type is RedOpType.PRODUCT else sizes.sum(0)
        if factors is not None:
            weight = weight * max(1.0, *(abs(factor) for factor in factors))
        real = dtype.to_real()
        tolerance = 2 * (len(inputs) + 1) * torch.finfo(real).eps * weight + torch.finfo(real).tiny
        bad = ~((got.to(wide) - expected).abs() <= tolerance)  # also catches NaN
    _fail_where(bad, got, expected, f"{op} of {len(inputs)} {dtype} inputs")


def assert_equal(got: Tensor, expected: Tensor, what: str = "") -> None:
    """Checks that every byte is equal."""
    got = got.detach().cpu()
    assert got.dtype is expected.dtype, f"{what}: expected {expected.dtype}, got {got.dtype}"
    assert got.shape == expected.shape, f"{what}: expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    if got.numel() == 0:
        return
    left, right = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (got, expected))
    same = (left == right).view(got.numel(), -1).all(1)
    _fail_where(~same, got.reshape(-1), expected.reshape(-1), what)


def _fail_where(bad: Tensor, got: Tensor, expected: Tensor, what: str) -> None:
    if not bool(bad.any()):
        return
    where = [tuple(index) for index in bad.nonzero()[:5].tolist()]
    shown = ", ".join(f"{list(index)}: got {got[index].item()}, expected {expected[index].item()}" for index in where)
    raise AssertionError(f"{what}: {int(bad.sum())} of {bad.numel()} elements are wrong; {shown}")
