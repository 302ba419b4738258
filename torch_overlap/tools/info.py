"""`python -m torch_overlap info`: the installation, its build configuration, and the machine."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from torch_overlap import _C
from torch_overlap._load import LIBRARY

__all__ = ["add_arguments", "report"]

_EPILOG = """\
Example:
  python -m torch_overlap info > report.txt      the file to attach to a report of a fault

Output, one "name: value" a line:
  torch_overlap           version and folder of the package, the torch, CUDA, NCCL and GPU architectures that it was
                          built for, and the backends of new_comm that this build has
  torch                   the torch, CUDA, NCCL and Python of this process
  machine                 system and cores; name, memory and architecture of each visible GPU
  communicator defaults   what a communicator takes from the environment here: timeout, the reaction to an error,
                          rank and size with the launcher that set them, address of the store; and the file with
                          measured algorithms, if there is one
  links                   with two or more GPUs, how they are connected: the table of `nvidia-smi topo -m`, or which
                          peers a GPU reaches
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the texts of the command, which has no options."""
    parser.epilog = _EPILOG


def report() -> str:
    """Returns the whole report, one `name: value` per line under headings."""
    sections = {
        "torch_overlap": _package(),
        "torch": _torch(),
        "machine": _machine(),
        "communicator defaults": _defaults(),
    }
    lines: list[str] = []
    for title, rows in sections.items():
        lines.append(title)
        lines += [f"  {name + ':':<22} {value}" for name, value in rows]
    return "\n".join(lines + _links())


def _package() -> Iterable[tuple[str, object]]:
    build = _C.build_config
    yield "version", build["version"]
    yield "installed in", LIBRARY.parent
    yield "built for torch", build["torch"]
    yield (
        "build",
        f"{'CUDA ' + build['cuda'] if build['cuda'] else 'CPU only'}, {build['build_type']}, {build['compiler']}",
    )
    if build["cuda"]:
        yield "CUDA architectures", build["cuda_architectures"]
        yield "built for NCCL", build["nccl"]
    yield "backends", ", ".join(_C.built_backends())


def _torch() -> Iterable[tuple[str, object]]:
    yield "version", torch.__version__
    yield "CUDA", torch.version.cuda or "none"
    yield "NCCL", _nccl_version()
    yield "Python", f"{platform.python_version()} ({sys.executable})"


def _nccl_version() -> str:
    if not (torch.version.cuda and torch.distributed.is_nccl_available()):
        return "none"
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())
    except (RuntimeError, AttributeError) as error:
        return f"not loaded ({error})"


def _machine() -> Iterable[tuple[str, object]]:
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores"
    if not torch.cuda.is_available():
        yield "GPUs", "none (no driver, or none visible)"
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield (
            f"GPU {index}",
            f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}",
        )


def _defaults() -> Iterable[tuple[str, object]]:
    env = _C._env
    yield "timeout", env.timeout()
    yield "abort on error", env.abort_on_error()
    launcher = env.launcher()
    if launcher is None:
        yield "rank and size", "not in the environment"
    else:
        yield "rank and size", f"{launcher['rank']} of {launcher['size']} (from {launcher['family']})"
    yield "store", f"{env.master_addr() or '(MASTER_ADDR not set)'}:{env.master_port()}"
    cache = env.tune_cache()
    is_there = cache is not None and Path(cache).exists()
    yield "measured algorithms", cache if is_there else f"none ({cache or 'no file is named'})"


def _links() -> list[str]:
    """Returns how the GPUs are connected: the driver's table, or torch's peer access if there is no table."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return []
    lines = ["links"]
    smi = shutil.which("nvidia-smi")
    if smi:
        table = subprocess.run([smi, "topo", "-m"], capture_output=True, text=True, timeout=60)
        if table.returncode == 0:
            return lines + [f"  {line}" for line in table.stdout.rstrip().splitlines()]
    for source in range(count):
        reached = [peer for peer in range(count) if peer != source and torch.cuda.can_device_access_peer(source, peer)]
        lines.append(f"  {f'GPU {source} reaches:':<22} {', '.join(map(str, reached)) or 'none'}")
    return lines
