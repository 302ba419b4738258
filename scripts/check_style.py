#!/usr/bin/env python3
"""Holds files to their size: over 400 lines is a warning, over 600 an error, unless listed here with its reason."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARN, FAIL = 400, 600
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi"}

# path -> why it is one file
REASONS: dict[str, str] = {
    "torch_overlap/_C.pyi": "a compiled module has one stub",
}


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = listed.stdout.splitlines() or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
    lengths = {
        name: (ROOT / name).read_bytes().count(b"\n")
        for name in names
        if Path(name).suffix in SUFFIXES and (ROOT / name).is_file() and not name.startswith(("build/", ".venv/"))
    }
    errors = 0
    for name, lines in sorted(lengths.items(), key=lambda item: -item[1]):
        if lines > FAIL and name not in REASONS:
            print(f"{name}: {lines} lines, at most {FAIL}: split it, or give its reason in scripts/check_style.py")
            errors += 1
        elif lines > WARN:
            print(f"{name}: warning: {lines} lines ({REASONS.get(name, 'is it one idea?')})")
    for name in REASONS.keys() - lengths.keys():
        print(f"scripts/check_style.py: {name} is listed and not there")
        errors += 1
    print(f"check_style: {len(lengths)} files, {errors} errors")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
