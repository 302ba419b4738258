#!/usr/bin/env python3
"""Checks the plug-ins for inference engines against the signatures that they rely on.

    check_plugins.py                       compares them with the records in tests/python/compat/
    check_plugins.py --against FOLDER      compares plug-ins and records with packages in FOLDER, e.g. site-packages
    check_plugins.py --record FOLDER --package vllm --version 0.26.0 --commit ...     writes a record

Sources are read, nothing is imported: the packages need not be installed. A plug-in is read for what it uses of its
package: names that it imports, calls of them, methods that its classes override or call, attributes of `self` that only
a base class can have, and attributes of what is annotated with a class of the package.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "tests" / "python" / "compat"
# package -> the sources of its plug-in
PLUGINS = {
    "sglang": ["torch_overlap_sglang.py", "torch_overlap/compat/sglang.py"],
    "vllm": ["torch_overlap_vllm.py", "torch_overlap/compat/vllm"],
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Fact(NamedTuple):
    """A name, or a member of a class, as its source has it."""

    kind: str  # "module", "class", "function", "static", "attribute" or "value"
    text: str = ""  # parameters of a function, or the class of the package that an attribute has


class Parameters:
    """Parameters of a function, without annotations."""

    def __init__(self, signature: str, is_bound: bool = False) -> None:
        node = ast.parse(f"def f({signature}): ...").body[0]
        assert isinstance(node, ast.FunctionDef)
        args = node.args
        names = [arg.arg for arg in [*args.posonlyargs, *args.args]]
        self.optional = set(names[len(names) - len(args.defaults) :])
        pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
        self.optional |= {arg.arg for arg, default in pairs if default is not None}
        self.positional = names[1:] if is_bound else names
        self.keyword_only = [arg.arg for arg in args.kwonlyargs]
        self.has_args, self.has_kwargs = args.vararg is not None, args.kwarg is not None
        self.names = [*self.positional, *self.keyword_only]

    def call_fault(self, call: ast.Call) -> str | None:
        """Returns why the call does not fit, or None. A call with stars is taken to fit."""
        if any(isinstance(arg, ast.Starred) for arg in call.args) or any(word.arg is None for word in call.keywords):
            return None
        if len(call.args) > len(self.positional) and not self.has_args:
            return f"{len(call.args)} positional arguments for {len(self.positional)} parameters"
        given = set(self.positional[: len(call.args)])
        for word in call.keywords:
            if word.arg in given:
                return f"'{word.arg}' is passed twice"
            if word.arg not in self.names and not self.has_kwargs:
                return f"there is no parameter '{word.arg}'"
            given.add(str(word.arg))
        missing = [name for name in self.names if name not in given | self.optional]
        return f"'{missing[0]}' is not passed" if missing else None

    def override_fault(self, ours: Parameters) -> str | None:
        """Returns why a method with the parameters `ours` cannot replace one with these, or None.

        Callers pass arguments by position or by name, so names and their order must agree. Ours may have more
        parameters with defaults.
        """
        if ours.has_args and ours.has_kwargs:
            return None
        if ours.positional[: len(self.positional)] != self.positional:
            return f"parameters ({', '.join(ours.positional)}), not ({', '.join(self.positional)})"
        if (
            set(self.keyword_only) - set(ours.names)
            or self.has_args > ours.has_args
            or self.has_kwargs > ours.has_kwargs
        ):
            return "it takes fewer arguments"
        lacking = self.optional | (set(ours.names) - set(self.names))
        more = [name for name in ours.names if name in lacking - ours.optional]
        return f"'{more[0]}' has no default" if more else None


class Package:
    """Finds definitions in the sources of a package, through re-exports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._trees: dict[str, ast.Module | None] = {}

    def fact(self, name: str) -> Fact | None:
        """Returns the fact of a name in dots."""
        found = self._find(*name.rpartition(".")[::2])
        if found is None:
            is_module = self._path(name) is not None or self.folder.joinpath(*name.split(".")).is_dir()
            return Fact("module") if is_module else None
        if isinstance(found[1], Function):
            return Fact("function", ast.unparse(found[1].args))
        return Fact("class") if self._classes(name) else Fact("value")

    def member(self, name: str, member: str) -> Fact | None:
        """Returns the fact of a method or an attribute of the class `name`, or of one of its bases."""
        for module, node in self._classes(name):
            for statement in node.body:
                if isinstance(statement, Function) and statement.name == member:
                    decorators = {ast.unparse(decorator) for decorator in statement.decorator_list}
                    if "property" in decorators:
                        return Fact("attribute")
                    kind = "static" if "staticmethod" in decorators else "function"
                    return Fact(kind, ast.unparse(statement.args))
            for part in ast.walk(node):
                for target in _targets(part):
                    if ast.unparse(target) in (member, f"self.{member}"):
                        note = part.annotation if isinstance(part, ast.AnnAssign) else None
                        return Fact("attribute", self._class_of(module, note))
        return None

    def _path(self, module: str) -> Path | None:
        base = self.folder.joinpath(*module.split("."))
        return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)

    def _find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """Returns the module that defines `name` of `module`, and the definition; of several the last."""
        if module not in self._trees:
            path = self._path(module)
            self._trees[module] = ast.parse(path.read_text()) if path else None
        tree = self._trees[module]
        for node in reversed(list(_statements(tree.body))) if tree else ():
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                return module, node
            if any(isinstance(target, ast.Name) and target.id == name for target in _targets(node)):
                return module, node
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                if alias.name == "*" or (alias.asname or alias.name) == name:
                    origin = self._origin(module, node)
                    found = self._find(origin, name if alias.name == "*" else alias.name)
                    if found is not None:
                        return found
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path, parts = self._path(module), module.split(".")
        num_kept = len(parts) - node.level + (path is not None and path.name == "__init__.py")
        return ".".join([*parts[:num_kept], *([node.module] if node.module else [])])

    def _classes(self, name: str) -> list[tuple[str, ast.ClassDef]]:
        """Returns the class and its bases in the package. A name for one of two classes stands for the first."""
        found = self._find(*name.rpartition(".")[::2])
        if found is None:
            return []
        module, node = found
        if isinstance(node, ast.ClassDef):
            above = [self._classes(f"{module}.{base.id}") for base in node.bases if isinstance(base, ast.Name)]
            return [(module, node), *(one for classes in above for one in classes)]
        value = node.value if isinstance(node, ast.Assign) else None
        choice = value.body if isinstance(value, ast.IfExp) else value
        return self._classes(f"{module}.{choice.id}") if isinstance(choice, ast.Name) else []

    def _class_of(self, module: str, annotation: ast.expr | None) -> str:
        for part in _alternatives(annotation):
            if isinstance(part, ast.Name) and self._classes(f"{module}.{part.id}"):
                where, node = self._classes(f"{module}.{part.id}")[0]
                return f"{where}.{node.name}"
        return ""


class Record:
    """Facts of a package that were recorded."""

    def __init__(self, path: Path) -> None:
        self.content = json.loads(path.read_text())

    def _of(self, kind: str, name: str) -> Fact | None:
        text = self.content[kind].get(name)
        return None if text is None else Fact(*text.split(" ", 1))

    def fact(self, name: str) -> Fact | None:
        return self._of("names", name)

    def member(self, name: str, member: str) -> Fact | None:
        return self._of("members", f"{name}.{member}")

    def differences(self, package: Package) -> Iterator[str]:
        """Yields what differs in a package, annotations and defaults aside."""
        for name in self.content["names"]:
            yield from _difference(name, self.fact(name), package.fact(name))
        for name in self.content["members"]:
            owner, _, member = name.rpartition(".")
            yield from _difference(name, self.member(owner, member), package.member(owner, member))


def _difference(name: str, wanted: Fact | None, found: Fact | None) -> Iterator[str]:
    assert wanted is not None
    if found is None or found.kind != wanted.kind:
        yield f"{name}: expected kind '{wanted.kind}', as recorded, got {found.kind if found else 'nothing'}"
    elif wanted.kind in ("function", "static"):
        old, new = Parameters(wanted.text), Parameters(found.text)
        if vars(old) != vars(new):
            yield f"{name}: expected ({wanted.text}), as recorded, got ({found.text})"


class Recorder:
    """Facts of a package, of which those that are asked for are kept."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self.facts: dict[str, dict[str, str]] = {"names": {}, "members": {}}

    def fact(self, name: str) -> Fact | None:
        return self._keep("names", name, self.package.fact(name))

    def member(self, name: str, member: str) -> Fact | None:
        return self._keep("members", f"{name}.{member}", self.package.member(name, member))

    def _keep(self, kind: str, name: str, found: Fact | None) -> Fact | None:
        if found is not None:
            self.facts[kind][name] = " ".join(found).strip()
        return found


Facts = Package | Record | Recorder


def _targets(node: ast.AST) -> list[ast.expr]:
    """Returns the targets of an assignment, those of a tuple one by one."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]


def _alternatives(annotation: ast.expr | None) -> list[ast.expr]:
    """Returns the parts of an annotation `A | B`; those of another one are itself."""
    if isinstance(annotation, ast.BinOp):
        return [*_alternatives(annotation.left), *_alternatives(annotation.right)]
    return [] if annotation is None else [annotation]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module, also those under `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements([*node.orelse, *node.body])
        elif isinstance(node, ast.Try):
            yield from _statements([*node.body, *node.orelse])


class Reader:
    """Reads one source of a plug-in and yields what does not fit the facts of its package."""

    def __init__(self, package: str, path: Path, facts: Facts) -> None:
        self.package, self.path, self.facts = package, path, facts
        self.names: dict[str, str] = {}  # local name -> name in dots
        self.faults: list[str] = []

    def read(self) -> list[str]:
        tree = ast.parse(self.path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == self.package:
                for alias in node.names:
                    self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    if self.facts.fact(f"{node.module}.{alias.name}") is None:
                        self._fault(node, f"{node.module} has no '{alias.name}'")
            elif isinstance(node, ast.Import) and any(a.name.split(".")[0] == self.package for a in node.names):
                self.names[self.package] = self.package
        self._visit(tree, {}, "")
        return self.faults

    def _fault(self, node: ast.AST, text: str) -> None:
        self.faults.append(f"{self.path.name}:{getattr(node, 'lineno', 0)}: {text}")

    def _dotted(self, node: ast.expr) -> str:
        """Returns the name in dots of an expression that is a name of the package, otherwise an empty string."""
        parts = ast.unparse(node).split(".") if isinstance(node, ast.Name | ast.Attribute) else [""]
        return ".".join([self.names[parts[0]], *parts[1:]]) if parts[0] in self.names else ""

    def _class_of(self, annotation: ast.expr | None) -> str:
        """Returns the class of the package that an annotation names, alone or beside None."""
        return next((name for name in map(self._dotted, _alternatives(annotation)) if name), "")

    def _type_of(self, node: ast.expr, types: dict[str, str], base: str) -> str:
        """Returns the class of the package that an expression has, as far as annotations tell."""
        if isinstance(node, ast.Name):
            return base if node.id == "self" else types.get(node.id, "")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super":
            return base
        if isinstance(node, ast.Attribute):
            owner = self._type_of(node.value, types, base)
            found = self.facts.member(owner, node.attr) if owner else None
            return found.text if found is not None and found.kind == "attribute" else ""
        return ""

    def _visit(self, node: ast.AST, types: dict[str, str], base: str) -> None:
        if isinstance(node, ast.ClassDef):
            base = next((name for name in map(self._dotted, node.bases) if name), "")
            self._check_class(node, base)
        elif isinstance(node, Function):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            notes = [(arg.arg, arg.annotation) for arg in arguments]
            notes += [(part.target.id, part.annotation) for part in ast.walk(node)
                      if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)]  # fmt: skip
            types = {**types, **{name: self._class_of(note) for name, note in notes}}
            self._add_assigned(node, types, base)
        elif isinstance(node, ast.Call):
            self._check_call(node, types, base)
        elif isinstance(node, ast.Attribute):
            self._check_attribute(node, types, base)
        for child in ast.iter_child_nodes(node):
            self._visit(child, types, base)

    def _add_assigned(self, node: ast.AST, types: dict[str, str], base: str) -> None:
        """Adds the types of local names that are assigned once, in the order of the source."""
        for part in ast.walk(node):
            if isinstance(part, ast.Assign):
                values = part.value.elts if isinstance(part.value, ast.Tuple) else [part.value]
                for target, value in zip(_targets(part), values, strict=False):
                    if isinstance(target, ast.Name):
                        types.setdefault(target.id, self._type_of(value, types, base))

    def _check_class(self, node: ast.ClassDef, base: str) -> None:
        for method in node.body if base else ():
            if isinstance(method, Function) and (found := self.facts.member(base, method.name)) is not None:
                fault = Parameters(found.text).override_fault(Parameters(ast.unparse(method.args)))
                if found.kind == "attribute" or fault is not None:
                    self._fault(method, f"{node.name}.{method.name} overrides {base}: {fault or 'an attribute'}")

    def _check_call(self, node: ast.Call, types: dict[str, str], base: str) -> None:
        name, func = self._dotted(node.func), node.func
        owner, member, found = "", "", None
        if name:
            found = self.facts.fact(name)
            owner, member = (name, "__init__") if found is not None and found.kind == "class" else ("", "")
        elif isinstance(func, ast.Name) and types.get(func.id):
            owner, member = types[func.id], "__call__"
        elif isinstance(func, ast.Attribute):
            owner, member = self._type_of(func.value, types, base), func.attr
        if owner:
            found = self.facts.member(owner, member)
        if found is not None and found.kind in ("function", "static"):
            fault = Parameters(found.text, bool(owner) and found.kind == "function").call_fault(node)
            if fault is not None:
                self._fault(node, f"call of {name or f'{owner}.{member}'}: {fault}")

    def _check_attribute(self, node: ast.Attribute, types: dict[str, str], base: str) -> None:
        name = self._dotted(node)
        if name and self.facts.fact(name) is None:
            owner, _, member = name.rpartition(".")
            if self.facts.member(owner, member) is None:
                self._fault(node, f"{owner} has no '{member}'")
        owner = self._type_of(node.value, types, base)
        is_ours = owner == base and node.attr in self.own_members
        if owner and not is_ours and self.facts.member(owner, node.attr) is None:
            self._fault(node, f"{owner} has no '{node.attr}'")

    @functools.cached_property
    def own_members(self) -> set[str]:
        """Returns the names that classes of this source define, in their bodies or on `self`."""
        found: set[str] = set()
        for node in ast.walk(ast.parse(self.path.read_text())):
            if isinstance(node, ast.ClassDef):
                found |= {part.name for part in node.body if isinstance(part, Function)}
                targets = [target for part in ast.walk(node) for target in _targets(part)]
                found |= {ast.unparse(target).removeprefix("self.") for target in targets}
        return found


def faults_of(package: str, facts: Facts, sources: list[Path] | None = None) -> list[str]:
    """Returns what of a plug-in does not fit the facts of its package."""
    if sources is None:
        roots = [ROOT / name for name in PLUGINS[package]]
        sources = [path for root in roots for path in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    return [fault for path in sources for fault in Reader(package, path, facts).read()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--package", choices=PLUGINS, help="default: all")
    parser.add_argument("--version", default="")
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    packages = [options.package] if options.package else list(PLUGINS)
    faults = []
    for package in packages:
        path = RECORDS / f"{package}_signatures.json"
        if options.record is not None:
            recorder = Recorder(Package(options.record))
            faults += faults_of(package, recorder)
            content = {"package": package, "version": options.version, "commit": options.commit}
            path.write_text(json.dumps({**content, **recorder.facts}, indent=1, sort_keys=True) + "\n")
        elif options.against is not None:
            faults += faults_of(package, Package(options.against))
            faults += Record(path).differences(Package(options.against))
        else:
            faults += faults_of(package, Record(path))
    print("\n".join(faults) or f"check_plugins: {', '.join(packages)}: the signatures are those that the plug-ins use")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
