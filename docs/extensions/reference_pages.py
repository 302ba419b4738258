"""Sphinx extension that writes the pages of docs/reference/generated from the code, before each build.

- One page for each public Python package, with every name of its `__all__`.
- The command line, from the argument parsers.
- The public C++ headers, as they are.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

from docstrings import make_restructured, skip_member
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference" / "generated"

# One page each. A name that an earlier page has is not documented again.
MODULES = (
    "torch_overlap.ops",
    "torch_overlap.nn",
    "torch_overlap.nn.styles",
    "torch_overlap.mesh",
    "torch_overlap.mesh.communication",
    "torch_overlap.device_mesh",
    "torch_overlap.compat",
    "torch_overlap.gemm",
    "torch_overlap.quantize",
    "torch_overlap.objcol",
    "torch_overlap.hooks",
    "torch_overlap.flight_recorder",
    "torch_overlap.testing",
    "torch_overlap",
)
# Headers of LibTorch programs, in the order in which a reader needs them.
HEADERS = (
    "comm/torch_comm.h",
    "comm/work.h",
    "comm/window.h",
    "comm/options.h",
    "comm/reduce_op.h",
    "comm/registry.h",
    "comm/backends/local/spawn.h",
    "base/errors.h",
    "base/env.h",
    "ops/ops.h",
    "gemm/gemm.h",
    "gemm/quantize.h",
    "overlap/comm_overlap.h",
    "overlap/config.h",
    "overlap/registry.h",
    "symm/symmetric_memory.h",
    "comm/backend.h",
    "mesh/mesh.h",
    "mesh/layout.h",
    "mesh/plan.h",
    "mesh/cost.h",
)
CPP = """A program in C++ links `libtorch_overlap.so` and LibTorch, and includes these headers as
`torch_overlap/<path>`. `examples/cpp` is a complete program with its CMake project."""


def python_page(name: str, seen: dict[int, str]) -> str:
    """Returns the page of a module: its docstring and all its public names. `seen` has the page of each documented
    class and function by its id."""
    module = importlib.import_module(name)
    parts = [f"# {name}", f"```{{eval-rst}}\n.. py:module:: {name}\n```", prose(module)]
    elsewhere: dict[str, list[str]] = {}
    for public in sorted(module.__all__, key=lambda public: (public.lower(), public)):
        value = getattr(module, public)
        if inspect.ismodule(value) or public.startswith("__"):
            continue
        page = seen.setdefault(id(value), name) if callable(value) else name
        if page == name:
            parts.append(entry(f"{name}.{public}", value))
        else:
            elsewhere.setdefault(page, []).append(f"`{public}`")
    parts += [f"From [{page}]({page}.md): {', '.join(names)}." for page, names in sorted(elsewhere.items())]
    return "\n\n".join(part for part in parts if part) + "\n"


def prose(module: object) -> str:
    """Returns the docstring of a module as Markdown, which is what it is but for its indented code."""
    text = inspect.getdoc(module) or ""
    indented = re.compile(r"(?:^ {4}.*\n?(?:\n(?= {4}))?)+", re.M)
    return indented.sub(lambda m: f"```\n{inspect.cleandoc(m[0])}\n```\n", text).strip()


def entry(path: str, value: object) -> str:
    """Returns the autodoc directive of a public name."""
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        return f"```{{eval-rst}}\n.. {kind}:: {path}\n   :members:\n```"
    return f"```{{eval-rst}}\n.. {'autofunction' if callable(value) else 'autodata'}:: {path}\n```"


def command_page() -> str:
    """Returns the help of `python -m torch_overlap` and of each of its commands."""
    from torch_overlap.tools.cli import make_parser

    parser, commands = make_parser()
    parts = ["# Command line", f"```text\n{parser.format_help().strip()}\n```"]
    for name, command in commands.items():
        parts += [f"## {name}", f"```text\n{command.format_help().strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def header_page() -> str:
    """Returns the public headers with the first comment of each as a table, and their text."""
    rows, texts = [], []
    for header in HEADERS:
        path = ROOT / "csrc" / "torch_overlap" / header
        anchor = header.replace("/", "").replace(".", "")
        rows.append(f"| [{header}](#{anchor}) | {', '.join(f'`{name}`' for name in exported(path.read_text()))} |")
        texts.append(f"## {header}\n\n```{{literalinclude}} /../csrc/torch_overlap/{header}\n:language: c++\n```")
    table = "| header | exported |\n|---|---|\n" + "\n".join(rows)
    return "\n\n".join(["# C++", CPP, table, *texts]) + "\n"


def exported(text: str) -> list[str]:
    """Returns the classes and functions that a header exports, in order."""
    pattern = r"(?:class|struct) TORCH_OVERLAP_API (\w+)|TORCH_OVERLAP_API\s[^;(){}]*?\b(\w+)\("
    return list(dict.fromkeys(match[1] or match[2] for match in re.finditer(pattern, text)))


def write(name: str, text: str) -> None:
    """Writes a page, unless it is so already: Sphinx reads what has changed."""
    path = FOLDER / name
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def write_pages(app: Sphinx) -> None:
    FOLDER.mkdir(exist_ok=True)
    seen: dict[int, str] = {}
    pages = {f"{name}.md": python_page(name, seen) for name in MODULES}
    pages |= {"cli.md": command_page(), "cpp.md": header_page()}
    for path in FOLDER.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        write(name, text)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-docstring", make_restructured, priority=400)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
