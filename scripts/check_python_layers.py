#!/usr/bin/env python3
"""Checks the imports of the Python package: which package may import which, no circles, no private names of another
package, no import after the code of a module. See CONTRIBUTING.md.

`importlib.import_module` counts as an import, except in the `__getattr__` of a module: a name that is loaded on first
access may be of any package."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent / "torch_overlap"

# package -> packages that it may import, besides itself. Modules of torch_overlap/ itself are "core", except PATHS.
ARROWS = {
    "core": "_methods ops",
    "_methods": "core",
    "ops": "core",
    "nn": "core ops",
    "testing": "core ops",
    "mesh": "core ops nn",
    "compat": "core ops nn mesh",
    "jax": "core",  # by name, for gloo alone: the package works without torch
    "tools": "core ops nn testing mesh compat",
}
# module of torch_overlap/ that is only a path to another package -> the package
PATHS = {"__main__": "tools", "hooks": "compat"}


class Import(NamedTuple):
    module: str  # in dots, of this package
    name: str  # that is taken from it; empty: the module
    line: int
    is_late: bool  # in a function
    is_last: bool  # behind a statement that is neither an import nor an assignment of names


def modules(root: Path) -> dict[str, Path]:
    """Returns the modules of the package at `root`, by name in dots."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(path: Path, known: dict[str, Path], top: str) -> Iterator[Import]:
    """Yields the imports of modules of the package `top` by one module, but for those under `if TYPE_CHECKING`."""

    def visit(node: ast.AST, is_late: bool, is_last: bool) -> Iterator[Import]:
        seen_code = is_last
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    if alias.name.split(".")[0] == top:
                        yield Import(alias.name, "", child.lineno, is_late, seen_code)
            elif isinstance(child, ast.ImportFrom) and child.module and child.module.split(".")[0] == top:
                for alias in child.names:
                    whole = f"{child.module}.{alias.name}"
                    if whole in known or whole == f"{top}._C":
                        yield Import(whole, "", child.lineno, is_late, seen_code)
                    else:
                        yield Import(child.module, alias.name, child.lineno, is_late, seen_code)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if not (child.name == "__getattr__" and isinstance(node, ast.Module)):
                    yield from visit(child, True, False)
                seen_code |= isinstance(node, ast.Module)
            else:
                if (module := named_by_call(child)).split(".")[0] == top:
                    yield Import(module, "", child.lineno, is_late, seen_code)
                yield from visit(child, is_late, seen_code)
                seen_code |= isinstance(node, ast.Module) and isinstance(child, ast.ClassDef)

    yield from visit(ast.parse(path.read_text()), False, False)


def named_by_call(node: ast.AST) -> str:
    """Returns the module that a call of import_module names, as far as its text is constant; empty for another node."""
    if not (isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("import_module")):
        return ""
    name = node.args[0]
    if isinstance(name, ast.JoinedStr):
        name = name.values[0]
    return name.value.rstrip(".") if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""


def package_of(module: str, root: Path) -> str:
    parts = module.split(".")
    if len(parts) > 1 and (root / parts[1]).is_dir():
        return parts[1]
    return PATHS.get(parts[1], "core") if len(parts) > 1 else "core"


def circles(edges: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yields the strongly connected components of more than one module (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def connect(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(edges[module]):
            if other not in index:
                connect(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for module in sorted(edges):
        if module not in index:
            connect(module)
    yield from (component for component in found if len(component) > 1)


def main(root: Path = ROOT) -> int:
    known = modules(root)
    errors: list[str] = []
    edges: dict[str, set[str]] = {module: set() for module in known}
    for module, path in known.items():
        own = package_of(module, root)
        for found in imports(path, known, root.name):
            where = f"{path.relative_to(root.parent)}:{found.line}"
            other = package_of(found.module, root)
            if other != own and other not in ARROWS[own].split():
                errors.append(f"{where}: {own} may not import {other} (only {ARROWS[own] or 'torch'})")
            is_private = found.name.startswith("_") and not found.name.startswith("__")
            if is_private and other != own and found.module != f"{root.name}._C":
                errors.append(f"{where}: {found.name} is private to {found.module}")
            if found.is_last and not found.is_late:
                errors.append(f"{where}: the import comes after the code: move it up, or break the circle")
            if not found.is_late and found.module in known and found.module != module:
                edges[module].add(found.module)
    errors += [f"{', '.join(circle)}: import each other" for circle in circles(edges)]
    print("\n".join(errors) or f"check_python_layers: {len(known)} modules, every import is allowed")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
