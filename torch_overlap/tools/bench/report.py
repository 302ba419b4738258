"""Results as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_overlap.tools.bench.cases import Visit, byte_text
from torch_overlap.tools.bench.floor import Rates
from torch_overlap.tools.bench.measure import NOISY, Outcome


def header(title: str, tp: int, rates: Rates) -> str:
    return (
        f"{title}, {tp} ranks. To a peer {rates.link / 1e9:.0f} GB/s while all send, memory copies "
        f"{rates.memory / 1e12:.2f} TB/s read and written.\n"
        "us: median over rounds of the slowest rank, +- IQR. x gemm: over the rank's whole product alone by the best\n"
        "algorithm of cuBLASLt in the same round. x floor: over the model's least time. x a peer: over the quickest,\n"
        "in the same round."
    )


def block(outcome: Outcome) -> str:
    """Returns the text of one visit: product and collective without overlap, ours, peers, and the variants that could
    not run."""
    case, rows = outcome.visit.case, outcome.rows
    shape = " ".join(map(str, case.shape)) if case.is_gemm else byte_text(case.shape[0])
    lines = [f"\n{case.op} {case.name and case.name + ': '}{shape}, {case.dtype}, {outcome.visit.mode}"]
    if outcome.others:
        first = rows[0] if rows else {}
        notes = [f"{name} alone {us:.1f} us, {_rate(outcome, name, us)}" for name, us in outcome.others.items()]
        if first.get("noisy"):
            notes.append(f"NOISY: the product's IQR is over {NOISY:.0%}")
        lines.append("  " + "; ".join(notes))
    if rows and "floor_us" in rows[0]:
        lines.append(f"  floor {rows[0]['floor_us']:.1f} us" + _times(rows[0], "floor_us", "gemm_us", "gemm"))
    for row in sorted(rows, key=lambda row: float(row["us"])):
        chosen = f" ({row['chosen']})" if row.get("chosen") else ""
        lines.append(f"  ours {row['algorithm'] + chosen:24}" + _row(row))
    gemm_us = outcome.others.get("gemm")
    for name, us in sorted(outcome.peers.items(), key=lambda item: item[1]):
        over = f"   {us / gemm_us:6.3f} x gemm" if gemm_us else ""
        lines.append(f"  peer {name:24}{us:10.2f} us{over}")
    lines += [f"  not run: {name}: {why}" for name, why in sorted(outcome.missing.items())]
    return "\n".join(lines)


def _rate(outcome: Outcome, name: str, us: float) -> str:
    case, tp = outcome.visit.case, outcome.tp
    if name != "gemm":
        return f"{case.moved(tp) / us / 1e3:.1f} GB/s"
    m, n, k = case.local(tp)
    return f"{2 * m * n * k / us / 1e6:.1f} TFLOP/s"


def _row(row: dict[str, Any]) -> str:
    text = f"{row['us']:10.2f} us +- {row['iqr_us']:.2f}"
    if "ratio_gemm" in row:
        text += f"   {row['ratio_gemm']:6.3f} +- {row['ratio_iqr']:.3f} x gemm"
    if "ratio_floor" in row:
        text += f"   {row['ratio_floor']:6.3f} x floor"
    if "ratio_peer" in row:
        text += f"   {row['ratio_peer']:6.3f} +- {row['ratio_peer_iqr']:.3f} x {row['best_peer']}"
    return text + (f"   {row['gbps']:.1f} GB/s" if row["gbps"] else "")


def _times(row: dict[str, Any], what: str, of: str, name: str) -> str:
    return f", {row[what] / row[of]:.3f} x {name}" if of in row else ""


def left_out_text(left_out: Sequence[Visit], seconds: float) -> str:
    """Returns the text for visits that the budget left out."""
    return f"\nleft out, for want of time ({seconds:.0f} s): " + "; ".join(map(str, left_out))


def nothing_measured_text(num_left_out: int, num_visits: int) -> str:
    """Returns the text for a run without a row of ours."""
    if num_left_out == num_visits:
        return f"bench: measured nothing: all {num_visits} cases were left out; give a larger --budget"
    return 'bench: measured nothing of ours: no variant could run; see "not run" above for the reasons'
