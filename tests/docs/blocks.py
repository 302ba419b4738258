"""The code blocks of README.md and docs/ as programs.

- A Python block that imports torch or torch_overlap as a whole begins a program. Another one continues the program
  before it, so that a reader can paste the blocks of a page one after the other.
- An `output` block after it is what rank 0 of the program prints.
- In a `console` block each line `$ ...` is a command, which is run if output follows and it starts torchrun or python.
- A comment before a block says how it differs: `<!-- needs: gpu -->` is compiled only, `<!-- needs: NAME -->` needs
  that package, `<!-- runs: process -->` is a program that starts its own ranks.
"""

from __future__ import annotations

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
    is_process: bool = False
    output: list[str] = field(default_factory=list)

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
            current = Program(page, line, needs=value if key == "needs" else None, is_process=key == "runs")
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
