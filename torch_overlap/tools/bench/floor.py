"""The least time that the hardware allows: the product's own time, the links' rate, and the part that cannot overlap.

The model knows tiles and waves: communication can overlap with all of a product but one wave, before which there is
nothing to send or after which nothing is left to compute. The time of the whole product and the rates are measured in
the same run. Interference over memory, L2 and power is not modelled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_overlap.tools.bench.cases import Case

FLAG_LATENCY_US = 1.5  # time from a store to a peer's memory until the peer's poll sees it
EMPTY_KERNEL_US = 1.2  # time of an empty kernel in a graph
GEMM_OVERHEAD_US = 5.0  # prologue and epilogue of a product: its first loads and last stores
SMS = 132
WEIGHT_BOUND_MAX_ROWS = (
    256  # up to this many rows a product is bound by loading its weights: all tiles end together, and nothing is hidden
)
# (rows, columns, rate relative to the best) of the tile shapes.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 192, 0.96), (128, 128, 0.90), (64, 256, 0.88), (64, 128, 0.75))


@dataclass(frozen=True)
class Rates:
    """Rates in bytes per second. `link`: out of one GPU to a peer while all send. `memory`: read and written by a
    copy."""

    link: float
    memory: float


def _flops_per_us(flops: float) -> float:
    """Returns the rate of one GPU for a product of 16-bit floats. Long products are limited by power."""
    fast, slow = 790e6, 705e6
    return fast + (slow - fast) * min(1.0, max(0.0, flops / 1e12 - 1.0))


def tile_times_us(m: int, n: int, k: int, in_size: int, memory: float) -> list[tuple[float, float]]:
    """Returns, for each tile shape, microseconds of the whole product and of one wave of it."""
    flops = 2.0 * m * n * k
    rate = _flops_per_us(flops) * (2 if in_size == 1 else 1)
    least = ((m * k + n * k) * in_size + m * n * 2) / memory * 1e6
    found = []
    for rows, columns, share in TILES:
        waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / SMS)
        wave = 2.0 * rows * columns * k / (rate * share / SMS)
        found.append((max(waves * wave, least) + GEMM_OVERHEAD_US, wave))
    return found


def gemm_floor_us(case: Case, tp: int, gemm_us: float, rates: Rates) -> float:
    """Returns the floor of a product with its communication, given the time `gemm_us` of the whole product without
    it."""
    if case.op == "gemm" or tp == 1:
        return gemm_us
    if case.pattern in ("bulk_ag", "bulk_rs"):  # neither waits for the other
        return max(gemm_us, FLAG_LATENCY_US + case.moved(tp) / rates.link * 1e6)
    m, n, k = case.local(tp)
    plans = tile_times_us(m, n, k, case.element_size(), rates.memory)
    fit = gemm_us / min(plans)[0]
    link_us = case.moved(tp) / rates.link * 1e6
    if case.pattern in ("ag_gemm", "a2a_gemm"):  # one wave after the last byte
        return min(max(whole * fit, FLAG_LATENCY_US + link_us + wave * fit) for whole, wave in plans)
    # The first tiles are sent after one wave; the last ones arrive one flag later, or two flags if all ranks need the
    # sum.
    hidden = min(max(whole * fit, wave * fit + link_us) for whole, wave in plans)
    if case.pattern in ("gemm_rs", "gemm_a2a"):
        return hidden + FLAG_LATENCY_US
    if m <= WEIGHT_BOUND_MAX_ROWS:
        return gemm_us + _all_reduce_us(m * n * 2, tp, rates.link, 1.5 * FLAG_LATENCY_US)
    return hidden + 2 * FLAG_LATENCY_US


def _all_reduce_us(size: int, tp: int, link: float, flag_us: float) -> float:
    """Returns the lesser time of one shot (everything to all peers) and two shot (reduce-scatter, then all-gather)."""
    one = flag_us + (tp - 1) * size / link * 1e6
    two_shot_us = 2 * flag_us + 2 * (tp - 1) / tp * size / link * 1e6
    return min(one, two_shot_us)


def _broadcast_us(size: int, tp: int, link: float) -> float:
    """Returns the lesser time of sending everything to all peers, and of sending each a part that it forwards."""
    once = size / link * 1e6
    return min(FLAG_LATENCY_US + (tp - 1) * once, 2 * FLAG_LATENCY_US + once)


def collective_floor_us(case: Case, tp: int, rates: Rates) -> float:
    """Returns the floor of a collective without a product, in a graph."""
    if tp == 1:
        return EMPTY_KERNEL_US
    if case.op == "all_reduce":
        return EMPTY_KERNEL_US + _all_reduce_us(case.shape[0], tp, rates.link, FLAG_LATENCY_US)
    if case.op == "broadcast":
        return EMPTY_KERNEL_US + _broadcast_us(case.shape[0], tp, rates.link)
    return EMPTY_KERNEL_US + FLAG_LATENCY_US + case.moved(tp) / rates.link * 1e6


def floor_us(case: Case, tp: int, gemm_us: float | None, rates: Rates) -> float:
    """Returns the floor of a case. `gemm_us` is the measured time of the rank's whole product; None for collectives."""
    if case.is_gemm:
        if gemm_us is None:
            raise ValueError(f"bench: expected the time of the product alone for {case.op}, got none")
        return gemm_floor_us(case, tp, gemm_us, rates)
    return collective_floor_us(case, tp, rates)
