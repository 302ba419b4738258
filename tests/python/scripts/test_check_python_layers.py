"""scripts/check_python_layers.py, on small packages of its own."""

from __future__ import annotations

import runpy
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

main = runpy.run_path(str(Path(__file__).resolve().parents[3] / "scripts" / "check_python_layers.py"))["main"]

TREE = {
    "__init__.py": "from pkg.comm import new_comm\n",
    "comm.py": "import os\n\nfrom pkg._C import _private\nfrom pkg.ops import add\n",
    "tune.py": "def tune():\n    from pkg.bench.run import run\n",
    "ops/__init__.py": "if TYPE_CHECKING:\n    from pkg.comm import Comm\ndef add(): ...\n",
    "mesh/__init__.py": "from pkg.nn.linear import linear\n",
    "nn/linear.py": "def linear():\n    from pkg.comm import new_comm\n",
    "bench/run.py": "from pkg.mesh import shard\n",
}

BROKEN = {
    "layer": ("comm.py", "from pkg.mesh import shard\n", "comm.py:1: core may not import mesh"),
    "late layer": ("comm.py", "def f():\n    from pkg.mesh import shard\n", "comm.py:2: core may not import mesh"),
    "circle": ("ops/__init__.py", "from pkg.comm import new_comm\n", "pkg.comm, pkg.ops: import each other"),
    "private": ("nn/linear.py", "from pkg.ops import _add\n", "linear.py:1: _add is private to pkg.ops"),
    "after a class": (
        "nn/linear.py",
        "class A: ...\nfrom pkg.comm import f\n",
        "linear.py:2: the import comes after the",
    ),
    "after a function": (
        "nn/linear.py",
        "def a(): ...\nimport pkg.comm\n",
        "linear.py:2: the import comes after the code",
    ),
}


def check(tmp_path: Path, files: dict[str, str]) -> str:
    """Returns what the checker prints for a package of these files; empty if it accepts them."""
    root = tmp_path / "pkg"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    with redirect_stdout(StringIO()) as printed:
        failed = main(root)
    return printed.getvalue() if failed else ""


def test_allowed_imports(tmp_path: Path) -> None:
    assert check(tmp_path, TREE) == ""


@pytest.mark.parametrize("case", BROKEN)
def test_each_error_is_named(tmp_path: Path, case: str) -> None:
    file, text, message = BROKEN[case]
    assert message in check(tmp_path, TREE | {file: text})
