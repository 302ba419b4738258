"""scripts/check_docs.py, on small trees of its own, and on this one."""

from __future__ import annotations

import runpy
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
main = runpy.run_path(str(ROOT / "scripts" / "check_docs.py"))["main"]

TREE = {
    "Makefile": "X ?= 1\n.PHONY: demo\ndemo test-cpp: build\n\techo\nbuild:\n\techo\n",
    "csrc/core/comm/direct.h": "",
    "scripts/run.py": "",
    "docs/other.md": '# Other page\n\n## How "auto" chooses\n',
    "benchmarks/results/bench-h100-tp4-2026-01-01.json": "{}",
}
KNOWN = {"torch_overlap.ops.gather", "to.explain", "torch.ops.torch_overlap.gather"}


def faults(tmp_path: Path, text: str) -> list[str]:
    """Returns the output of the checker for a page with this text in that tree, without its last line."""
    for name, content in {**TREE, "docs/page.md": text}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    with redirect_stdout(StringIO()) as printed:
        failed = main(tmp_path, KNOWN.__contains__)
    lines = printed.getvalue().splitlines()[:-1]
    assert bool(failed) == bool(lines)
    return lines


RIGHT = [
    "`scripts/run.py`, `csrc/core/`, `core/comm/direct.h`, `comm/direct*`, `direct.h`, `docs/<page>.md`, `csrc/...h`",
    "`make demo`, `make build test-cpp`, `PYTHON=/x/python make demo`, `make demo X=2`, `make demo && make build`",
    "```\nmake demo     # trains\npython scripts/run.py --out build/x.py2\n```",
    "`to.explain(x)`, `torch_overlap.ops.gather`, `torch.ops.torch_overlap.gather`, `torch_overlap.*`, `x.to.device`",
    "[one](other.md), [two](other.md#how-auto-chooses), [three](#title), [four](https://example.org/docs/none.md)",
    "`bench-h100-tp4-2026-01-01.json`, `benchmarks/results/bench-*.json`, `bench-h100-tp4-*.json`",
    "scripts/none.py and make nothing, in prose; `/usr/none.h`, `tune.json`, `a / b`, `dim 0/1`",
    "```\nothers only make more rows\n```",
]
WRONG = {
    "`scripts/none.py`": "path scripts/none.py",
    "`comm/none.h`": "path comm/none.h",
    "`none.cu`": "path none.cu",
    "`docs/none`": "path docs/none",
    "`bench-h200-tp4-2026-01-01.json`": "path bench-h200-tp4-2026-01-01.json",
    "`make none`": "target none of make",
    "`make demo none`": "target none of make",
    "`X=2 make none`": "target none of make",
    "```\ncd docs && make none\n```": "target none of make",
    "`to.none`": "name to.none",
    "```python\ny = to.ops.none(x)\n```": "name to.ops.none",
    "`torch_overlap.none`": "name torch_overlap.none",
    "`torch.ops.torch_overlap.none`": "name torch.ops.torch_overlap.none",
    "[none](none.md)": "link to none.md",
    "[none](other.md#none)": "link to other.md#none",
    "[none](#none)": "link to #none",
}


@pytest.mark.parametrize("text", RIGHT)
def test_pages_that_are_right(tmp_path: Path, text: str) -> None:
    assert faults(tmp_path, f"# Title\n\n{text}\n") == []


@pytest.mark.parametrize("text", WRONG)
def test_pages_that_name_what_is_not_there(tmp_path: Path, text: str) -> None:
    line = 4 if text.startswith("```") else 3
    assert faults(tmp_path, f"# Title\n\n{text}\n") == [f"page.md:{line}: {WRONG[text]}: it is not there"]


def test_a_package_that_is_not_built_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main.__globals__, "resolver", lambda: "ImportError: no _C")
    (tmp_path / "README.md").write_text("`to.none`\n")
    with redirect_stdout(StringIO()) as printed:
        assert main(tmp_path) == 0
    assert printed.getvalue() == (
        "check_docs: 1 pages, 0 errors; names of the package were skipped (ImportError: no _C)\n"
    )


def test_this_tree() -> None:
    assert main() == 0
