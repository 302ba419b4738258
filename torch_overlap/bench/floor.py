"""The least time that the hardware allows: the product's own, the links' rate, and what cannot overlap.

The model knows tiles and waves: communication can hide behind all of a product but one wave, before which there is
nothing to send or after which there is nothing left to do. How long the whole product takes is measured in the same
run, and so are the rates. Not in it: interference over memory, L2 and power.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_overlap.bench.cases import Case

FLAG_US = 1.5  # from a store on a peer until its poll sees it
EMPTY_US = 1.2  # a kernel that does nothing, in a graph
START_US = 5.0  # of a product: its first loads and last stores
SMS = 132
FEW_ROWS = 256  # up to here a product is its weights' way into the SMs: all tiles end together, and nothing is hidden
# (rows, columns, share of the rate of the best) of tiles that products come in.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 192, 0.96), (128, 128, 0.90), (64, 256, 0.88), (64, 128, 0.75))


@dataclass(frozen=True)
class Rates:
    """Bytes a second: `link` out of one GPU to a peer while all do so, `memory` read and written by a copy."""

    link: float
    memory: float


def _flops_per_us(flops: float) -> float:
    """Of one GPU for a product of 16-bit floats: long ones are slowed by power."""
    fast, slow = 790e6, 705e6
    return fast + (slow - fast) * min(1.0, max(0.0, flops / 1e12 - 1.0))


def tilings(m: int, n: int, k: int, in_size: int, memory: float) -> list[tuple[float, float]]:
    """For each tile shape, microseconds of the whole product and of one wave of it."""
    flops = 2.0 * m * n * k
    rate = _flops_per_us(flops) * (2 if in_size == 1 else 1)
    least = ((m * k + n * k) * in_size + m * n * 2) / memory * 1e6
    found = []
    for rows, columns, share in TILES:
        waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / SMS)
        wave = 2.0 * rows * columns * k / (rate * share / SMS)
        found.append((max(waves * wave, least) + START_US, wave))
    return found


def gemm_floor_us(case: Case, tp: int, gemm_us: float, rates: Rates) -> float:
    """Of a product with its communication, for a whole product that takes `gemm_us` alone."""
    if case.op == "gemm" or tp == 1:
        return gemm_us
    if case.pattern in ("bulk_ag", "bulk_rs"):  # neither waits for the other
        return max(gemm_us, FLAG_US + case.moved(tp) / rates.link * 1e6)
    m, n, k = case.local(tp)
    plans = tilings(m, n, k, case.element_size(), rates.memory)
    fit = gemm_us / min(plans)[0]
    link_us = case.moved(tp) / rates.link * 1e6
    if case.pattern in ("ag_gemm", "a2a_gemm"):  # one wave after the last byte
        return min(max(whole * fit, FLAG_US + link_us + wave * fit) for whole, wave in plans)
    # The first tiles leave after one wave; the last arrive a flag later, for a sum on all ranks twice.
    hidden = min(max(whole * fit, wave * fit + link_us) for whole, wave in plans)
    if case.pattern in ("gemm_rs", "gemm_a2a"):
        return hidden + FLAG_US
    if m <= FEW_ROWS:
        return gemm_us + _all_reduce_us(m * n * 2, tp, rates.link, 1.5 * FLAG_US)
    return hidden + 2 * FLAG_US


def _all_reduce_us(size: int, tp: int, link: float, flag_us: float) -> float:
    """The quicker of sending everything to everybody, and of sending parts, summing and sending sums."""
    one = flag_us + (tp - 1) * size / link * 1e6
    two = 2 * flag_us + 2 * (tp - 1) / tp * size / link * 1e6
    return min(one, two)


def _broadcast_us(size: int, tp: int, link: float) -> float:
    """The quicker of sending everything to everybody, and of sending each a part that goes on to the others."""
    once = size / link * 1e6
    return min(FLAG_US + (tp - 1) * once, 2 * FLAG_US + once)


def collective_floor_us(case: Case, tp: int, rates: Rates) -> float:
    """Of a collective alone, in a graph."""
    if tp == 1:
        return EMPTY_US
    if case.op == "all_reduce":
        return EMPTY_US + _all_reduce_us(case.shape[0], tp, rates.link, FLAG_US)
    if case.op == "broadcast":
        return EMPTY_US + _broadcast_us(case.shape[0], tp, rates.link)
    return EMPTY_US + FLAG_US + case.moved(tp) / rates.link * 1e6


def floor_us(case: Case, tp: int, gemm_us: float | None, rates: Rates) -> float:
    """The floor of a case. `gemm_us` is of the rank's whole product alone, measured; None for collectives."""
    if case.is_gemm:
        if gemm_us is None:
            raise ValueError(f"bench: expected the time of the product alone for {case.op}, got none")
        return gemm_floor_us(case, tp, gemm_us, rates)
    return collective_floor_us(case, tp, rates)
