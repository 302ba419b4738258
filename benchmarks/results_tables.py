"""Rows of result files by case, and as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch_overlap.mesh import Mesh
from torch_overlap.mesh.models import PRESETS
from torch_overlap.mesh.transformer import predict_layer
from torch_overlap.tools.bench.cases import COLLECTIVES, KNOWN_OPS, byte_text

Row = dict[str, Any]
TITLES = {
    "ag_gemm": "All-gather, then product",
    "gemm_rs": "Product, then reduce-scatter",
    "gemm_ar": "Product, then all-reduce",
    "gemm_ar_norm": "Product, then all-reduce, residual and RMSNorm",
    "gemm": "Product alone",
    "a2a_gemm": "All-to-all, then product",
    "gemm_a2a": "Product, then all-to-all",
    "all_reduce": "All-reduce",
    "all_gather": "All-gather",
    "reduce_scatter": "Reduce-scatter",
    "all_to_all": "All-to-all",
    "broadcast": "Broadcast",
    "ag_gemm_classes": "All-gather, then product, by the overlap classes",
    "gemm_rs_classes": "Product, then reduce-scatter, by the overlap classes",
    "bulk_ag": "Product beside an all-gather",
    "bulk_rs": "Product beside a reduce-scatter",
    "layer": "A transformer layer, forward and backward",
}
# Names in the file that predates `bench`, of which the operator's rows are shown. It ran the algorithm "p2p".
_OLDER = {"AG": "ag_gemm", "RS": "gemm_rs", "bfloat16": "bf16", "op": "p2p"}


@dataclass(frozen=True)
class Group:
    """The rows of one case, by mode and then by algorithm."""

    op: str
    label: str
    shape: tuple[int, ...]
    dtype: str
    tp: int
    rows: dict[str, dict[str, Row]]

    def ours(self, mode: str) -> Row | None:
        """Returns the row that a user gets: "auto", or the fastest if only some algorithms were measured."""
        rows = self.rows.get(mode, {})
        return rows.get("auto") or min(rows.values(), key=lambda row: float(row["us"]), default=None)

    def best(self, mode: str) -> Row | None:
        return min(self.rows.get(mode, {}).values(), key=lambda row: float(row["us"]), default=None)

    @property
    def mode(self) -> str:
        return "graph" if "graph" in self.rows else "eager"


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """Groups rows by case, in the order of the operations and then by size."""
    found: dict[tuple[Any, ...], Group] = {}
    for row in rows:
        if "layer" in row:
            if row["algorithm"] != "op":
                continue
            row = row | {key: _OLDER[row[key]] for key in ("op", "dtype", "algorithm")} | {"name": row["layer"]}
        op, dtype = str(row["op"]), str(row["dtype"])
        if op not in KNOWN_OPS:
            continue
        shape = tuple(row["shape"]) if isinstance(row["shape"], list) else (row["shape"],)
        label = str(row.get("name") or "x".join(map(str, shape)))
        if len(shape) == 1:
            label = byte_text(shape[0])
        key = (op, shape, dtype, row["tp"])
        group = found.setdefault(key, Group(op, label, shape, dtype, row["tp"], {}))
        group.rows.setdefault(row["mode"], {})[row["algorithm"]] = row
    return sorted(found.values(), key=lambda g: (KNOWN_OPS.index(g.op), math.prod(g.shape)))


def peers_of(groups: Sequence[Group]) -> list[str]:
    """Returns all measured peers, in the order of their first row."""
    named: dict[str, None] = {}
    for group in groups:
        for rows in group.rows.values():
            for row in rows.values():
                named |= dict.fromkeys(row["peers"])
    return list(named)


def table(groups: Sequence[Group]) -> str:
    """Returns the table of one operation: ratios to the product without communication, or microseconds for
    collectives."""
    op = groups[0].op
    return _collective_table(groups) if op in COLLECTIVES else _gemm_table(groups)


def _gemm_table(groups: Sequence[Group]) -> str:
    peers = peers_of(groups)
    head = ["layer (M, N, K)", "product alone, us", "ours: graph", "eager", "floor", *peers]
    lines = [head, ["---"] * len(head)]
    for group in groups:
        first = group.ours(group.mode)
        assert first is not None
        graph, eager = group.ours("graph"), group.ours("eager")
        others_us = [first.get("floor_us"), *[first["peers"].get(peer) for peer in peers]]
        lines.append(
            [
                f"{group.label} {', '.join(map(str, group.shape))}", f"{first['gemm_us']:.0f}", _ours(group, graph),
                number(eager["ratio_gemm"] if eager else None, 3),
                *[number(us and us / first["gemm_us"], 3) for us in others_us],
            ]
        )  # fmt: skip
    return markdown(lines)


def _ours(group: Group, row: Row | None) -> str:
    """Returns the ratio and the choice of "auto". Adds another algorithm if it is faster by more than their spread."""
    if row is None:
        return "-"
    text = f"{row['ratio_gemm']:.3f} ({row.get('chosen') or row['algorithm']})"
    best = group.best("graph")
    if best is not None and best["us"] + best["iqr_us"] < row["us"]:
        text += f", {best['algorithm']} {best['ratio_gemm']:.3f}"
    return text


def _collective_table(groups: Sequence[Group]) -> str:
    peers = peers_of(groups)
    has_registered = any("auto registered" in group.rows[group.mode] for group in groups)
    more = ["ours, registered"] if has_registered else []
    head = ["size", "ours, us", "ours by NCCL", *more, "floor", *peers]
    lines = [head, ["---"] * len(head)]
    for group in groups:
        row = group.ours(group.mode)
        assert row is not None
        way = str(row.get("chosen", ""))
        others = [group.rows[group.mode].get(name) for name in ("plain", "auto registered")[: 1 + len(more)]]
        lines.append(
            [
                group.label, f"{row['us']:.1f}" + f" ({way})" * bool(way),
                *[number(other["us"] if other else None, 1) for other in others], number(row.get("floor_us"), 1),
                *[number(row["peers"].get(peer), 1) for peer in peers],
            ]
        )  # fmt: skip
    return markdown(lines)


def layer_table(rows: Sequence[Row]) -> str:
    """Returns the table of rows of benchmarks/layer.py, a line per model: microseconds of all variants in the mode of
    the first row, and ratios of our first algorithm to the others."""
    rows = [row for row in rows if row["mode"] == rows[0]["mode"]]
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    peers = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
    first = algorithms[0]
    head = ["layer (M, ffn, hidden)", *[f"ours, us: {first}", *algorithms[1:]], *peers, "predicted",
            *[f"{first} / {other}" for other in (*peers, "predicted")]]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for (name, *shape), same in groupby(rows, key=lambda row: [row["name"], *row["shape"]]):
        ours = {row["algorithm"]: row for row in same}
        row = ours[first]
        us = [ours.get(algorithm, {}).get("us") for algorithm in algorithms]
        us += [row["peers"].get(peer) for peer in peers]
        predicted = _predicted(row)
        ratios = [*[row.get(f"over_{peer}") for peer in peers], row["us"] / predicted if predicted else None]
        lines.append(
            [
                f"{name} {', '.join(map(str, shape))}", *[number(value, 0) for value in us],
                number(predicted, 0), *[number(value, 3) for value in ratios],
            ]
        )  # fmt: skip
    return markdown(lines)


def _predicted(row: Row) -> float | None:
    """Returns microseconds from the current planner, for a layer of exactly that size."""
    model, mesh = PRESETS.get(row["name"]), Mesh({"tp": row["tp"]})
    if model is None or row["shape"][0] % model.sequence != 0:
        return None
    batch = row["shape"][0] // model.sequence
    return 1e6 * predict_layer(model, mesh, batch=batch, overlap=row["algorithm"] != "sequential")


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
