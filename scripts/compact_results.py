#!/usr/bin/env python3
"""Rewrites result files in the form that `bench` writes: one row a line, without figures that nothing reads.

PYTHONPATH=. scripts/compact_results.py benchmarks/results/*.json
PYTHONPATH=. scripts/compact_results.py FILE --keep op=gemm_ar,a2a_gemm --keep mode=graph     only these rows
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from torch_overlap.tools.bench import result


def keeps(row: dict[str, Any], wanted: dict[str, list[str]]) -> bool:
    return all(str(row.get(key)) in values for key, values in wanted.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--keep", action="append", default=[], metavar="KEY=VALUE,...", help="may be repeated")
    args = parser.parse_args()
    wanted = {key: values.split(",") for key, _, values in (text.partition("=") for text in args.keep)}
    for path in args.files:
        content = result.read(path)
        before = path.stat().st_size
        content["rows"] = [row for row in content["rows"] if keeps(row, wanted)]
        if not content["rows"]:
            parser.error(f"expected --keep that is true of a row of {path}, got {' '.join(args.keep)}")
        path.write_text(result.text(content))
        print(f"{path}: {before} -> {path.stat().st_size} bytes, {len(content['rows'])} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
