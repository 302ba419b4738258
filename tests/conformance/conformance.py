#!/usr/bin/env python3
"""Runs torch's own tests of c10d backends on torch_overlap, with CPU ranks, and compares with gloo.

    conformance.py            runs gloo and torch_overlap, and writes results.json and the tables of
                              docs/reference/conformance.md
    conformance.py --known    runs torch_overlap alone on the tests of results.json, and writes nothing
    conformance.py --known --test test_send_recv    only those whose names contain it

Exit code 1 if a test fails that exceptions.json does not list, or if one that it lists does not fail.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import report
from report import CONFIGURATIONS, Configuration, Row

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MAX_SECONDS_PER_TEST = 120
MIN_TESTS_PER_PROCESS = 16  # importing torch takes longer than several tests


@dataclass
class Result:
    test: str
    status: str  # passed, failed, skipped; absent: not in this torch
    seconds: float = 0.0
    detail: str = ""


def run_process(configuration: Configuration, backend: str, names: list[str]) -> list[Result]:
    """Runs the tests `names` one after the other in one process; an empty list stands for all tests."""
    variables = {
        "BACKEND": configuration.selection,
        "CONFORMANCE_BACKEND": backend,
        "WORLD_SIZE": str(configuration.ranks),
        "INIT_METHOD": "file://",  # torch appends a file for each test
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(MAX_SECONDS_PER_TEST),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        # gloo raises an error after a timeout, and the tests expect one.
        "TORCHCOMM_ABORT_ON_ERROR": "0",
        # torch's stores resolve the name of every client, which is slow if no name server answers.
        "RES_OPTIONS": "timeout:1 attempts:1",
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))),
        **configuration.variables,
    }
    process = subprocess.run(
        [sys.executable, str(HERE / "run_suite.py")],
        input="\n".join(names),
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise SystemExit(
            f"conformance: expected exit code 0 of run_suite.py, got {process.returncode}.\n{process.stderr[-4000:]}"
        )
    return [Result(**json.loads(line)) for line in process.stdout.splitlines()]


def run(configuration: Configuration, backend: str, names: list[str], jobs: int) -> dict[str, Result]:
    begin = time.monotonic()
    jobs = min(jobs, 1 + len(names) // MIN_TESTS_PER_PROCESS)
    parts = [names[job::jobs] for job in range(jobs)]
    with ThreadPoolExecutor(len(parts)) as pool:
        done = pool.map(lambda part: run_process(configuration, backend, part), parts)
        results = {result.test: result for part in done for result in part}
    counts = ", ".join(f"{count} {status}" for status, count in Counter(r.status for r in results.values()).items())
    print(f"{configuration.name}, {backend}: {counts} in {time.monotonic() - begin:.0f} s", flush=True)
    return results


def run_both(jobs: int) -> tuple[list[Row], dict[str, list[str]]]:
    """Runs both backends in all configurations. Returns the results, and the reason why torch skipped each of the
    other tests."""
    rows: list[Row] = []
    skipped: dict[str, list[str]] = {}
    for configuration in CONFIGURATIONS:
        if not rows:
            names = []
        elif configuration.repeats:
            names = sorted({row.test for row in rows if row.configuration == configuration.repeats})
        else:
            names = sorted(skipped)
        stock = run(configuration, report.STOCK, names, jobs)
        if not configuration.repeats:
            skipped = {r.test: [*skipped.get(r.test, ()), r.detail] for r in stock.values() if r.status == "skipped"}
        names = sorted(result.test for result in stock.values() if result.status != "skipped")
        ours = run(configuration, report.OURS, names, jobs)
        rows += [
            Row(configuration.name, name, stock[name].status, ours[name].status, ours[name].detail) for name in names
        ]
    return rows, skipped


def run_known(known: list[Row], names: list[str], jobs: int) -> list[Row]:
    """Runs torch_overlap on the tests of `known`, in the configurations `names`."""
    rows = []
    for configuration in CONFIGURATIONS:
        tests = [row.test for row in known if row.configuration == configuration.name]
        if configuration.name in names and tests:
            results = run(configuration, report.OURS, tests, jobs)
            rows += [Row(configuration.name, test, "", r.status, r.detail) for test, r in results.items()]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [configuration.name for configuration in CONFIGURATIONS]
    parser.add_argument("--known", action="store_true", help="torch_overlap alone, the tests of results.json")
    parser.add_argument("--configuration", action="append", choices=names, help="with --known; default: all")
    parser.add_argument("--test", default="", help="with --known: a part of the names of the tests to run")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    arguments = parser.parse_args()

    if not importlib.util.find_spec("expecttest"):
        raise SystemExit(
            "conformance: expected the package expecttest, which torch's tests import. pip install expecttest"
        )
    # Tests of timeouts write dumps of the flight recorder.
    os.environ.setdefault("TORCHCOMM_FR_DUMP_TEMP_FILE", tempfile.mkdtemp(prefix="torch_overlap_traces_") + "/rank_")
    exceptions = report.read_exceptions()
    found: list[str] = []
    torch_version = importlib.metadata.version("torch").partition("+")[0]
    if arguments.known:
        recorded_version, known = report.read_results()
        known = [row for row in known if arguments.test in row.test]
        rows = run_known(known, arguments.configuration or names, arguments.jobs)
        if torch_version != recorded_version:  # another torch may have renamed some
            rows = [row for row in rows if row.ours != "absent"]
    else:
        rows, skipped = run_both(arguments.jobs)
        report.write(torch_version, rows, skipped, exceptions)
        found = report.unused(rows, exceptions)
    found += report.problems(rows, exceptions)
    print(*found, sep="\n")
    print(f"conformance: {len(rows)} tests, {len(found)} not as expected")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
