"""The code blocks of README.md and docs/ as programs.

- A Python block that imports torch or torch_overlap as a whole begins a program. Another one continues the program
  before it, so that a reader can paste the blocks of a page one after the other.
- An `output` block after it is what rank 0 of the program prints.
- In a `console` block each line `$ ...` is a command, which is run if output follows and it starts torchrun or python.
- A comment before a block says how it differs: `<!-- needs: gpu -->` is compiled only, and so is
  `<!-- runs: never -->`, a fragment whose functions have tests of their own; `<!-- needs: NAME -->` needs that package,
  `<!-- runs: process -->` is a program that starts its own ranks.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"(?:^<!-- (needs|runs): (\w+) -->\n)?^```(python|output|console)\n(.*?)^```$", re.M | re.S)
IMPORT = re.compile(r"^import torch(?:_overlap)?\b(?!\.)", re.M)


@dataclass
class Program:
    """Python blocks that are run as one program. `source` has the line numbers of the page."""

    page: str
    line: int
    source: str = ""
    needs: str | None = None
    runs: str | None = None
    output: list[str] = field(default_factory=list)

    @property
    def is_compiled_only(self) -> bool:
        return self.needs == "gpu" or self.runs == "never"

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    def add(self, line: int, text: str) -> None:
        self.source += "\n" * (line - 1 - self.source.count("\n")) + text


@dataclass
class Command:
    """A command of a console block, and the lines that it prints."""

    page: str
    line: int
    words: list[str]
    output: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def unimported(source: str, loaded: set[str]) -> set[str]:
    """Returns the modules that a program names (`torch.distributed.fsdp.fully_shard`) and neither imports nor has after
    `import torch, torch_overlap`, which load `loaded`. Other programs of the same process may hide that."""
    tree = ast.parse(source)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    found = set()
    for node in ast.walk(tree):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if (
            re.fullmatch(r"torch(\.\w+)+", name)
            and name not in loaded
            and importlib.util.find_spec(name.rpartition(".")[0])
        ):
            try:
                is_module = importlib.util.find_spec(name) is not None
            except ModuleNotFoundError:  # an attribute of something that is no package
                is_module = False
            if is_module and not any(other == name or other.startswith(f"{name}.") for other in imported):
                found.add(name)
    return found


def pages() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if "generated" not in path.parts]


def programs_of(path: Path) -> Iterator[Program]:
    text, page = path.read_text(), str(path.relative_to(ROOT))
    current: Program | None = None
    for match in FENCE.finditer(text):
        key, value, language, code = match.groups()
        line = text.count("\n", 0, match.start(4)) + 1
        if language == "console":
            continue
        if language == "output":
            assert current is not None, f"{page}:{line}: output of no program"
            current.output += code.splitlines()
            continue
        begins = IMPORT.search(code) is not None or key is not None
        assert begins or current is not None, (
            f"{page}:{line}: expected an import of torch or torch_overlap in the first block of the page"
        )
        if begins:
            if current is not None:
                yield current
            current = Program(
                page, line, needs=value if key == "needs" else None, runs=value if key == "runs" else None
            )
        assert current is not None
        current.add(line, code)
    if current is not None:
        yield current


def commands_of(path: Path) -> Iterator[Command]:
    text, page = path.read_text(), str(path.relative_to(ROOT))
    for match in FENCE.finditer(text):
        if match[3] != "console":
            continue
        first = text.count("\n", 0, match.start(4)) + 1
        current: Command | None = None
        for line, content in enumerate(match[4].splitlines(), first):
            if content.startswith("$ "):
                if current is not None and current.output:
                    yield current
                current = Command(page, line, content[2:].split())
            elif current is not None:
                current.output.append(content)
        if current is not None and current.output:
            yield current
