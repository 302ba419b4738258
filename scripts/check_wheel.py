#!/usr/bin/env python3
"""Checks a wheel: check_wheel.py [WHEEL]. Without WHEEL, builds the one of this checkout.

Checks its metadata, installs it into a new environment, and uses it there, outside the checkout, without a GPU. The new
environment has nothing but the wheel and, through a .pth file, the packages next to this Python's torch. Thus torch is
not downloaded, and neither the checkout nor an editable install of it is visible.
"""

import email
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("torch_overlap_jax.py", "torch_overlap_sglang.py", "torch_overlap_vllm.py")
USE = """
import sys
from importlib.metadata import entry_points
import torch, torch_overlap as to
from torch_overlap.testing import run_ranks

def body(comm):
    x = torch.arange(1000.0) * (comm.get_rank() + 1)
    comm.all_reduce(x, to.ReduceOp.SUM, async_op=True).wait()
    assert torch.equal(x, torch.arange(1000.0) * 3)
    y = to.ops.all_gather(torch.full((2,), float(comm.get_rank())), comm)
    assert y.tolist() == [0, 0, 1, 1]

if __name__ == "__main__":
    assert to.__file__.startswith(sys.prefix), to.__file__
    assert to.__version__ == sys.argv[1], to.__version__
    for group in ("sglang.srt.platforms", "vllm.platform_plugins"):
        (plugin,) = entry_points(group=group, name="torch_overlap")
        assert plugin.load()() is None
    for backend in ("local", "gloo"):
        run_ranks(body, 2, backend=backend)
    print("check_wheel:", to.__version__, "works from", to.__file__)
"""


def expect(name: str, found: object, is_right: bool, wanted: str) -> None:
    if not is_right:
        sys.exit(f"check_wheel: expected {wanted} for {name}, got {found!r}. Correct it in pyproject.toml or setup.py.")


def check_metadata(wheel: Path) -> str:
    """Checks the wheel's metadata and its list of files. Returns its version."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (path,) = (name for name in names if re.fullmatch(r"torch_overlap-[^/]+\.dist-info/METADATA", name))
        metadata = email.message_from_bytes(archive.read(path))
    folder = path.rpartition("/")[0]
    needed = [
        *("torch_overlap/_build_info.py", "torch_overlap/_C.pyi", "torch_overlap/py.typed", *MODULES),
        *("torch_overlap/libtorch_overlap.so", f"{folder}/licenses/LICENSE"),
    ]
    missing = sorted(set(needed) - set(names))
    expect("the files of the wheel", missing, not missing, "none missing")
    stray = [name for name in names if not name.startswith(("torch_overlap/", f"{folder}/", *MODULES))]
    expect("the top of the wheel", stray, not stray, f"torch_overlap and {', '.join(MODULES)} alone")

    for name, wanted in (("License-Expression", "BSD-3-Clause"), ("Author", "torch_overlap developers")):
        expect(name, metadata[name], metadata[name] == wanted, wanted)
    for name in ("Summary", "Keywords", "Requires-Python", "Description-Content-Type"):
        expect(name, metadata[name], bool(metadata[name]), "a value")
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    torch_pin = f"torch=={torch.__version__.partition('+')[0]}"
    expect("Requires-Dist", required, required == [torch_pin], f"{torch_pin} alone")
    python = f"Programming Language :: Python :: {sys.version_info.major}.{sys.version_info.minor}"
    for name, wanted in (("Provides-Extra", {"demo", "jax", "test"}), ("Classifier", {python, "Typing :: Typed"})):
        found = metadata.get_all(name, [])
        expect(name, found, wanted <= set(found), f"{sorted(wanted)} among others")
    return metadata["Version"]


def main() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: object, cwd: Path = ROOT) -> None:
        subprocess.run([str(part) for part in command], cwd=cwd, env=env, check=True)

    with tempfile.TemporaryDirectory(prefix="torch_overlap_wheel_") as name:
        folder = Path(name)
        if len(sys.argv) > 1:
            wheel = Path(sys.argv[1]).resolve()
        else:
            run(sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", folder, ROOT)
            (wheel,) = folder.glob("torch_overlap-*.whl")
        version = check_metadata(wheel)
        venv.create(folder / "env", with_pip=True, symlinks=True)
        python = folder / "env" / "bin" / "python"
        run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel, cwd=folder)
        (site,) = (folder / "env").glob("lib/python*/site-packages")
        (site / "torch.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
        (folder / "use.py").write_text(USE)
        run(python, "use.py", version, cwd=folder)
        run(python, "-I", "-m", "torch_overlap", "info", cwd=folder)


if __name__ == "__main__":
    main()
