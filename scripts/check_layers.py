#!/usr/bin/env python3
"""Checks the layers of csrc/: which layers may include each other, which headers stay in which folders, and that no two
headers define a class of the same name. See CONTRIBUTING.md."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "csrc" / "torch_overlap"

# layer -> the layers that it may include, besides itself
ARROWS = {
    "base": "",
    "common": "base",
    "symm": "base common",
    "collectives": "base common symm",
    "comm": "base common symm collectives",
    "gemm": "base common",
    "overlap": "base common symm comm gemm",
    "mesh": "base",
    "spmd": "base common mesh comm overlap",
    "ops": "base common symm comm gemm overlap mesh spmd",
    "jax": "base common comm gemm overlap ops",
    "python": "base common symm collectives comm gemm overlap mesh spmd ops",
}
CUDA_FOLDERS = {"cuda", "nccl", "cublaslt", "sm90"}

INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]')
CONDITION = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b")
PYTHON_HEADER = re.compile(r"Python\.h|pybind11/|torch/extension\.h|torch/python\.h|torch/csrc/.*(pybind|[Pp]ython)")
TORCH_HEADER = re.compile(r"(ATen|torch)/")
CUDA_HEADER = re.compile(
    r"cuda|nccl|cublas|cute/|cutlass/|(c10|ATen|torch/csrc)/cuda/|torch/csrc/distributed/c10d/(NCCL|ProcessGroupNCCL|cuda/)"
)
# Non-code text, distinguished by its first characters. All else is names, or single punctuation characters.
NOT_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"([^\s()\\]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'', re.S
)
DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.M)
TOKEN = re.compile(r"\w+|::|\[\[|\]\]|\S")
CLOSERS = {"{": "}", "(": ")", "[[": "]]", "<": ">"}


def problems(path: Path, root: Path):
    parts = path.relative_to(root).parts
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


def tokens(text: str) -> list[tuple[int, str]]:
    """Returns tokens with their lines, without comments, literals and directives."""
    for pattern in (NOT_CODE, DIRECTIVE):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n") or " ", text)
    lines = enumerate(text.split("\n"), 1)
    return [(number, token) for number, line in lines for token in TOKEN.findall(line)]


def past(code: list[str], at: int) -> int:
    """Returns the index after the bracket that closes the one at `at`."""
    opener, closer, depth = code[at], CLOSERS[code[at]], 0
    while at < len(code):
        depth += (code[at] == opener) - (code[at] == closer)
        at += 1
        if depth == 0:
            break
    return at


def class_head(code: list[str], at: int) -> tuple[str, int]:
    """Returns the name of the class or enum that begins at `at` (empty if only declared, or unnamed), and the end of
    its head."""
    name = ""
    named = False
    while at < len(code) and code[at] not in ("{", ";", "=", ")", ">", ","):
        token = code[at]
        if token == "(":  # belongs to alignas or a macro, or holds the parameters of a function that returns a class
            name, at = name if named else "", past(code, at)
        elif token == "[[":
            at = past(code, at)
        elif token == "<":  # belongs to a specialization, or to a base
            end = past(code, at)
            name += "" if named else "".join(code[at:end])
            at = end
        else:
            named |= token in (":", "final")
            if not named and token not in ("class", "struct"):
                name = name + token if token == "::" or name.endswith("::") else token
            at += 1
    return (name if at < len(code) and code[at] == "{" else ""), at


def classes(text: str):
    """Yields the classes and enums that a file defines at namespace scope, with their namespaces, except in unnamed
    ones."""
    found = tokens(text)
    code = [token for _, token in found]
    inside: list[str] = []
    at = 0
    while at < len(code):
        if code[at] == "namespace":
            end = next((i for i in range(at, len(code)) if code[i] in "{;="), len(code))
            if code[end : end + 1] == ["{"]:
                inside.append("".join(code[at + 1 : end]).replace("::inline", "::"))
            at = end + 1
        elif code[at] == "extern" and code[at + 1 : at + 2] == ["{"]:  # the literal "C" was removed
            inside.append("extern")
            at += 2
        elif code[at] == "template" and code[at + 1 : at + 2] == ["<"]:
            at = past(code, at + 1)
        elif code[at] in ("class", "struct", "union", "enum"):
            name, end = class_head(code, at + 1)
            if name and "" not in inside:
                yield found[at][0], "::".join([*(space for space in inside if space != "extern"), name])
            at = max(end, at + 1)
        elif code[at] == "{":
            at = past(code, at)
        else:
            if code[at] == "}" and inside:
                inside.pop()
            at += 1


def repeated(files: list[Path], root: Path):
    """Yields classes that are defined twice. The linker uses one of two inline functions with the same name, including
    destructors, for both."""
    first: dict[str, Path] = {}
    for path in files:
        for number, name in classes(path.read_text()):
            if first.setdefault(name, path) != path:
                yield path, number, f"{name} is defined in {first[name].relative_to(root)} too"


def main(root: Path = ROOT) -> int:
    files = sorted(path for path in root.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))
    found = [(path, *problem) for path in files for problem in problems(path, root)]
    found += repeated(files, root)
    lines = [f"{path.relative_to(root.parent.parent)}:{number}: {what}" for path, number, what in found]
    print("\n".join(lines) or f"check_layers: {len(files)} files, every include is allowed")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
