"""Shapes, sets, and the order of a run."""

from __future__ import annotations

import pytest

from torch_overlap.tools.bench.cases import (
    CACHE_BYTES,
    CLASS_OPS,
    COLLECTIVES,
    DTYPES,
    EXCHANGE_OPS,
    GEMM_OPS,
    KNOWN_OPS,
    LAYERS,
    MIB,
    OPS,
    SETS,
    Case,
    cases_of,
    in_order,
    parse_shape,
)
from torch_overlap.tools.bench.cli import chosen_cases


def test_shapes_of_a_command_line() -> None:
    assert parse_shape("ag_gemm", "64,96,32", "fp16") == Case("ag_gemm", (64, 96, 32), "fp16")
    assert parse_shape("ag_gemm", "8192,10240,8192", "bf16").name == "70b-qkv"
    assert parse_shape("gemm_rs", "70b-o", "bf16").shape == (8192, 8192, 8192)
    assert parse_shape("gemm_ar_norm", "70b-o M=16", "bf16") == parse_shape("gemm_ar_norm", "16,8192,8192", "bf16")
    assert [parse_shape("all_reduce", text, "bf16").shape[0] for text in ("10", "64K", "2m")] == [10, 65536, 2 * MIB]


@pytest.mark.parametrize(
    ("op", "text"), [("ag_gemm", "64,96"), ("ag_gemm", "70b-o"), ("gemm_rs", "a,b,c"), ("all_gather", "64,64,64")]
)
def test_shapes_that_are_none(op: str, text: str) -> None:
    with pytest.raises(ValueError, match="bench: expected --shape of"):
        parse_shape(op, text, "bf16")


@pytest.mark.parametrize(
    ("what", "shapes", "name", "match"),
    [
        ([], [], None, "got nothing"),
        (["ag_gem"], [], None, "got ag_gem"),
        (["ag_gemm"], ["64,64,64"], "bf16", "--shape or --set"),
        (["all_reduce"], [], "decode", "expected a set"),
    ],
)
def test_command_lines_that_cannot_be(what: list[str], shapes: list[str], name: str | None, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        chosen_cases(what, shapes, name, None)


def test_all_beside_others() -> None:
    found = chosen_cases(["a2a_gemm", "all", "ag_gemm"], [], None, None)
    assert list(dict.fromkeys(case.op for case in found)) == ["a2a_gemm", *(op for op in OPS if cases_of(op, "bf16"))]
    assert len(set(found)) == len(found)


def test_every_set_can_be_shared_by_2_4_and_8_ranks() -> None:
    for name in SETS:
        cases = [case for op in KNOWN_OPS for case in cases_of(op, name)]
        assert cases
        assert len(set(cases)) == len(cases)
        for case in cases:
            for tp in (2, 4, 8):
                case.check(tp)
                assert case.calls(tp) >= 2
    assert {case.dtype for case in cases_of("ag_gemm", "fp8")} == {"fp8"}
    assert {case.dtype for case in cases_of("all_reduce", "bf16", "fp16")} == {"fp16"}
    assert set(DTYPES) <= set(SETS)
    assert set(LAYERS) == {*GEMM_OPS, *EXCHANGE_OPS, *CLASS_OPS}


@pytest.mark.parametrize(
    ("op", "shape"),
    [("ag_gemm", (65, 64, 64)), ("gemm_rs", (64, 64, 65)), ("gemm_ar", (3, 5, 7)), ("all_reduce", (6,))],
)
def test_shapes_that_ranks_cannot_share(op: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="share equally"):
        Case(op, shape).check(2)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_inputs_take_turns_beyond_the_cache(tp: int) -> None:
    for op in (*GEMM_OPS, *EXCHANGE_OPS, *CLASS_OPS):
        for case in cases_of(op, "bf16"):
            assert case.sets(tp) * case.set_bytes(tp) >= CACHE_BYTES
            assert case.calls(tp) >= case.sets(tp)


def test_a_run_that_is_cut_off_has_the_first_of_everything() -> None:
    ops = [op for op in OPS if cases_of(op, "bf16")]  # gemm_ar_norm is one of decoding
    cases = [case for op in ops for case in cases_of(op, "bf16")]
    visits = in_order(cases, ("graph", "eager"))
    assert len(visits) == 2 * len(cases) == len(set(visits))
    assert [visit.mode for visit in visits] == ["graph"] * len(cases) + ["eager"] * len(cases)
    assert [visit.case.op for visit in visits[: len(ops)]] == ops
    first = {op: cases_of(op, "bf16")[0] for op in ops}
    assert {visit.case.op: visit.case for visit in visits[: len(ops)]} == first


def test_what_a_rank_sends() -> None:
    m, n, k, tp = 8192, 10240, 8192, 4
    assert Case("ag_gemm", (m, n, k)).moved(tp) == 3 * m * k * 2 // 4
    assert Case("gemm_rs", (m, n, k)).moved(tp) == 3 * m * n * 2 // 4
    assert Case("gemm_ar", (m, n, k)).moved(tp) == 2 * Case("gemm_rs", (m, n, k)).moved(tp)
    assert Case("gemm", (m, n, k)).moved(tp) == 0
    assert {op: Case(op, (1024,)).moved(tp) for op in COLLECTIVES} == {
        "all_reduce": 1536, "all_gather": 768, "reduce_scatter": 768, "all_to_all": 768, "broadcast": 1024
    }  # fmt: skip
    assert Case("ag_gemm", (m, n, k)).local(tp) == (m, n // 4, k)
    assert Case("gemm_rs", (m, n, k)).local(tp) == (m, n, k // 4)
    for op in ("ag_gemm", "gemm_rs"):
        ours, theirs = Case(op, (m, n, k)), Case(f"{op}_classes", (m, n, k))
        assert (theirs.local(tp), theirs.moved(tp)) == (ours.local(tp), ours.moved(tp))
    # dx [m, k] = dy w, dw [n, k] = dy^T x: for the n of a rank; all rows of x or dx travel in the meantime
    for op, local in (("bulk_ag", (m, k, n // 4)), ("bulk_rs", (n // 4, k, m))):
        assert (Case(op, (m, n, k)).local(tp), Case(op, (m, n, k)).moved(tp)) == (local, 3 * m * k * 2 // 4)


def test_few_tokens_have_every_operator_of_a_layer() -> None:
    found = chosen_cases(["all"], [], "decode", None)
    assert {case.op for case in found} == {"ag_gemm", "gemm_rs", "gemm_ar", "gemm_ar_norm"}
    for op in ("ag_gemm", "gemm_rs", "gemm_ar", "gemm_ar_norm"):
        assert {case.shape[0] for case in found if case.op == op} == {16, 64, 256}
    assert Case("ag_gemm", (16, 57344, 8192), name="70b-up M=16") in found


def test_all_stands_for_the_operators() -> None:
    assert {case.op for case in chosen_cases(["all"], [], "tiny", None)} == set(OPS)
    assert {case.op for case in chosen_cases(CLASS_OPS, [], "tiny", None)} == set(CLASS_OPS)
