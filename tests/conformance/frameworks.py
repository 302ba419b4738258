#!/usr/bin/env python3
"""Runs the tests with other frameworks, and writes the versions and results to the table of docs/howto/frameworks.md.

Exit code 1 if a test fails, or if all tests of a framework are skipped because it is not installed."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/howto/frameworks.md"
BEGIN, END = "<!-- begin: make conformance -->\n", "<!-- end -->\n"

# package -> file of tests, a part of the names of its tests
TESTS = {
    "peft": ("nn/test_lora.py", ""),
    "transformers": ("compat/test_hugging_face.py", ""),
    "transformers (training loop)": ("compat/test_trainer_loop.py", ""),
    "megatron-core": ("compat/test_megatron.py", ""),
    "torchtitan (signatures)": ("compat/test_torchtitan.py", ""),
    "torchft": ("compat/test_torchft.py", ""),
    "accelerate": ("compat/test_recipes.py", "accelerate"),
    "lightning-fabric": ("compat/test_recipes.py", "fabric"),
    "deepspeed": ("compat/test_recipes.py", "deepspeed"),
}


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package.split(" ")[0])
    except importlib.metadata.PackageNotFoundError:
        return ""


def run(file: str, part: str, jobs: int) -> Counter[str]:
    """Returns the number of tests that passed, failed and were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests/python" / file), "--junitxml", str(report)]
        command += ["-k", part] if part else []
        command += ["-n", str(jobs)] if jobs > 1 else []
        variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, cwd=ROOT, env=os.environ | variables)
        counts: Counter[str] = Counter()
        for case in ET.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            status = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            counts[status] += 1
        return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    jobs = parser.parse_args().jobs
    torch_version = importlib.metadata.version("torch").partition("+")[0]
    rows = [f"Results on CPU ranks with torch {torch_version}:", "", "| package | version | tests passed | failed | "
            "skipped | tests |", "|---|---|---|---|---|---|"]  # fmt: skip
    is_bad = False
    for package, (file, part) in TESTS.items():
        counts = run(file, part, jobs)
        is_bad |= counts["failed"] > 0 or counts["passed"] == 0
        rows.append(f"| {package} | {version(package) or 'not installed'} | {counts['passed']} | {counts['failed']} | "
                    f"{counts['skipped']} | `tests/python/{file}` |")  # fmt: skip
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(rows) + "\n\n" + END + after)
    return is_bad


if __name__ == "__main__":
    sys.exit(main())
