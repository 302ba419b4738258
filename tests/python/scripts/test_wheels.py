"""Pythons and wheels that scripts/make_wheels.py and scripts/check_wheel.py refuse, and the source distribution."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
check_metadata = runpy.run_path(str(ROOT / "scripts" / "check_wheel.py"))["check_metadata"]
find_python = runpy.run_path(str(ROOT / "scripts" / "make_wheels.py"))["find_python"]

FOLDER = "torch_overlap-1.2.dist-info"
FILES = [
    *("torch_overlap/_build_info.py", "torch_overlap/_C.pyi", "torch_overlap/py.typed", "torch_overlap_jax.py"),
    *("torch_overlap_sglang.py", "torch_overlap_vllm.py"),
    *("torch_overlap/libtorch_overlap.so", f"{FOLDER}/licenses/LICENSE"),
]
METADATA = [
    "Version: 1.2",
    "Summary: a summary",
    "License-Expression: BSD-3-Clause",
    "Author: torch_overlap developers",
    "Keywords: one,two",
    "Requires-Python: >=3.10",
    "Description-Content-Type: text/markdown",
    f"Requires-Dist: torch=={torch.__version__.partition('+')[0]}",
    'Requires-Dist: numpy; extra == "demo"',
    *(f"Provides-Extra: {name}" for name in ("demo", "jax", "test")),
    *(f"Classifier: Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
    "Classifier: Typing :: Typed",
]


def make_wheel(folder: Path, files: list[str], metadata: list[str]) -> Path:
    wheel = folder / "torch_overlap-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in files:
            archive.writestr(name, "")
        archive.writestr(f"{FOLDER}/METADATA", "\n".join(metadata) + "\n")
    return wheel


@pytest.mark.skipif(not (3, 10) <= sys.version_info[:2] <= (3, 13), reason="the classifiers name Python 3.10 to 3.13")
def test_a_complete_wheel_is_accepted(tmp_path: Path) -> None:
    assert check_metadata(make_wheel(tmp_path, FILES, METADATA)) == "1.2"


CHECKED = [line for line in METADATA if not line.startswith(("Version", "Classifier", "Requires-Dist: numpy"))]


@pytest.mark.parametrize("missing", [*FILES, *CHECKED])
def test_what_a_wheel_lacks_is_named(tmp_path: Path, missing: str) -> None:
    files = [name for name in FILES if name != missing]
    metadata = [line for line in METADATA if line != missing]
    name = "the files of the wheel" if missing in FILES else missing.partition(":")[0]
    with pytest.raises(SystemExit, match=f"check_wheel: expected .* for {name}, got "):
        check_metadata(make_wheel(tmp_path, files, metadata))


@pytest.mark.parametrize("stray", ["tests/conftest.py", "libtorch.so"])
def test_other_files_are_refused(tmp_path: Path, stray: str) -> None:
    with pytest.raises(SystemExit, match=f"check_wheel: expected torch_overlap .* alone for .*{stray}"):
        check_metadata(make_wheel(tmp_path, [*FILES, stray], METADATA))


def test_every_python_without_a_wheel_is_named(tmp_path: Path) -> None:
    outputs = {
        "old": '[[3, 9], "cpython", true]',
        "pypy": '[[3, 11], "pypy", true]',
        "bare": '[[3, 12], "cpython", false]',
    }
    for name, output in outputs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{output}'\n")
        (tmp_path / name).chmod(0o755)
    pythons = [sys.executable, *(str(tmp_path / name) for name in (*outputs, "none"))]
    script = [sys.executable, str(ROOT / "scripts" / "make_wheels.py"), *pythons]
    made = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert made.returncode != 0
    assert "make_wheels: expected CPython 3.10 to 3.13 with headers for every PYTHON, got" in made.stderr
    assert f"{tmp_path / 'old'} (cpython 3.9)" in made.stderr
    assert f"{tmp_path / 'pypy'} (pypy 3.11)" in made.stderr
    assert f"{tmp_path / 'bare'} (no Python.h" in made.stderr
    assert f"{tmp_path / 'none'} (No such file or directory)" in made.stderr
    assert f"{sys.executable} (" not in made.stderr


def test_pip_takes_a_python_that_is_named_by_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    found = find_python(Path(sys.executable).name)
    pip = [sys.executable, "-m", "pip", "--python", found, "--version"]
    assert subprocess.run(pip, capture_output=True, timeout=120).returncode == 0


def test_the_source_distribution_has_every_folder_that_cmake_adds() -> None:
    added = re.findall(r"add_subdirectory\((\S+?)[ )]", (ROOT / "CMakeLists.txt").read_text())
    grafted = re.findall(r"^graft (\S+)", (ROOT / "MANIFEST.in").read_text(), re.M)
    assert added
    missing = [folder for folder in added if not any(f"{folder}/".startswith(f"{graft}/") for graft in grafted)]
    assert missing == []
