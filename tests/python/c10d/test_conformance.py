"""torch's own tests of c10d backends, those that gloo passes: docs/reference/conformance.md."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conformance.report import Row, problems, read_exceptions, read_results, unused

PROGRAM = Path(__file__).resolve().parents[2] / "conformance" / "conformance.py"


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["3-ranks", "4-ranks", "8-ranks", "all-to-all"])
def test_suite_of_torch(launcher, configuration):
    pytest.importorskip("expecttest", reason="torch's test base needs it: pip install expecttest")
    process = launcher.start([sys.executable, str(PROGRAM), "--known", "--configuration", configuration, "--jobs", "1"])
    output, _ = process.communicate()
    assert process.returncode == 0, output


def test_exceptions_are_checked_both_ways():
    exceptions = {"test_listed": "a reason", "debug: test_of_debug": "another"}
    rows = [
        Row("3-ranks", "test_passes", "passed", "passed"),
        Row("3-ranks", "test_listed", "passed", "failed", "as listed"),
        Row("debug", "test_of_debug", "failed", "failed", "as listed"),
    ]
    assert problems(rows, exceptions) == []
    (failed,) = problems([Row("3-ranks", "test_of_debug", "passed", "failed", "its traceback")], exceptions)
    assert "its traceback" in failed
    for status in ("passed", "skipped", "absent"):
        (stale,) = problems([Row("debug", "test_listed", "passed", status)], exceptions)
        assert "a reason" in stale
        assert status in stale
    (gone,) = problems([Row("3-ranks", "test_gone", "passed", "absent")], exceptions)
    assert "test_gone" in gone
    assert unused(rows, exceptions) == []
    (without_test,) = unused(rows, exceptions | {"3-ranks: test_listed": "", "test_gone": ""})
    assert "test_gone" in without_test


def test_recorded_results_and_exceptions_agree():
    _, rows = read_results()
    assert problems(rows, read_exceptions()) == unused(rows, read_exceptions()) == []
