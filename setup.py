"""Builds the libraries with CMake and puts them beside torch_overlap/__init__.py. The rest is in pyproject.toml.

There are libtorch_overlap.so, _C and, where jax is installed, libtorch_overlap_jax.so.

The torch of the environment is the one built for, also inside pip's isolated build. Honours FORCE_CUDA (1, 0; default:
is a GPU visible), MAX_JOBS, CMAKE_ARGS, CMAKE_BUILD_TYPE, TORCH_OVERLAP_BUILD_DIR (default build/cp<version>-cpu or
-cuda, kept, so that the next build compiles only what changed; build/current points to the last one made in place) and
TORCH_OVERLAP_TORCH_PYTHON (the Python whose torch and jax are built for; default: this one).
"""

import functools
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
TORCH_PYTHON = os.environ.get("TORCH_OVERLAP_TORCH_PYTHON", sys.executable)

if int(setuptools.__version__.partition(".")[0]) < 77:
    sys.exit(
        f"torch_overlap: expected setuptools >= 77, which reads licence expressions, got {setuptools.__version__}; "
        "pip install 'setuptools>=77,<82'"
    )


@functools.cache
def torch_facts() -> dict:
    """The torch of this environment. -I: pip's isolated build hides it through PYTHONPATH."""
    command = [TORCH_PYTHON, "-I", str(ROOT / "cmake" / "torch_facts.py")]
    probe = subprocess.run(command, capture_output=True, text=True)
    if probe.returncode != 0:
        sys.exit(
            f"torch_overlap: expected torch >= 2.11 in {TORCH_PYTHON}, got:\n{probe.stderr}\n"
            "install it first (pip install torch==2.11.0), then: pip install --no-build-isolation ."
        )
    return json.loads(probe.stdout)


def find_tool(name: str, folder: str, minimum: tuple[int, int]) -> str:
    """The environment's own command, that of the PyPI module of this name, or one on the path, if it is new enough."""
    candidates = [Path(sys.executable).parent / name, Path(shutil.which(name) or "/nonexistent")]
    if importlib.util.find_spec(name):
        candidates.insert(1, Path(getattr(importlib.import_module(name), folder, "")) / name)
    seen = []
    for path in filter(Path.is_file, candidates):
        text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"(\d+)\.(\d+)", text)
        if version and (int(version[1]), int(version[2])) >= minimum:
            return str(path)
        seen.append(f"{path} ({version[0] if version else 'does not run'})")
    wanted = f"{name} >= {minimum[0]}.{minimum[1]}"
    sys.exit(f"torch_overlap: expected {wanted} as a command or a module, got {seen or 'none'}; pip install {name}")


class CMakeBuild(build_ext):
    """configure, build, install: into the source package (editable, --inplace) or into the wheel being made."""

    def run(self) -> None:
        facts = torch_facts()
        cuda = os.environ.get("FORCE_CUDA", "1" if facts["gpu"] else "0") == "1"
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}-{'cuda' if cuda else 'cpu'}"
        build_dir = Path(os.environ.get("TORCH_OVERLAP_BUILD_DIR", ROOT / "build" / tag)).resolve()
        in_place = self.inplace or getattr(self, "editable_mode", False)
        prefix = ROOT if in_place else Path(self.build_lib).resolve()
        cmake = find_tool("cmake", "CMAKE_BIN_DIR", (3, 26))
        jobs = os.environ.get("MAX_JOBS", "")

        self.command(
            cmake, "-S", ROOT, "-B", build_dir, "-G", "Ninja",
            "-U", "_Python3_*",  # the headers of the Python that this folder was configured for before
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja', 'BIN_DIR', (1, 10))}",
            f"-DPython3_EXECUTABLE={sys.executable}",
            f"-DTORCH_OVERLAP_TORCH_PYTHON={TORCH_PYTHON}",
            f"-DTORCH_OVERLAP_CUDA={'ON' if cuda else 'OFF'}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('CMAKE_BUILD_TYPE', 'Release')}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        )  # fmt: skip
        self.command(
            cmake, "--build", build_dir, *(["-j", jobs] if jobs else []), "--target",
            "torch_overlap", "_C", "torch_overlap_jax",
        )  # fmt: skip
        strip = [] if in_place else ["--strip"]
        self.command(cmake, "--install", build_dir, "--prefix", prefix, *strip)
        if in_place:
            (ROOT / "build").mkdir(exist_ok=True)
            current = ROOT / "build" / "current"
            current.unlink(missing_ok=True)
            current.symlink_to(os.path.relpath(build_dir, current.parent))

    def command(self, *argv: object) -> None:
        try:
            subprocess.run([str(a) for a in argv], check=True)
        except subprocess.CalledProcessError as error:
            sys.exit(f"torch_overlap: {shlex.join(error.cmd)} failed; its message is above")


class CleanBuildPy(build_py):
    """Starts a wheel from nothing: setuptools would pack what an older build left in build/lib*."""

    def run(self) -> None:
        if not getattr(self, "editable_mode", False):
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(
    ext_modules=[Extension("torch_overlap._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": CleanBuildPy},
    install_requires=[f"torch=={torch_facts()['version_base']}"],
)
