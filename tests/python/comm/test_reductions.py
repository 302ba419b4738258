"""Every (backend, operation, dtype) triple gives the right values, or the error that docs/reference/errors.md lists."""

from pathlib import Path

import pytest
import torch
from rank_values import (
    COMPLEX,
    DTYPES,
    FLOATS,
    INTEGERS,
    OTHERS,
    assert_equal,
    assert_reduced,
    is_legal,
    poisoned,
    rank_input,
)

from torch_overlap import InvalidTypeError, RedOpType, ReduceOp, TorchComm
from torch_overlap.testing import run_ranks


def make_op(op: RedOpType, factor: float) -> ReduceOp:
    return ReduceOp.PREMUL_SUM(factor) if op is RedOpType.PREMUL_SUM else ReduceOp(op)


def run_dtypes(comm: TorchComm, kind: RedOpType, seed: int) -> list[str]:
    """Runs all dtypes through all five reductions; returns those that were refused.

    `fake` gives the result for equal ranks.
    """
    rank, size, device = comm.get_rank(), comm.get_size(), comm.get_device()
    sources = [rank] * size if comm.get_backend() == "fake" else list(range(size))
    factors = [[0.5, 2.0, 1.0, 0.25][source % 4] for source in sources] if kind is RedOpType.PREMUL_SUM else None
    op = make_op(kind, factors[rank] if factors else 0)
    refused = []
    for dtype in DTYPES:
        inputs = [rank_input(seed, source, (size, 41), dtype) for source in sources]
        mine = inputs[rank].to(device)
        if not is_legal(kind, dtype):
            with pytest.raises(InvalidTypeError, match="expected"):
                comm.all_reduce(mine, op, False)
            refused.append(str(dtype))
            continue
        for async_op in (False, True):
            tensor = mine.clone()
            comm.all_reduce(tensor, op, async_op).wait()
            assert_reduced(tensor, op, inputs, factors)
        tensor = mine.clone()
        comm.reduce(tensor, size - 1, op, False).wait()
        if rank == size - 1:
            assert_reduced(tensor, op, inputs, factors)
        else:
            assert_equal(tensor, mine.cpu(), "a rank that is not the root")
        column = [part[rank] for part in inputs]
        for separate in (False, True):
            output = poisoned((41,), dtype, device)
            if separate:
                comm.reduce_scatter(output, [row.clone() for row in mine], op, False).wait()
            else:
                comm.reduce_scatter_single(output, mine, op, False).wait()
            assert_reduced(output, op, column, factors)
        output = poisoned((41,), dtype, device)
        comm.reduce_scatter_v(output, list(mine), op, False).wait()
        assert_reduced(output, op, column, factors)
    return refused


@pytest.mark.parametrize("op", list(RedOpType))
def test_every_dtype_is_reduced_or_refused(
    op: RedOpType, any_backend: str, any_size: int, device: str, seed: int
) -> None:
    refused = run_ranks(run_dtypes, any_size, op, seed, backend=any_backend, device=device)
    assert refused == [[str(dtype) for dtype in DTYPES if not is_legal(op, dtype)]] * any_size


def run_others(comm: TorchComm, seed: int) -> None:
    for dtype in OTHERS:
        mine = rank_input(seed, comm.get_rank(), (8,), dtype).to(comm.get_device())
        for kind in RedOpType:
            with pytest.raises(InvalidTypeError, match=r"all_reduce: expected .*dtype"):
                comm.all_reduce(mine, make_op(kind, 1.0), False)
        assert_equal(mine, rank_input(seed, comm.get_rank(), (8,), dtype))


def test_every_other_dtype_is_refused(any_backend: str, device: str, seed: int) -> None:
    run_ranks(run_others, 2, seed, backend=any_backend, device=device)


PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "errors.md"
DTYPES_OF_ROWS = {
    "uint8/16/32/64, int8/16/32/64": INTEGERS,
    "bool": (torch.bool,),
    "float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2": FLOATS,
    "complex32, complex64, complex128": COMPLEX,
}


def test_the_refusals_are_the_skips_of_the_documentation() -> None:
    lines = PAGE.read_text().split("## Operations and dtypes")[1].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    skipped = {
        (RedOpType[op], dtype)
        for name, *cells in rows
        for dtype in DTYPES_OF_ROWS[name.split(" (")[0]]
        for ops, cell in zip(head[1:], cells, strict=True)
        for op in ops.split()
        if cell == "skip"
    }
    assert {RedOpType[op] for ops in head[1:] for op in ops.split()} == set(RedOpType)
    assert {row[0].split(" (")[0] for row in rows} == set(DTYPES_OF_ROWS)
    assert skipped == {(op, dtype) for op in RedOpType for dtype in DTYPES if not is_legal(op, dtype)}


def run_tensor_factor(comm: TorchComm, seed: int) -> None:
    size, device = comm.get_size(), comm.get_device()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        inputs = [rank_input(seed, rank, (33,), dtype) for rank in range(size)]
        tensor = inputs[comm.get_rank()].clone().to(device)
        factor = torch.tensor([0.5 + comm.get_rank()], dtype=dtype, device=device)
        op = ReduceOp.PREMUL_SUM(factor)
        work = comm.all_reduce(tensor, op, True)
        del factor, op  # the work holds the factor
        work.wait()
        factors = [0.5 + rank for rank in range(size)]
        assert_reduced(tensor, ReduceOp.PREMUL_SUM(1.0), inputs, factors)


def test_a_factor_may_be_a_tensor(backend: str, size: int, device: str, seed: int) -> None:
    run_ranks(run_tensor_factor, size, seed, backend=backend, device=device)


def run_deterministic(comm: TorchComm, seed: int) -> list[torch.Tensor]:
    results = []
    for _ in range(3):
        tensor = rank_input(seed, comm.get_rank(), (1000,), torch.bfloat16).to(comm.get_device())
        comm.all_reduce(tensor, ReduceOp.SUM, False).wait()
        results.append(tensor.cpu())
    return results


def test_ranks_and_repetitions_agree_bit_for_bit(backend: str, size: int, device: str, seed: int) -> None:
    results = [
        tensor for row in run_ranks(run_deterministic, size, seed, backend=backend, device=device) for tensor in row
    ]
    for tensor in results[1:]:
        assert torch.equal(tensor, results[0])


def run_sparse(comm: TorchComm, seed: int) -> torch.Tensor:
    dense = [rank_input(seed, rank, (6, 4), torch.float64) for rank in range(comm.get_size())]
    for rank, part in enumerate(dense):
        part[rank % 6] = 0
        part[:, rank % 4] = 0
    sparse = dense[comm.get_rank()].to_sparse().to(comm.get_device())
    comm.all_reduce(sparse, ReduceOp.SUM, False).wait()
    assert sparse.is_sparse
    assert sparse.is_coalesced()
    assert torch.allclose(sparse.to_dense().cpu(), torch.stack(dense).sum(0), rtol=1e-12, atol=1e-12)
    return sparse.to_dense().cpu()


def test_a_sparse_tensor_becomes_the_coalesced_sum(backend: str, size: int, device: str, seed: int) -> None:
    run_ranks(run_sparse, size, seed, backend=backend, device=device)
