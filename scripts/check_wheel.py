#!/usr/bin/env python3
"""Builds a wheel, installs it into a new environment, and uses it there, outside the checkout.

The new environment has nothing but the wheel and, through a .pth file, the packages next to this Python's torch. Thus
torch is not downloaded, and neither the checkout nor an editable install of it is visible.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
USE = """
import sys
import torch, torch_overlap as to
from torch_overlap.testing import run_ranks

assert to.__file__.startswith(sys.prefix), to.__file__

def body(comm):
    x = torch.arange(1000.0) * (comm.get_rank() + 1)
    comm.all_reduce(x, to.ReduceOp.SUM, async_op=True).wait()
    assert torch.equal(x, torch.arange(1000.0) * 3)
    y = to.ops.all_gather(torch.full((2,), float(comm.get_rank())), comm)
    assert y.tolist() == [0, 0, 1, 1]

run_ranks(body, 2, backend="local")
print("check_wheel:", to.__version__, "works from", to.__file__)
"""


def main() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: object, cwd: Path = ROOT) -> None:
        subprocess.run([str(part) for part in command], cwd=cwd, env=env, check=True)

    with tempfile.TemporaryDirectory(prefix="torch_overlap_wheel_") as name:
        folder = Path(name)
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", folder, ROOT)
        (wheel,) = folder.glob("torch_overlap-*.whl")
        venv.create(folder / "env", with_pip=True, symlinks=True)
        python = folder / "env" / "bin" / "python"
        run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel, cwd=folder)
        (site,) = (folder / "env").glob("lib/python*/site-packages")
        (site / "torch.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
        run(python, "-I", "-c", USE, cwd=folder)
        run(python, "-I", "-m", "torch_overlap", "info", cwd=folder)


if __name__ == "__main__":
    main()
