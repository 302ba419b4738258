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
    "__main__.py": "from pkg.tools.run import main\n",
    "hooks.py": "from pkg.compat.hooks import Args, _make\n",
    "lazy.py": "import importlib\ndef __getattr__(name):\n    return importlib.import_module(f'pkg.{name}')\n",
    "late.py": "from importlib import import_module\ndef f():\n    return import_module('pkg.ops')\n",
    "ops/__init__.py": "if TYPE_CHECKING:\n    from pkg.comm import Comm\ndef add(): ...\n",
    "mesh/__init__.py": "from pkg.nn.linear import linear\n",
    "nn/linear.py": "def linear():\n    from pkg.comm import new_comm\n",
    "compat/hooks.py": "from pkg.mesh import shard\nclass Args: ...\ndef _make(): ...\n",
    "tools/run.py": "from pkg.mesh import shard\nfrom pkg.compat import hooks\ndef main(): ...\n",
}

BROKEN = {
    "layer": ("comm.py", "from pkg.mesh import shard\n", "comm.py:1: core may not import mesh"),
    "late layer": ("comm.py", "def f():\n    from pkg.mesh import shard\n", "comm.py:2: core may not import mesh"),
    "core of tools": ("comm.py", "import pkg.tools.run\n", "comm.py:1: core may not import tools"),
    "core of compat": ("comm.py", "import pkg.compat.hooks\n", "comm.py:1: core may not import compat"),
    "core of a path to compat": ("comm.py", "from pkg import hooks\n", "comm.py:1: core may not import compat"),
    "mesh of tools": ("mesh/__init__.py", "import pkg.tools.run\n", "__init__.py:1: mesh may not import tools"),
    "mesh of compat": ("mesh/__init__.py", "import pkg.compat.hooks\n", "__init__.py:1: mesh may not import compat"),
    "compat of tools": ("compat/hooks.py", "import pkg.tools.run\n", "hooks.py:1: compat may not import tools"),
    "by name": ("comm.py", "import importlib\nx = importlib.import_module('pkg.mesh')\n", "core may not import mesh"),
    "late by name": (
        "comm.py",
        "from importlib import import_module\ndef f(name):\n    return import_module(f'pkg.tools.{name}')\n",
        "comm.py:3: core may not import tools",
    ),
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
