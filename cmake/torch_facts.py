"""Prints, as JSON, what a build needs to know about the torch (and the CUDA wheels) of this environment.

Run by CMake, setup.py and the Makefile; `python -I cmake/torch_facts.py` sees the environment even from inside
pip's isolated build, where torch itself is hidden. `--nvcc-packages` prints the pip requirement that brings nvcc,
and nothing where a GPU build is not wanted or nvcc is there.
"""

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path


def wheel_dir(name: str) -> "Path | None":
    """The folder of `nvidia/<name>`, or None. The wheels share a namespace package: any sys.path entry may hold it."""
    try:
        spec = importlib.util.find_spec(f"nvidia.{name}")
    except ModuleNotFoundError:
        return None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def nccl_version(nccl: "Path | None") -> str:
    header = nccl / "include" / "nccl.h" if nccl else None
    if header is None or not header.is_file():
        return ""
    text = header.read_text(errors="replace")
    return ".".join(re.search(rf"#define NCCL_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def facts() -> dict:
    import torch  # the one slow line: about two seconds

    cuda = torch.version.cuda or ""
    toolkit = wheel_dir(f"cu{cuda.split('.')[0]}") if cuda else None
    nccl = wheel_dir("nccl") if cuda else None
    nvcc = toolkit / "bin" / "nvcc" if toolkit else None
    return {
        "version": torch.__version__,
        "version_base": re.match(r"\d+\.\d+(\.\d+)?", torch.__version__)[0],
        "dir": str(Path(torch.__file__).resolve().parent),
        "cxx11_abi": int(torch._C._GLIBCXX_USE_CXX11_ABI),
        "cuda": cuda,
        "gpu": torch.cuda.is_available(),
        "cuda_wheel_dir": str(toolkit or ""),
        "cuda_wheel_nvcc": str(nvcc) if nvcc and nvcc.is_file() else "",
        "nccl_dir": str(nccl or ""),
        "nccl": nccl_version(nccl),
    }


def nvcc_packages(found: dict) -> str:
    wanted = os.environ.get("FORCE_CUDA", "1" if found["gpu"] else "0") == "1"
    cuda_home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    present = found["cuda_wheel_nvcc"] or shutil.which("nvcc") or Path(cuda_home, "bin", "nvcc").is_file()
    return f"cuda-toolkit[nvcc,crt,nvvm,cccl]=={found['cuda']}.*" if wanted and not present else ""


if __name__ == "__main__":
    print(nvcc_packages(facts()) if "--nvcc-packages" in sys.argv else json.dumps(facts(), indent=1))
