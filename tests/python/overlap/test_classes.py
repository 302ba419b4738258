"""The overlap classes on a CPU: every element of every method against products in fp64."""

from __future__ import annotations

import pytest
import torch

import torch_overlap as to
from torch_overlap import CommOverlapMethod as Method
from torch_overlap import CommOverlapType as Type
from torch_overlap import TorchComm
from torch_overlap.testing import run_ranks

AG, RS = Type.AG, Type.RS
ROUNDS = 3  # calls one after another, with nothing between them


def share(tokens: int, size: int, rank: int) -> slice:
    """The rows of a rank: equal parts, rounded up."""
    largest = -(-tokens // size)
    return slice(min(rank * largest, tokens), min((rank + 1) * largest, tokens))


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def check(actual: torch.Tensor, expected: torch.Tensor, terms: int, dtype: torch.dtype, what: str) -> None:
    """Every element within what rounding to `dtype`, and adding `terms` products in fp32, can make."""
    error = (actual.double() - expected).abs()
    rounded = torch.finfo(dtype).eps * (2 * expected.abs() + 2 * terms**0.5)
    summed = torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps * 8 * terms
    allowed = rounded + summed
    worst = int((error - allowed).argmax())
    assert bool((error <= allowed).all()), (
        f"{what}: element {worst} is {actual.flatten()[worst].item()}, expected {expected.flatten()[worst].item()}; "
        f"{int((error > allowed).sum())} of {error.numel()} are wrong"
    )


def make(comm: TorchComm, kind: Type, method: Method, shape: tuple[int, int], dtype: torch.dtype, **options):
    config = to.CommOverlapConfig(kind, method, list(shape), dtype, comm.get_size(), **options)
    cls = to.CommOverlapP2PBase if method == Method.RING_EXCHANGE else to.CommOverlapBase
    return cls(comm, config)


def gather_case(comm: TorchComm, seed: int, dtype: torch.dtype, tokens: int, options: dict) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    k, n = 24, 10
    active = options.pop("active", tokens)
    buffer = make(comm, AG, Method.RING_EXCHANGE, (tokens, k), dtype, **options)
    buffer.set_active_tokens(active)
    mine = share(active, size, rank)
    for turn in range(ROUNDS):
        x = draw((active, k), dtype, seed + turn)
        w = draw((n, k), dtype, seed + 100 + turn * size + rank)
        bias = draw((n,), dtype, seed + 200 + rank)
        expected = x.double() @ w.double().T + bias.double()
        out = torch.full((active, n), float("nan"), dtype=dtype)
        copy = torch.full((active, k), float("nan"), dtype=dtype)
        if turn % 2:  # from the buffer
            buffer.copy_into_buffer(x[mine], local_chunk=True)
            buffer.split_overlap_ag(w, True, None, False, out, bias, B_copy=copy)
            assert torch.equal(buffer.get_buffer(), x)
            for r in range(size):
                assert torch.equal(buffer.get_buffer_chunk_by_id(r), x[share(active, size, r)])
        else:
            buffer.split_overlap_ag(w, True, x[mine].clone(), False, out, bias, B_copy=copy)
        check(out, expected, k, dtype, f"turn {turn} on rank {rank}")
        assert torch.equal(copy, x)


def scatter_case(comm: TorchComm, seed: int, method: Method, dtype: torch.dtype, tokens: int, options: dict) -> None:
    rank, size = comm.get_rank(), comm.get_size()
    k, n = 24, 40
    active = options.pop("active", tokens)
    buffer = make(comm, RS, method, (tokens, n), dtype, **options)
    buffer.set_active_tokens(active)
    mine = share(active, size, rank)
    for turn in range(ROUNDS):
        xs = [draw((active, k), dtype, seed + turn * size + r) for r in range(size)]
        ws = [draw((n, k), dtype, seed + 1000 + turn * size + r) for r in range(size)]
        bias = draw((n,), dtype, seed + 2000)
        partial = [x.double() @ w.double().T for x, w in zip(xs, ws, strict=True)]
        expected = sum(partial)[mine] + bias.double()
        out = torch.full((mine.stop - mine.start, n), float("nan"), dtype=dtype)
        buffer.split_overlap_rs(ws[rank], True, xs[rank], False, None, bias, rs_output=out)
        # Each rank's product is rounded to `dtype` once, then their sum.
        check(out, expected, k * size * 4, dtype, f"turn {turn} on rank {rank}")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_split_overlap_ag(size: int, dtype: torch.dtype, seed: int) -> None:
    run_ranks(gather_case, size, seed, dtype, 13, {})


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("method", [Method.RING_EXCHANGE, Method.PIPELINE], ids=lambda m: m.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_split_overlap_rs(size: int, method: Method, dtype: torch.dtype, seed: int) -> None:
    run_ranks(scatter_case, size, seed, method, dtype, 13, {})
