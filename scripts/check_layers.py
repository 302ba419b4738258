#!/usr/bin/env python3
"""Holds csrc/ to its layers: who may include whom, which headers stay in which folders, and that no two headers
define a class of the same name. See CONTRIBUTING.md."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "csrc" / "torch_overlap"

# layer -> the layers that it may include, besides itself
ARROWS = {
    "base": "",
    "common": "base",
    "symm": "base common",
    "comm": "base common symm",
    "gemm": "base common",
    "overlap": "base common symm comm gemm",
    "mesh": "base",
    "spmd": "base common mesh comm overlap",
    "ops": "base common symm comm gemm overlap mesh spmd",
    "python": "base common symm comm gemm overlap mesh spmd ops",
}
CUDA_FOLDERS = {"cuda", "nccl", "cublaslt", "sm90"}

INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]')
CONDITION = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b")
PYTHON_HEADER = re.compile(r"Python\.h|pybind11/|torch/extension\.h|torch/python\.h|torch/csrc/.*(pybind|[Pp]ython)")
TORCH_HEADER = re.compile(r"(ATen|torch)/")
CUDA_HEADER = re.compile(
    r"cuda|nccl|cublas|cute/|cutlass/|(c10|ATen|torch/csrc)/cuda/|torch/csrc/distributed/c10d/(NCCL|ProcessGroupNCCL|cuda/)"
)
NAMESPACE = re.compile(r"^(?:namespace ([\w:]+) \{|\}  // namespace ([\w:]+))$")
CLASS = re.compile(r"^(?:class|struct)(?: TORCH_OVERLAP_API)? (\w+)(?! *;)[^;]*$")


def problems(path: Path):
    parts = path.relative_to(ROOT).parts
    layer = parts[0]
    if layer not in ARROWS:
        yield 0, f"{layer}/ is no layer: add it to ARROWS"
        return
    in_cuda_folder = bool(CUDA_FOLDERS & set(parts[:-1]))
    may_branch = path.name in ("compat.h", "export.h") or path.stem.endswith("_device")
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if CONDITION.match(line) and not may_branch:
            yield number, "#if belongs in compat.h, export.h or *_device.h: make it another file, or a registration"
        if "TORCH_LIBRARY_IMPL(" in line and path.name != "register.h":
            yield number, "TORCH_LIBRARY_IMPL: write TORCH_OVERLAP_KERNELS, which hands errors on"
        match = INCLUDE.match(line)
        if not match:
            continue
        header = match[1]
        ours = re.match(r"torch_overlap/(\w+)/", header)
        if ours and ours[1] != layer and ours[1] not in ARROWS[layer].split():
            yield number, f"{layer}/ may not include {ours[1]}/ (only {ARROWS[layer] or 'std'})"
        if line.lstrip("# \t").startswith('include "') and not header.startswith("torch_overlap/"):
            yield number, f'"{header}": our headers are included as "torch_overlap/<layer>/<file>", others with <>'
        if PYTHON_HEADER.match(header) and layer != "python":
            yield number, f"<{header}> belongs in python/: libtorch_overlap.so needs no Python"
        if CUDA_HEADER.match(header) and not in_cuda_folder:
            yield number, f"<{header}> belongs in a folder cuda/, nccl/, cublaslt/ or sm90/"
        if path.suffix in (".cu", ".cuh") and TORCH_HEADER.match(header):
            yield number, f"<{header}>: nvcc does not read torch's headers; take plain parameters from a .cpp"
    if path.suffix in (".cu", ".cuh") and not in_cuda_folder:
        yield 0, "device code belongs in a folder cuda/, nccl/, cublaslt/ or sm90/"


def classes(path: Path):
    """Those that a header defines outside others, with their namespaces."""
    inside: list[str] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if match := NAMESPACE.match(line):
            inside = [*inside, match[1]] if match[1] else inside[:-1]
        elif match := CLASS.match(line):
            yield number, "::".join([*inside, match[1]])


def repeated(headers: list[Path]):
    """The linker takes one of two inline functions of a name, destructors among them, for both."""
    first: dict[str, Path] = {}
    for path in headers:
        for number, name in classes(path):
            if first.setdefault(name, path) != path:
                yield path, number, f"{name} is defined in {first[name].relative_to(ROOT)} too"


def main() -> int:
    files = sorted(path for path in ROOT.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))
    found = [f"{p.relative_to(ROOT.parent.parent)}:{n}: {what}" for p in files for n, what in problems(p)]
    twice = repeated([path for path in files if path.suffix in (".h", ".cuh")])
    found += [f"{p.relative_to(ROOT.parent.parent)}:{n}: {what}" for p, n, what in twice]
    print("\n".join(found) or f"check_layers: {len(files)} files, every include is allowed")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
