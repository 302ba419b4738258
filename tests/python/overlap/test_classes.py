"""The overlap classes on a CPU, over the grid of Transformer Engine's tests at reduced shapes, and beyond it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlap_cases import (
    AG,
    E4M3,
    E5M2,
    LAYOUTS,
    PIPELINE,
    PLAIN,
    RING,
    RS,
    Bulk,
    Case,
    Draw,
    External,
    Gather,
    Scatter,
    gelu,
    same,
    share,
)

import torch_overlap as to
from torch_overlap.testing import run_ranks

ROUNDS = 3  # calls back to back
BACKENDS = [("gloo", 1), ("gloo", 2), ("gloo", 3), ("gloo", 4), ("local", 6), ("local", 8)]
SIZES = pytest.mark.parametrize(("backend", "size"), BACKENDS)

Make = Callable[[to.TorchComm], Case]


def run_cases(comm: to.TorchComm, seed: int, cases: list[tuple[type[Case], tuple[Any, ...], dict[str, Any]]]) -> None:
    for i, (kind, args, options) in enumerate(cases):
        case = kind(comm, *args, **options)
        for turn in range(ROUNDS):
            case.step(seed + 100 * i + turn)


def run(cases: list[Any], backend: str, size: int, seed: int) -> None:
    run_ranks(run_cases, size, seed, cases, backend=backend, timeout=200)


def even(size: int) -> list[bool]:
    return [False, True] if size % 2 == 0 else [False]


def orders(size: int) -> list[dict[str, bool]]:
    """Ways to gather: directly from the owners, forwarded, two chunks at a time."""
    return [{}, {"relay_ag": True}, *([{"aggregate_ag": True}] if size % 2 == 0 else [])]


@SIZES
def test_split_overlap_ag(backend: str, size: int, seed: int) -> None:
    run(
        [
            (Gather, (dtype,), {"fill": fill, "options": options})
            for dtype in PLAIN
            for options in orders(size)
            for fill in (False, True)
        ],
        backend, size, seed,
    )  # fmt: skip


@SIZES
def test_split_overlap_ag_of_8_bits(backend: str, size: int, seed: int) -> None:
    """The buffer may have bytes or the operand's dtype; the factor is an argument or the buffer's."""
    cases = [
        (Gather, (x,), {"weight_dtype": w, "buffer_dtype": buffer, "out_dtype": out, "fill": buffer == x and fill,
                        "epilogue": "bias", "options": {"aggregate_ag": aggregate}})
        for x, w, out in [(E4M3, E4M3, torch.bfloat16), (E5M2, E4M3, torch.float32), (E4M3, E5M2, torch.float16)]
        for buffer, fill in [(torch.uint8, False), (x, False), (x, True)]
        for aggregate in even(size)
    ]  # fmt: skip
    run(cases, backend, size, seed)


@SIZES
def test_epilogues_of_split_overlap_ag(backend: str, size: int, seed: int) -> None:
    cases = [
        (Gather, (dtype,), {"epilogue": epilogue, "accumulate": accumulate, "layout": layout,
                            "options": {"num_max_streams": 1 + i % 4}})
        for dtype in (torch.float32, torch.bfloat16)
        for i, epilogue in enumerate(["none", "bias", "gelu", "bias_gelu", "dgelu"])
        for accumulate in (False, True)
        for layout in ("TN", "NN")
    ]  # fmt: skip
    cases.append((Gather, (torch.bfloat16,), {"out_dtype": torch.float32, "accumulate": True}))
    cases.append((Gather, (torch.float64,), {"epilogue": "bias_gelu", "accumulate": True}))
    run(cases, backend, size, seed)


@SIZES
@pytest.mark.parametrize("method", [RING, PIPELINE], ids=lambda m: m.name)
def test_split_overlap_rs(backend: str, size: int, method: to.CommOverlapMethod, seed: int) -> None:
    cases: list[Any] = [
        (Scatter, (method, dtype), {"layout": layout, "bias": bias})
        for dtype in PLAIN
        for layout, bias in zip(LAYOUTS, [True, False, True, False], strict=True)
    ]
    if method == PIPELINE:
        cases += [
            (Scatter, (method,), {"n": n, "options": {"num_splits": splits, "rs_overlap_first_gemm": first}})
            for splits in (1, 2, 3, 7)
            for n in (8, 50)  # fewer pieces than requested, and uneven ones
            for first in (False, True)
        ]
    run(cases, backend, size, seed)


@SIZES
@pytest.mark.parametrize("method", [RING, PIPELINE], ids=lambda m: m.name)
def test_split_overlap_rs_of_8_bits(backend: str, size: int, method: to.CommOverlapMethod, seed: int) -> None:
    """8-bit operands, 8-bit buffers (D_scale, set_ubuf_scale_inv, D_amax), and both."""
    cases: list[Any] = [
        (Scatter, (method, buffer), {"operand_dtype": operand, "out_dtype": out, "bias": bias})
        for buffer in (E4M3, E5M2)
        for operand in (torch.bfloat16, E4M3)
        for out, bias in [(torch.float32, True), (torch.bfloat16, False), (torch.float16, True)]
    ]
    cases += [(Scatter, (method, dtype), {"operand_dtype": E4M3}) for dtype in (torch.bfloat16, torch.float32)]
    run(cases, backend, size, seed)


@SIZES
def test_bulk_overlap(backend: str, size: int, seed: int) -> None:
    cases: list[Any] = [
        (Bulk, (kind, dtype), {"in_place": in_place, "both": both})
        for dtype in PLAIN
        for kind, in_place in [(AG, True), (RS, True), (RS, False)]
        for both in (False, True)
    ]
    cases += [(Bulk, (RS, dtype), {"method": PIPELINE, "in_place": in_place}) for dtype in PLAIN
              for in_place in (True, False)]  # fmt: skip
    cases += [(Bulk, (AG, dtype), {}) for dtype in (E4M3, E5M2)]
    cases += [
        (Bulk, (RS, dtype), {"in_place": False, "out_dtype": out})
        for dtype in (E4M3, E5M2)
        for out in (torch.float32, torch.bfloat16, torch.float16)
    ]
    run(cases, backend, size, seed)


@SIZES
def test_bulk_overlap_external_ag(backend: str, size: int, seed: int) -> None:
    run([(External, (dtype, lender), {}) for dtype in (torch.bfloat16, torch.float64, E4M3)
         for lender in ("ring", "bulk")] + [(External, (), {"kind": to.CommOverlapType.NONE})],
        backend, size, seed)  # fmt: skip


@SIZES
@pytest.mark.parametrize("active", [0, 1, 2, 5, 12, 16])
def test_active_tokens(backend: str, size: int, active: int, seed: int) -> None:
    """No tokens, fewer than ranks, uneven ends, and the maximum."""
    sizes = {"tokens": 16, "active": active}
    cases: list[Any] = [(Gather, (), {"fill": fill, "options": options, **sizes})
                        for options in orders(size) for fill in (False, True)]  # fmt: skip
    cases += [(Gather, (E4M3,), {"epilogue": "gelu", **sizes})]
    cases += [(Scatter, (method, dtype), sizes) for method in (RING, PIPELINE) for dtype in (torch.bfloat16, E4M3)]
    cases += [(Bulk, (AG,), sizes), (Bulk, (RS,), sizes), (Bulk, (RS,), {"in_place": False, **sizes})]
    cases += [(External, (), sizes)]
    run(cases, backend, size, seed)


def run_changing_tokens(comm: to.TorchComm, seed: int) -> None:
    cases: list[Case] = [
        Gather(comm, fill=True),
        Scatter(comm, RING),
        Scatter(comm, PIPELINE),
        Bulk(comm, AG),
        Bulk(comm, RS),
    ]
    for turn, active in enumerate([13, 0, 1, 7, 13, 2, 12]):
        for case in cases:
            case.active = active
            case.mine = share(active, case.size, case.rank)
            case.rows = case.mine.stop - case.mine.start
            case.buffer.set_active_tokens(active)
            case.step(seed + turn)


@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), ("local", 4)])
def test_active_tokens_change_from_call_to_call(backend: str, size: int, seed: int) -> None:
    run_ranks(run_changing_tokens, size, seed, backend=backend)


def run_atomic_pair(comm: to.TorchComm, seed: int, dtype: torch.dtype, aggregate: bool) -> None:
    """The pair of a layer: gather, product, GELU, product, scatter; equal to the split methods, bit by bit."""
    tokens, k, n = 14, 32, 48
    gathers = [Gather(comm, dtype, atomic=a, tokens=tokens, options={"aggregate_ag": aggregate}) for a in (True, False)]
    scatters = [Scatter(comm, RING, dtype, atomic=a, tokens=tokens) for a in (True, False)]
    for case in (*gathers, *scatters, Scatter(comm, PIPELINE, dtype, atomic=True, tokens=tokens)):
        assert case.buffer.is_atomic_gemm() is case.atomic
        case.step(seed)
    mine = Draw(seed + comm.get_rank())
    results = []
    x, w1, w2 = mine(gathers[0].rows, k, dtype=dtype), mine(n, k, dtype=dtype), mine(n, n, dtype=dtype)
    for gather, scatter in zip(gathers, scatters, strict=True):
        h = torch.empty(tokens, n, dtype=dtype)
        out = torch.empty(scatter.rows, n, dtype=dtype)
        suffix = "atomic_gemm_overlap" if gather.atomic else "split_overlap"
        getattr(gather.buffer, f"{suffix}_ag")(w1, True, x, False, h)
        getattr(scatter.buffer, f"{suffix}_rs")(w2, True, gelu(h), False, None, rs_output=out)
        for case, kind in ((gather, "ag"), (scatter, "rs")):
            path = case.buffer.last_path()
            assert path.startswith(f"{suffix}_{kind}: shared memory, ")
            assert path.endswith(" streams, flags in place of counters" if case.atomic else " streams")
        results.append(out)
    assert same(*results)


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("gloo", 4), ("local", 3), ("local", 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_atomic_pairs(backend: str, size: int, dtype: torch.dtype, seed: int) -> None:
    run_ranks(run_atomic_pair, size, seed, dtype, size % 2 == 0, backend=backend)
