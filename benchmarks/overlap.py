"""Compares products with communication, by operators and by overlap classes, with torch's fused operators and NCCL.

    python benchmarks/overlap.py [--tp 4] [--json result.json] [--algorithm auto,p2p] ...

Runs `python -m torch_overlap bench` with its options, then compares the result with goals_overlap.json: the exit status
is 1 if a goal is missed. On a CPU it checks that all of it runs, and compares nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import check_goals

OPS = ("ag_gemm", "gemm_rs", "ag_gemm_classes", "gemm_rs_classes", "bulk_ag", "bulk_rs")
GOALS = Path(__file__).parent / "goals_overlap.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="writes the result to this file")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.json or Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch_overlap", "bench", *OPS, *options, "--json", str(path)]
        if status := subprocess.run(command, check=False).returncode:
            return status
        if json.loads(path.read_text())["gpu"] == "cpu":
            return 0
        return check_goals.check(GOALS, [path])


if __name__ == "__main__":
    sys.exit(main())
