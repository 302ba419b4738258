"""Ranks that cannot reach each other's memory: every method uses the communicator, and last_path() has the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from overlap_cases import (
    AG,
    E4M3,
    E5M2,
    PIPELINE,
    PLAIN,
    RING,
    RS,
    Bulk,
    Case,
    External,
    Gather,
    Scatter,
    make,
)

import torch_overlap as to
from torch_overlap.testing import run_ranks

PATH = {
    Gather: "split_overlap_ag",
    Scatter: "split_overlap_rs",
    Bulk: "bulk_overlap",
    External: "bulk_overlap_external_ag",
}


def run_cases(comm: to.TorchComm, seed: int, cases: list[tuple[type[Case], tuple[Any, ...], dict[str, Any]]]) -> None:
    for i, (kind, args, options) in enumerate(cases):
        pretence = to._C._PretendUnreachable()
        case = kind(comm, *args, **options)
        del pretence
        for turn in range(3):
            case.step(seed + 100 * i + turn)
        path = case.buffer.last_path()
        atomic = getattr(case, "atomic", False)
        name = PATH[kind].replace("split", "atomic_gemm") if atomic else PATH[kind]
        assert path.startswith(f"{name}: send and receive, "), path
        assert path.endswith(" (ranks pretend that peers' memory is unreachable)"), path


@pytest.mark.parametrize(
    ("backend", "size"), [("gloo", 1), ("gloo", 2), ("gloo", 3), ("gloo", 4), ("local", 4), ("local", 6)]
)
def test_every_method_goes_through_the_communicator(backend: str, size: int, seed: int) -> None:
    pairs = [False, True] if size % 2 == 0 else [False]
    cases: list[Any] = [(Gather, (dtype,), {"fill": fill, "options": {"aggregate_ag": aggregate}})
                        for dtype in (*PLAIN, E4M3) for aggregate in pairs for fill in (False, True)]  # fmt: skip
    cases += [(Gather, (), {"epilogue": "bias_gelu", "atomic": True, "accumulate": True})]
    cases += [(Gather, (), {"fill": fill, "options": {"relay_ag": True}}) for fill in (False, True)]
    cases += [(Scatter, (method, dtype), {"layout": layout})
              for method in (RING, PIPELINE) for dtype in (*PLAIN, E4M3, E5M2)
              for layout in (["TN", "NT"] if dtype == torch.float32 else ["TN"])]  # fmt: skip
    cases += [(Scatter, (method,), {"atomic": True}) for method in (RING, PIPELINE)]
    cases += [(Bulk, (AG, dtype), {}) for dtype in (*PLAIN, E5M2)]
    cases += [(Bulk, (RS, dtype), {"in_place": in_place}) for dtype in PLAIN for in_place in (False, True)]
    cases += [(Bulk, (RS, E4M3), {"in_place": False}), (External, (), {}), (External, (E4M3, "bulk"), {})]
    run_ranks(run_cases, size, seed, cases, backend=backend, timeout=200)


@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), ("local", 4)])
@pytest.mark.parametrize("active", [0, 1, 2, 13, 16])
def test_active_tokens(backend: str, size: int, active: int, seed: int) -> None:
    sizes = {"tokens": 16, "active": active}
    cases: list[Any] = [(Gather, (), sizes), (Gather, (), {"fill": True, **sizes})]
    cases += [(Scatter, (method,), sizes) for method in (RING, PIPELINE)]
    cases += [
        (Bulk, (AG,), sizes),
        (Bulk, (RS,), sizes),
        (Bulk, (RS,), {"in_place": False, **sizes}),
        (External, (), sizes),
    ]
    run_ranks(run_cases, size, seed, cases, backend=backend, timeout=120)


def run_both(comm: to.TorchComm, seed: int) -> None:
    pretence = to._C._PretendUnreachable()
    sent = Gather(comm)
    del pretence
    comm.barrier(async_op=False)  # threads share the setting
    mapped = Gather(comm)
    for turn in range(5):
        sent.step(seed + turn)
        mapped.step(seed + turn)
        assert sent.buffer.last_path().startswith("split_overlap_ag: send and receive, ")
        size = comm.get_size()
        streams = min(size, 3)
        assert mapped.buffer.last_path() == f"split_overlap_ag: shared memory, {size} products on {streams} streams"


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("local", 4)])
def test_both_ways_side_by_side(backend: str, size: int, seed: int) -> None:
    run_ranks(run_both, size, seed, backend=backend)


def run_fake(comm: to.TorchComm) -> None:
    """No peers: shapes are checked and calls return."""
    size = comm.get_size()
    gather = make(comm, AG, RING, (4 * size, 8), torch.float32)
    gather.split_overlap_ag(torch.ones(6, 8), True, torch.ones(4, 8), False, torch.empty(4 * size, 6))
    assert gather.last_path().endswith("(the communicator has no peers)")
    for method in (RING, PIPELINE):
        scatter = make(comm, RS, method, (4 * size, 8), torch.float32)
        scatter.split_overlap_rs(
            torch.ones(8, 6), True, torch.ones(4 * size, 6), False, None, rs_output=torch.empty(4, 8)
        )
        with pytest.raises(to.InvalidValueError, match="sized incorrectly"):
            scatter.split_overlap_rs(
                torch.ones(8, 6), True, torch.ones(4 * size, 6), False, None, rs_output=torch.empty(3, 8)
            )


def test_fake() -> None:
    run_ranks(run_fake, 4, backend="fake")
