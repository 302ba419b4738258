"""Runs tests of suite.py one after the other and prints one JSON object per test. conformance.py starts it.

Standard input has the names of the tests, one per line; empty input selects all of them. The other parameters are in
the environment: BACKEND, CONFORMANCE_BACKEND, WORLD_SIZE, DISTRIBUTED_TESTS_DEFAULT_TIMEOUT.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import unittest
from io import FileIO
from typing import Any

import suite


class Outcome(unittest.TestResult):
    """The status of one test and its reason."""

    status, detail = "failed", "no outcome"

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.status, self.detail = "passed", ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.status, self.detail = "skipped", reason

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.status, self.detail = "failed", self._exc_info_to_string(err, test)  # type: ignore[attr-defined]

    addError = addFailure


def run(name: str, log: FileIO) -> dict[str, object]:
    if not hasattr(suite.ConformanceTest, name):
        return {"test": name, "status": "absent"}
    log_begin, begin = log.seek(0, os.SEEK_END), time.monotonic()
    outcome = Outcome()
    suite.ConformanceTest(name).run(outcome)
    seconds = round(time.monotonic() - begin, 2)
    if outcome.status == "failed" and "and exception:" not in outcome.detail:  # a rank ended without a message
        log.seek(log_begin)
        outcome.detail += "\n" + log.read().decode(errors="replace")
    return {"test": name, "status": outcome.status, "seconds": seconds, "detail": outcome.detail}


def main() -> None:
    results, stderr = os.fdopen(os.dup(sys.stdout.fileno()), "w"), os.dup(sys.stderr.fileno())
    names = sys.stdin.read().split() or unittest.TestLoader().getTestCaseNames(suite.ConformanceTest)
    with tempfile.TemporaryFile(buffering=0) as log:
        for stream in (sys.stdout, sys.stderr):  # also that of every rank
            os.dup2(log.fileno(), stream.fileno())
        try:
            suite.ConformanceTest.setUpClass()
            gc.collect()
            gc.freeze()  # a collection in a rank copies none of these pages
            for name in names:
                print(json.dumps(run(name, log)), file=results, flush=True)
        finally:
            os.dup2(stderr, sys.stderr.fileno())


if __name__ == "__main__":
    main()
