#!/usr/bin/env python3
"""Checks the size of files and the language of comments and docstrings: check_style.py [file...].

A file of more than 400 lines gets a warning; more than 600 are an error unless REASONS lists it. Comments and
docstrings are sentences in the terms of the field (docs/glossary.md): OPENINGS and WORDS list the habits that are
errors, each with the remedy.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARN, FAIL = 400, 600
CPP = {".h", ".cpp", ".cu", ".cuh"}
SUFFIXES = CPP | {".py", ".pyi"}

# path -> why it is one file
REASONS: dict[str, str] = {
    "torch_overlap/_C.pyi": "a compiled module has one stub",
}

# First word of a comment or docstring -> what to write instead.
OPENINGS = {
    "Of": "name the thing: 'Number of ...', 'Parameters of ...'",
    "What": "name the thing, or begin with a verb: 'Returns ...'",
    "Whether": "write 'True if ...'",
    "So": "write a sentence of its own",
    "As": "write a sentence of its own",
}
# Pattern -> the term of the field. Checked in code, comments and messages of csrc/ and torch_overlap/.
WORDS = {
    r"\bkMost[A-Z]\w*": "kMax...",
    r"\bkLeast[A-Z]\w*": "kMin...",
    r"(?i)\w*obstacle\w*": "unsupported_reason",
    r"(?i)\bso (?:many|much)\b": "the quantity, with its unit",
    r"(?i)\b(?:un)?told\b": "'notified', 'signalled', or the flag that is set",
    r"(?i)\w*(?:graveyard|coffin|bury|buried)\w*": "deferred deletion",
    r"\b\w*Lanes\b|\b(?:single|compute|comm)_lanes?\b": "streams (overlap/), task queues (comm/host/)",
    r"\b(?:Overlap|Gemm|Lt|Quantize|Dequantize)Call\b": "...Args or ...Options: a Call is a communicator's operation",
    r"\bas_trace_constant\b|\bTraceConstant\b": "as_dynamo_constant, DynamoConstant: trace() is the planner's",
    r"\bWorkPtr (?:\w+::)?launch\w*\(": "issue: operations are issued, kernels are launched",
    r"\bput_(?:copy|barrier|sums|all_gather|reduce_scatter)\w*\(": "enqueue_... or store_...: a put writes to a window",
    r"(?i)\bcomes? to it\b": "'reaches', 'calls'",
}

COMMENT_CPP = re.compile(
    r'R"([^\s()\\]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'|(?P<comment>//[^\n]*)', re.S
)


def comments_of_cpp(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line number and first line of each comment. Consecutive lines of comment are one comment."""
    last = -1  # line of the previous comment
    for match in COMMENT_CPP.finditer(text):
        if not match["comment"]:
            continue
        line = text.count("\n", 0, match.start()) + 1
        alone = not text[text.rfind("\n", 0, match.start()) + 1 : match.start()].strip()
        if not (alone and last == line - 1):
            yield line, match["comment"].lstrip("/ ")
        last = line


def comments_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line number and first line of each comment and docstring."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if last != line - 1:
            yield line, token.string.lstrip("# ")
        last = line
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring.split("\n", 1)[0]


def bad_words(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yields the line number and the message of each error of language in a file."""
    path = Path(name)
    comments = comments_of_cpp if path.suffix in CPP else comments_of_python
    for line, comment in comments(text):
        word = re.match(r"\w*", comment)
        if word and word[0] in OPENINGS:
            yield line, f"comment begins with '{word[0]}': {OPENINGS[word[0]]}"
    if name.startswith(("csrc/", "torch_overlap/")):
        for pattern, instead in WORDS.items():
            for match in re.finditer(pattern, text):
                yield text.count("\n", 0, match.start()) + 1, f"'{match[0]}': write {instead}"


def main(names: list[str]) -> int:
    if not names:
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
        names = listed or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
        names = [name for name in names if not name.startswith(("build/", ".venv/"))]
        names = [name for name in names if Path(name).suffix in SUFFIXES and (ROOT / name).is_file()]
    texts = {name: (ROOT / name).read_text() for name in names}
    errors = 0
    for name, text in sorted(texts.items(), key=lambda item: -item[1].count("\n")):
        lines = text.count("\n")
        if lines > FAIL and name not in REASONS:
            print(f"{name}: {lines} lines, at most {FAIL}: split it, or give its reason in scripts/check_style.py")
            errors += 1
        elif lines > WARN:
            print(f"{name}: warning: {lines} lines ({REASONS.get(name, 'is it one idea?')})")
    for name, text in texts.items():
        for line, message in bad_words(name, text):
            print(f"{name}:{line}: {message}")
            errors += 1
    for name in REASONS:
        if not (ROOT / name).is_file():
            print(f"scripts/check_style.py: {name} is listed but does not exist")
            errors += 1
    print(f"check_style: {len(texts)} files, {errors} errors")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
