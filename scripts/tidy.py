#!/usr/bin/env python3
"""Runs clang-tidy on the C++ of the library and the bindings: tidy.py <build folder> [all | file...].

Without a file: on those that differ from main. A build compiles several files at once, and clang-tidy reads torch's
headers once for them too: a file is checked together with those of its unit. The build folder need only be configured.
MAX_JOBS (2) run at a time; TIDY_FLAGS is passed on.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGETS = re.compile(r"/CMakeFiles/(torch_overlap|_C)\.dir/")


def units(build: Path) -> dict[Path, set[Path]]:
    """Returns the files that each compiler call of the two targets compiles."""
    found: dict[Path, set[Path]] = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = Path(entry["file"])
        if file.suffix == ".cu" or not TARGETS.search(entry["output"]):
            continue
        is_unity = "Unity" in file.parts
        parts = re.findall(r'^#include "(.*)"', file.read_text(), re.MULTILINE) if is_unity else [str(file)]
        found[file] = {Path(part).resolve() for part in parts}
    return found


def changed() -> list[str]:
    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    base = git("merge-base", "HEAD", "main") or "HEAD"
    return git("diff", "--name-only", "--diff-filter=d", base, "--", "csrc/*.cpp").split()


def check(clang_tidy: str, build: Path, unit: Path) -> tuple[int, str]:
    flags = shlex.split(os.environ.get("TIDY_FLAGS", ""))
    done = subprocess.run([clang_tidy, "-p", build, "--quiet", *flags, unit], capture_output=True, text=True)
    noise = re.compile(r"\d+ warnings?( and \d+ errors?)? (generated|treated as errors)|^$")
    errors = [line for line in done.stderr.splitlines() if not noise.match(line)]
    return done.returncode, "\n".join([*done.stdout.splitlines(), *errors])


def main() -> int:
    build, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    every = units(build)
    if names == ["all"]:
        chosen = sorted(every)
    else:
        files = {(ROOT / name).resolve() for name in names or changed()}
        for file in sorted(files - set().union(*every.values())):
            print(f"lint-tidy: {file.relative_to(ROOT)} is not in this build")
        chosen = sorted(unit for unit, parts in every.items() if parts & files)
    clang_tidy = shutil.which("clang-tidy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if clang_tidy is None:
        sys.exit("lint-tidy: expected clang-tidy beside this Python or on the path, got none; pip install clang-tidy")
    print(f"lint-tidy: {sum(len(every[unit]) for unit in chosen)} files in {len(chosen)} pieces", flush=True)
    failed = False
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or 2)) as jobs:
        for status, text in jobs.map(lambda unit: check(clang_tidy, build, unit), chosen):
            failed |= status != 0
            if text:
                print(text, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
