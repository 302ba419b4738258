"""Compares results of `python -m torch_overlap bench` and benchmarks/ with performance goals.

    python benchmarks/check_goals.py benchmarks/goals.json RESULT.json ...

Prints "kept" or "SHORT" for each comparison: the metric and its bound; then what was not measured. The exit status is
1 if a goal is missed.

A file of goals is {"goals": [...]}. Each selects its cases by fields of their rows: "op", "name", "shape", "dtype",
"mode", "tp" (a value, or a list of them; an omitted field matches anything) and "gemm_us_at_least". For each such case
the row of "algorithm" (default "auto"; a pattern selects the fastest row whose name matches) is compared with
"at_most": {metric: bound}, of which one must hold. With "geometric_mean" the mean over the cases of a file is compared
instead of each case.

A metric is a number of the row, "floor_where_communication_bound" (its "ratio_floor" if communication takes at least as
long as the product), "over_graph" (its time over that of the same case in a graph of the same file; for products long
enough to hide launches, each as a multiple of the product in its own rounds, since a GPU runs slower in longer
samples), "over_best_of_ours" (its time over that of our fastest algorithm for the same case in the same file, 1 if they
differ by less than the spread of either), or "over_<peer>".

A requested case that was left out misses its goal. Unmeasured values are reported: every value of a list without a row,
and rows without the metric of a bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch_overlap.tools.bench import result
from torch_overlap.tools.bench.cases import COLLECTIVES

Row = dict[str, Any]
MIN_THROTTLED_US = 300.0
_FILTERS = ("op", "name", "shape", "dtype", "mode", "tp")


@dataclass(frozen=True)
class Finding:
    """One comparison: `got` by metric, and True if a bound holds; if nothing was got, the reason."""

    what: str
    bounds: dict[str, float]
    got: dict[str, float]
    remark: str = ""

    @property
    def kept(self) -> bool:
        return any(value <= self.bounds[metric] for metric, value in self.got.items())

    def __str__(self) -> str:
        ratios = " or ".join(f"{metric} {value:.3f} of {self.bounds[metric]:g}" for metric, value in self.got.items())
        return f"{'kept ' if self.kept else 'SHORT'} {self.what}: {', '.join(filter(None, (ratios, self.remark)))}"


def compare(goals: Sequence[dict[str, Any]], rows: Sequence[Row]) -> tuple[list[Finding], list[str]]:
    """Returns the findings, and the unmeasured values. `rows` includes skipped visits, which have "why". "file"
    distinguishes the rows of several files."""
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
    for part in _expand_goal(goal):
        about = _matching_rows(part, rows)
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
    """Compares the mean of each file that has all the cases."""
    findings, unmeasured = [], []
    parts = list(_expand_goal(goal))
    for file in dict.fromkeys(row.get("file") for row in rows):
        own = [row for row in rows if row.get("file") == file and "why" not in row]
        found = [[got for row in _matching_rows(part, own) if (got := _metrics(goal, row, own))] for part in parts]
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


def _expand_goal(goal: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the goal for each value of its lists."""
    keys = [key for key in _FILTERS if key in goal]
    for values in itertools.product(*(_choices(goal, key) for key in keys)):
        yield goal | dict(zip(keys, values, strict=True))


def _choices(goal: dict[str, Any], key: str) -> list[Any]:
    value = goal[key]
    # A shape is itself a list; the shape of a collective is a number.
    is_single_value = (
        key == "shape" and goal.get("op") not in COLLECTIVES and not any(isinstance(v, list) for v in value)
    )
    return [value] if is_single_value or not isinstance(value, list) else value


def _matching_rows(goal: dict[str, Any], rows: Sequence[Row]) -> list[Row]:
    """Returns a row of each case, and the visits that were left out."""
    found: dict[str, Row] = {}
    for row in rows:
        if not _matches(goal, row):
            continue
        case = str([row.get(key) for key in (*_FILTERS, "file")] + ["why" in row])
        if case not in found or row.get("us", 0.0) < found[case].get("us", 0.0):
            found[case] = row
    return list(found.values())


def _matches(goal: dict[str, Any], row: Row) -> bool:
    for key in _FILTERS:
        if key in goal and row.get(key) != goal[key]:
            choices = goal[key]
            # A shape is itself a list, so a list of shapes is a list of lists.
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
        is_long = min(row.get("gemm_us", 0.0), graph.get("gemm_us", 0.0)) >= MIN_THROTTLED_US
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
        is_within_noise = row["us"] - best["us"] <= spread
        return 1.0 if is_within_noise else float(row["us"] / best["us"])
    if metric.startswith("over_") and metric not in row:
        peer = row["peers"].get(metric.removeprefix("over_"))
        return float(row["us"] / peer) if peer else None
    return float(row[metric]) if row.get(metric) is not None else None


def _row_title(row: Row) -> str:
    return f"{row['op']} {row.get('name', row['shape'])} {row['dtype']} tp {row.get('tp')} {row.get('mode')}"


def _title(goal: dict[str, Any]) -> str:
    named = [f"{key} {goal[key]}" for key in (*_FILTERS, "gemm_us_at_least") if key in goal]
    return f"{', '.join(named) or 'anything'} at most {goal['at_most']}"


def read_goals(path: Path) -> list[dict[str, Any]]:
    """Returns the goals of a file. Raises ValueError if it is not a file of goals."""
    try:
        goals = json.loads(path.read_text())["goals"]
        good = all(goal["at_most"] and isinstance(goal["at_most"], dict) for goal in goals)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"check_goals: expected a file of goals, got {path}: {error!r}") from None
    if not good:
        raise ValueError(f'check_goals: expected "at_most" in every goal of {path}, got one without')
    return list(goals)


def check(goals_path: Path, result_paths: Sequence[Path]) -> int:
    """Prints the goals that hold, those missed and those not measured. Returns 1 if any is missed.

    Raises:
        ValueError: a file is invalid, or no goal matches any row.
    """
    rows = [row for path in result_paths for row in _rows_of(path)]
    findings, unmeasured = compare(read_goals(goals_path), rows)
    if not findings:
        raise ValueError(f"check_goals: expected rows that {goals_path} is about, got none; measure with --set bf16")
    for finding in sorted(findings, key=lambda finding: finding.kept):
        print(finding)
    for title in unmeasured:
        print(f"not measured: {title}")
    short = sum(not finding.kept for finding in findings)
    print(f"{len(findings)} comparisons, {short} fall short, {len(unmeasured)} not measured")
    return 1 if short else 0


def _rows_of(path: Path) -> list[Row]:
    """Returns the rows of a file, and its visits that were left out."""
    content = result.read(path)
    found = [row for row in content["rows"] if "op" in row] + content.get("left_out", [])
    return [row | {"file": str(path)} for row in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("goals", type=Path, help="the file of goals")
    parser.add_argument("results", nargs="+", type=Path, help="the result files")
    args = parser.parse_args()
    try:
        return check(args.goals, args.results)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
