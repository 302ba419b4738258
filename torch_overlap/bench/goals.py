"""Goals, and what falls short of them.

A file of goals is {"goals": [...]}. Each names the cases that it is about by what their rows say: "op", "name",
"shape", "dtype", "mode", "tp" (a value, or a list of them; what is not named may be anything) and "gemm_us_at_least".
Of each such case the row of "algorithm" (by default "auto") is compared with "at_most": {metric: bound}, of which one
is enough. With "geometric_mean" the mean over the cases is compared instead of each.

A metric is a number of the row, "floor_where_communication_bound" (its "ratio_floor" where communication alone takes
as long as the product alone, or longer), "over_graph" (its time over that of the same in a graph; for products that no
launch shows in, each as a multiple of the product alone in its own rounds, since a GPU runs slower in longer samples),
or "over_<peer>".
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_overlap.bench import result

Row = dict[str, Any]
LONG_US = 300.0
_FILTERS = ("op", "name", "shape", "dtype", "mode", "tp")


@dataclass(frozen=True)
class Finding:
    """One comparison: `got` by metric, and whether a bound is kept."""

    what: str
    bounds: dict[str, float]
    got: dict[str, float]

    @property
    def kept(self) -> bool:
        return any(value <= self.bounds[metric] for metric, value in self.got.items())

    def __str__(self) -> str:
        told = [f"{metric} {value:.3f} of {self.bounds[metric]:g}" for metric, value in self.got.items()]
        return f"{'kept ' if self.kept else 'SHORT'} {self.what}: {' or '.join(told)}"


def compare(goals: Sequence[dict[str, Any]], rows: Sequence[Row]) -> tuple[list[Finding], list[str]]:
    """What was found, and the goals of which no row is."""
    findings: list[Finding] = []
    unmeasured = []
    for goal in goals:
        matching = [row for row in rows if _is_about(goal, row)]
        found = [(row, got) for row in matching if (got := _metrics(goal, row, rows))]
        if not found:
            unmeasured.append(_title(goal))
        elif goal.get("geometric_mean"):
            mean = {
                metric: math.exp(sum(math.log(got[metric]) for _, got in found) / len(found)) for metric in found[0][1]
            }
            findings.append(Finding(f"{_title(goal)}, geometric mean of {len(found)}", goal["at_most"], mean))
        else:
            findings += [Finding(_row_title(row), goal["at_most"], got) for row, got in found]
    return findings, unmeasured


def _is_about(goal: dict[str, Any], row: Row) -> bool:
    for key in _FILTERS:
        if key in goal and row.get(key) != goal[key]:
            choices = goal[key]
            # A shape is a list itself, so a list of shapes is one of lists.
            if not isinstance(choices, list) or row.get(key) not in choices:
                return False
    if row.get("gemm_us", math.inf) < goal.get("gemm_us_at_least", 0):
        return False
    return bool(row["algorithm"] == goal.get("algorithm", "auto"))


def _metrics(goal: dict[str, Any], row: Row, rows: Sequence[Row]) -> dict[str, float]:
    values = {metric: _metric(metric, row, rows) for metric in goal["at_most"]}
    return {metric: value for metric, value in values.items() if value is not None}


def _metric(metric: str, row: Row, rows: Sequence[Row]) -> float | None:
    if metric == "floor_where_communication_bound":
        return float(row["ratio_floor"]) if row.get("comm_us", 0.0) >= row["gemm_us"] else None
    if metric == "over_graph":
        same = ("op", "shape", "dtype", "tp", "algorithm")
        graphs = (r for r in rows if r["mode"] == "graph" and all(r[key] == row[key] for key in same))
        graph = next(graphs, None)
        if graph is None:
            return None
        is_long = min(row.get("gemm_us", 0.0), graph.get("gemm_us", 0.0)) >= LONG_US
        slower = row["gemm_us"] / graph["gemm_us"] if is_long else 1.0
        return float(row["us"] / graph["us"] / slower)
    if metric.startswith("over_"):
        peer = row["peers"].get(metric.removeprefix("over_"))
        return float(row["us"] / peer) if peer else None
    return float(row[metric]) if row.get(metric) is not None else None


def _row_title(row: Row) -> str:
    return f"{row['op']} {row.get('name', row['shape'])} {row['dtype']} tp {row['tp']} {row['mode']}"


def _title(goal: dict[str, Any]) -> str:
    named = [f"{key} {goal[key]}" for key in (*_FILTERS, "gemm_us_at_least") if key in goal]
    return f"{', '.join(named) or 'anything'} at most {goal['at_most']}"


def read_goals(path: Path) -> list[dict[str, Any]]:
    """Raises ValueError where it is no file of goals."""
    try:
        goals = json.loads(path.read_text())["goals"]
        good = all(goal["at_most"] and isinstance(goal["at_most"], dict) for goal in goals)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"bench: expected a file of goals, got {path}: {error!r}") from None
    if not good:
        raise ValueError(f'bench: expected "at_most" in every goal of {path}, got one without')
    return list(goals)


def check(goals_path: Path, result_paths: Sequence[Path]) -> int:
    """Prints what is kept and what falls short; 1 if anything does.

    Raises:
        ValueError: a file is not what it should be, or no goal is about any row.
    """
    rows = [row for path in result_paths for row in result.read(path)["rows"] if "op" in row]
    findings, unmeasured = compare(read_goals(goals_path), rows)
    if not findings:
        raise ValueError(f"bench: expected rows that {goals_path} is about, got none; measure with --set bf16")
    for finding in sorted(findings, key=lambda finding: finding.kept):
        print(finding)
    for title in unmeasured:
        print(f"not measured: {title}")
    short = sum(not finding.kept for finding in findings)
    print(f"{len(findings)} comparisons, {short} fall short, {len(unmeasured)} goals not measured")
    return 1 if short else 0
