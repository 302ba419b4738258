"""ReduceOp behaves like a value."""

import copy
import pickle

import pytest
import torch

from torch_overlap import InvalidTypeError, InvalidValueError, RedOpType, ReduceOp, TorchComm
from torch_overlap.testing import run_ranks

PLAIN = [kind for kind in RedOpType if kind is not RedOpType.PREMUL_SUM]


@pytest.mark.parametrize("kind", PLAIN)
def test_attributes_are_values_of_their_type(kind: RedOpType) -> None:
    op = getattr(ReduceOp, kind.name)
    assert isinstance(op, ReduceOp)
    assert op.type is kind
    assert op.factor is None
    assert op == ReduceOp(kind)
    assert hash(op) == hash(ReduceOp(opType=kind))
    assert repr(op) == f"ReduceOp.{kind.name}"
    assert pickle.loads(pickle.dumps(op)) == op
    assert copy.copy(op) == op
    memo: dict[int, object] = {}
    assert copy.deepcopy(op, memo) is op
    assert memo[id(op)] is op


def test_different_operations_are_not_equal() -> None:
    ops = [ReduceOp(kind) for kind in PLAIN] + [ReduceOp.PREMUL_SUM(2.0), ReduceOp.PREMUL_SUM(3.0)]
    assert len(set(ops)) == len(ops)
    assert ReduceOp.SUM != RedOpType.SUM
    assert ReduceOp.SUM != "SUM"


def test_a_premul_sum_carries_its_factor() -> None:
    assert ReduceOp.PREMUL_SUM(2) == ReduceOp.PREMUL_SUM(2.0)
    assert ReduceOp.PREMUL_SUM(2).factor == 2.0
    assert repr(ReduceOp.PREMUL_SUM(0.5)) == "ReduceOp.PREMUL_SUM(0.5)"
    factor = torch.tensor([2.0])
    op = ReduceOp.PREMUL_SUM(factor)
    assert op.factor is factor
    assert op == ReduceOp.PREMUL_SUM(factor)
    assert op != ReduceOp.PREMUL_SUM(factor.clone())


def test_a_premul_sum_needs_a_factor() -> None:
    with pytest.raises(InvalidTypeError, match=r"PREMUL_SUM\(factor\)"):
        ReduceOp(RedOpType.PREMUL_SUM)
    with pytest.raises(InvalidTypeError, match="expected a number or a one-element tensor for factor, got 'two'"):
        ReduceOp.PREMUL_SUM("two")  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="one element"):
        ReduceOp.PREMUL_SUM(torch.ones(2))


def run_bare_name(comm: TorchComm) -> None:
    with pytest.raises(
        InvalidTypeError, match=r"all_reduce: expected a ReduceOp for op, .*ReduceOp.PREMUL_SUM\(factor\)"
    ):
        comm.all_reduce(torch.ones(1), ReduceOp.PREMUL_SUM, False)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="all_reduce: expected a ReduceOp for op, got the class"):
        comm.all_reduce(torch.ones(1), ReduceOp, False)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="reduce: expected a ReduceOp for op, got 'sum'"):
        comm.reduce(torch.ones(1), 0, "sum", False)  # type: ignore[arg-type]


def test_the_bare_name_as_an_operation_says_how_to_write_it() -> None:
    run_ranks(run_bare_name, 1, backend="local")
