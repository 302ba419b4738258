"""The pages of the reference that are written by hand have what the code knows. Others are generated from the code."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
from blocks import ROOT

BACKENDS = ROOT / "csrc" / "torch_overlap" / "comm" / "backends"
HINTS = {
    BACKENDS.parent / "options.cpp": r'k\w+Hints?(?:\[\])? = [{]?"([\w:]+)"',
    BACKENDS / "nccl" / "config.cpp": r'(?:^    \{|k\w+Hint = |take\(rest, )"(\w+)"',
    BACKENDS / "gloo" / "register.cpp": r'take\(hints, "(\w+)"\)',
    BACKENDS / "local" / "faults.cpp": r'"(local::\w+)"',
}


@pytest.mark.parametrize("source", HINTS, ids=lambda path: path.parent.name)
def test_the_page_of_hints_has_every_hint(source) -> None:
    known = re.findall(HINTS[source], source.read_text(), re.M)
    assert known
    page = (ROOT / "docs" / "reference" / "hints.md").read_text()
    assert [name for name in known if f"`{name}`" not in page] == []


def test_every_public_name_has_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "extensions"))
    pages = importlib.import_module("reference_pages")
    monkeypatch.delitem(sys.modules, "reference_pages")
    seen: dict[int, str] = {}
    texts = {name: pages.python_page(name, seen) for name in pages.MODULES}
    for name, text in texts.items():
        public = [n for n in importlib.import_module(name).__all__ if not n.startswith("__")]
        modules = {n for n in public if isinstance(getattr(importlib.import_module(name), n), type(sys))}
        assert [n for n in public if n not in modules and f"{name}.{n}\n" not in text and f"`{n}`" not in text] == []
    listed = (ROOT / "docs" / "reference" / "index.md").read_text()
    assert [name for name in texts if f"generated/{name}.md" not in listed] == []
