"""scripts/check_style.py: the language of comments and docstrings."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

module = runpy.run_path(str(Path(__file__).resolve().parents[3] / "scripts" / "check_style.py"))
bad_words = module["bad_words"]

CPP = """// Returns the rank.
// Of its group: a second line of the same comment.
int rank();  // {opening} it is
const char* text = "// Whether a string";  /* none */
"""
PYTHON = '''"""Returns the rank.

Of its group: not the first line."""


def rank():
    """{opening} it is."""
    return "# What a string"  # Number of ranks
'''


@pytest.mark.parametrize("opening", sorted(module["OPENINGS"]))
@pytest.mark.parametrize(
    ("name", "text", "line"), [("tests/a.h", CPP, 3), ("tests/a.py", PYTHON, 7)], ids=["cpp", "py"]
)
def test_openings(name: str, text: str, line: int, opening: str) -> None:
    (found,) = bad_words(name, text.replace("{opening}", opening))
    assert found[0] == line
    assert f"begins with '{opening}'" in found[1]
    assert list(bad_words(name, text.replace("{opening}", "Set if"))) == []


@pytest.mark.parametrize("word", ["kMostRanks", "kLeastBytes", "has_obstacles_", "so many", "told", "graveyard"])
def test_words_are_found_in_the_library_alone(word: str) -> None:
    text = f"int a;\n// Says {word}.\n"
    (found,) = bad_words("csrc/torch_overlap/a.h", text)
    assert found[0] == 2
    assert list(bad_words("tests/cpp/a.h", text)) == []
