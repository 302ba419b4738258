"""Docstrings of the package as reStructuredText: they are written as Markdown, with code that is only indented."""

from __future__ import annotations

import re
from typing import Any

# A line that begins a section for napoleon, not code.
SECTION = re.compile(r"(Args|Arguments|Attributes|Example|Examples|Note|Raises|Returns|Yields|Warning):\s*$")
# Characters that reStructuredText would read as markup, outside of backticks.
MARKUP = re.compile(r"(`[^`]*`)|(?<=\w)_(?!\w)|[*|\\]")


def skip_member(app: Any, what: str, name: str, value: object, skip: bool, options: Any) -> bool | None:
    """Leaves out the methods that `Sharded` has from torch.Tensor."""
    doc = getattr(value, "__doc__", None)
    return True if isinstance(doc, str) and doc.startswith("torch.Tensor.") else None


def make_restructured(app: Any, what: str, name: str, value: object, options: Any, lines: list[str]) -> None:
    """Escapes markup, and makes code blocks of indented lines that follow a paragraph."""
    result: list[str] = []
    paragraph, is_code = "", False  # the last line that is not indented, and True below it if it is followed by code
    for line in lines:
        indented = line.startswith("    ")
        if not line.strip():
            result.append(line)
            continue
        if not indented:
            paragraph, is_code = line, False
        elif not is_code and paragraph and not SECTION.match(paragraph) and not paragraph.startswith(("- ", "* ")):
            is_code = True
            result += ["", ".. code-block:: python", ""]
        result.append(line if is_code else MARKUP.sub(lambda m: m[1] or "\\" + m[0], line))
    lines[:] = [*result, ""]
