"""Goals, and what falls short of them.

A file of goals is {"goals": [...]}. Each names the cases that it is about by what their rows say: "op", "name",
"shape", "dtype", "mode", "tp" (a value, or a list of them; what is not named may be anything) and "gemm_us_at_least".
Of each such case the row of "algorithm" (by default "auto"; a pattern stands for the quickest row that has such a name)
is compared with "at_most": {metric: bound}, of which one is enough. With "geometric_mean" the mean over the cases of a
file is compared instead of each.

A metric is a number of the row, "floor_where_communication_bound" (its "ratio_floor" where communication alone takes
as long as the product alone, or longer), "over_graph" (its time over that of the same in a graph of the same file; for
products that no launch shows in, each as a multiple of the product alone in its own rounds, since a GPU runs slower in
longer samples), "over_best_of_ours" (its time over that of the quickest algorithm for the same case in the same file,
1 if they differ by less than the spread of either), or "over_<peer>".

What a run was asked for and left out falls short. What nobody has measured is named: every value of a list of which no
row is, and rows that say nothing of a bound.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch_overlap.bench import result
from torch_overlap.bench.cases import COLLECTIVES

Row = dict[str, Any]
LONG_US = 300.0
_FILTERS = ("op", "name", "shape", "dtype", "mode", "tp")


@dataclass(frozen=True)
class Finding:
    """One comparison: `got` by metric, and whether a bound is kept; without anything got, why."""

    what: str
    bounds: dict[str, float]
    got: dict[str, float]
    remark: str = ""

    @property
    def kept(self) -> bool:
        return any(value <= self.bounds[metric] for metric, value in self.got.items())

    def __str__(self) -> str:
        told = " or ".join(f"{metric} {value:.3f} of {self.bounds[metric]:g}" for metric, value in self.got.items())
        return f"{'kept ' if self.kept else 'SHORT'} {self.what}: {', '.join(filter(None, (told, self.remark)))}"


def compare(goals: Sequence[dict[str, Any]], rows: Sequence[Row]) -> tuple[list[Finding], list[str]]:
    """What was found, and what was not measured. `rows`: also visits that were left out, with "why"; "file" tells those
    of several files apart."""
    findings: list[Finding] = []
    unmeasured: list[str] = []
    for goal in goals:
        compare_all = _compare_mean if goal.get("geometric_mean") else _compare_each
        found, missing = compare_all(goal, rows)
        findings += found
        unmeasured += missing
    return findings, unmeasured


def _compare_each(goal: dict[str, Any], rows: Sequence[Row]) -> tuple[list[Finding], list[str]]:
    findings, unmeasured = [], []
    for part in _parts(goal):
        about = _rows_about(part, rows)
        for row in about:
            if "why" in row:
                findings.append(Finding(_row_title(row), goal["at_most"], {}, f"left out: {row['why']}"))
            elif got := _metrics(goal, row, rows):
                remark = "noisy" if row.get("noisy") else ""
                findings.append(Finding(_row_title(row), goal["at_most"], got, remark))
            else:
                unmeasured.append(f"{_row_title(row)}: {', '.join(goal['at_most'])}")
        if not about:
            unmeasured.append(_title(part))
    return findings, unmeasured


def _compare_mean(goal: dict[str, Any], rows: Sequence[Row]) -> tuple[list[Finding], list[str]]:
    """Of each file that has all the cases."""
    findings, unmeasured = [], []
    parts = list(_parts(goal))
    for file in dict.fromkeys(row.get("file") for row in rows):
        own = [row for row in rows if row.get("file") == file and "why" not in row]
        found = [[got for row in _rows_about(part, own) if (got := _metrics(goal, row, own))] for part in parts]
        if all(found):
            cases = list(itertools.chain.from_iterable(found))
            mean = {
                metric: math.exp(sum(math.log(got[metric]) for got in cases) / len(cases))
                for metric in goal["at_most"] if all(metric in got for got in cases)
            }  # fmt: skip
            findings.append(Finding(f"{_title(goal)}, geometric mean of {len(cases)}", goal["at_most"], mean))
        elif any(found):
            unmeasured.append(f"{_title(goal)}: {sum(map(bool, found))} of {len(found)} cases")
    return findings, unmeasured if findings or unmeasured else [_title(goal)]


def _parts(goal: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The goal for each value of its lists."""
    keys = [key for key in _FILTERS if key in goal]
    for values in itertools.product(*(_choices(goal, key) for key in keys)):
        yield goal | dict(zip(keys, values, strict=True))


def _choices(goal: dict[str, Any], key: str) -> list[Any]:
    value = goal[key]
    # A shape is a list itself; that of a collective is a number.
    is_one = key == "shape" and goal.get("op") not in COLLECTIVES and not any(isinstance(v, list) for v in value)
    return [value] if is_one or not isinstance(value, list) else value


def _rows_about(goal: dict[str, Any], rows: Sequence[Row]) -> list[Row]:
    """A row of each case, and the visits that were left out."""
    found: dict[str, Row] = {}
    for row in rows:
        if not _is_about(goal, row):
            continue
        case = str([row.get(key) for key in (*_FILTERS, "file")] + ["why" in row])
        if case not in found or row.get("us", 0.0) < found[case].get("us", 0.0):
            found[case] = row
    return list(found.values())


def _is_about(goal: dict[str, Any], row: Row) -> bool:
    for key in _FILTERS:
        if key in goal and row.get(key) != goal[key]:
            choices = goal[key]
            # A shape is a list itself, so a list of shapes is one of lists.
            if not isinstance(choices, list) or row.get(key) not in choices:
                return False
    if row.get("gemm_us", math.inf) < goal.get("gemm_us_at_least", 0):
        return False
    return "why" in row or fnmatchcase(row["algorithm"], goal.get("algorithm", "auto"))


def _metrics(goal: dict[str, Any], row: Row, rows: Sequence[Row]) -> dict[str, float]:
    values = {metric: _metric(metric, row, rows) for metric in goal["at_most"]}
    return {metric: value for metric, value in values.items() if value is not None}


def _metric(metric: str, row: Row, rows: Sequence[Row]) -> float | None:
    if metric == "floor_where_communication_bound":
        is_bound = row.get("comm_us", 0.0) >= row.get("gemm_us", math.inf)
        return float(row["ratio_floor"]) if is_bound else None
    if metric == "over_graph":
        same = ("file", "op", "shape", "dtype", "tp", "algorithm")
        graphs = (r for r in rows if r.get("mode") == "graph" and all(r.get(key) == row.get(key) for key in same))
        graph = next(graphs, None)
        if graph is None:
            return None
        is_long = min(row.get("gemm_us", 0.0), graph.get("gemm_us", 0.0)) >= LONG_US
        slower = row["gemm_us"] / graph["gemm_us"] if is_long else 1.0
        return float(row["us"] / graph["us"] / slower)
    if metric == "over_best_of_ours":
        same = ("file", "op", "shape", "dtype", "tp", "mode")
        ours = [r for r in rows if "why" not in r and all(r.get(key) == row.get(key) for key in same)]
        others = [r for r in ours if r["algorithm"] not in (row["algorithm"], "bulk")]
        if not others:
            return None
        best = min(others, key=lambda r: float(r["us"]))
        spread = max(row.get("iqr_us", 0.0), best.get("iqr_us", 0.0))
        is_as_quick = row["us"] - best["us"] <= spread
        return 1.0 if is_as_quick else float(row["us"] / best["us"])
    if metric.startswith("over_"):
        peer = row["peers"].get(metric.removeprefix("over_"))
        return float(row["us"] / peer) if peer else None
    return float(row[metric]) if row.get(metric) is not None else None


def _row_title(row: Row) -> str:
    return f"{row['op']} {row.get('name', row['shape'])} {row['dtype']} tp {row.get('tp')} {row.get('mode')}"


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
    """Prints what is kept, what falls short and what was not measured; 1 if anything falls short.

    Raises:
        ValueError: a file is not what it should be, or no goal is about any row.
    """
    rows = [row for path in result_paths for row in _rows_of(path)]
    findings, unmeasured = compare(read_goals(goals_path), rows)
    if not findings:
        raise ValueError(f"bench: expected rows that {goals_path} is about, got none; measure with --set bf16")
    for finding in sorted(findings, key=lambda finding: finding.kept):
        print(finding)
    for title in unmeasured:
        print(f"not measured: {title}")
    short = sum(not finding.kept for finding in findings)
    print(f"{len(findings)} comparisons, {short} fall short, {len(unmeasured)} not measured")
    return 1 if short else 0


def _rows_of(path: Path) -> list[Row]:
    """Of a file, and what it says was left out."""
    content = result.read(path)
    found = [row for row in content["rows"] if "op" in row] + content.get("left_out", [])
    return [row | {"file": str(path)} for row in found]
