#!/usr/bin/env python3
"""Checks that the names in README.md, CONTRIBUTING.md and the pages of docs/ exist: links, and in code style paths,
`make` targets and names of the package. Names are resolved by importing it; without a build they are skipped with a
notice."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md")
# A token with one of these suffixes is a file of the tree, even if only the end of its path is given.
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi", ".md", ".txt"}

# token -> the reason why it is valid, although the tree or the package does not have it
REASONS: dict[str, str] = {
    "_build_info.py": "the build writes it",
    "benchmarks/layer_ab.py": "the script of a result: benchmarks/layer.py with variants that it has since",
    "torch_overlap.backends": "a group of entry points of other packages",
    "torch_overlap.compile": "a logger",
    "torch_overlap.vllm": "a logger",
}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)
MAKE = re.compile(r"(?:^|[;&|(] *|\w=\S+ +)make((?: +[a-z][a-z-]*(?![\w=]))+)", re.M)
PATH = re.compile(r"(?<![\w/.~$<>{*-])\.?[A-Za-z_*][\w.*<>-]*(?:/[\w.*<>-]+)*/?")
NAME = re.compile(r"(?<![\w./-])(?:torch\.ops\.torch_overlap|torch_overlap|to)(?:\.[A-Za-z_]\w*)+")
RESULT = re.compile(r"[\w.*-]+-(?:h100|h200|cpu)[\w.*-]*\.json")


def tree(root: Path) -> set[str]:
    """Returns the files of the tree and their folders, relative to `root`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True)
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    if not names:
        paths = (path.relative_to(root) for path in root.rglob("*"))
        names = [str(path) for path in paths if path.parts[0] not in ("build", ".venv")]
    found = {name for name in names if (root / name).exists()}
    return found | {str(parent) for name in found for parent in PurePosixPath(name).parents}


def code_of(text: str) -> Iterator[tuple[int, str]]:
    """Yields the code of a page: its offset, and its text."""
    for match in FENCE.finditer(text):
        yield match.start(2), match.group(2)
    prose = FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    for match in SPAN.finditer(prose):
        yield match.start(1), match.group(1)


def is_missing_path(token: str, names: set[str]) -> bool:
    """Returns True if `token` must be a path of the tree and is not."""
    if token in REASONS:
        return False
    pattern = re.sub(r"<[^>]*>|\.\.\.", "*", token.rstrip("/"))
    first = pattern.split("/")[0]
    at_root = "/" in token and first in names and first != "build"
    if not at_root and PurePosixPath(pattern).suffix not in SUFFIXES and not RESULT.fullmatch(pattern):
        return False
    return not any(fnmatch(name, pattern) or fnmatch(name, f"*/{pattern}") for name in names)


def anchors(text: str) -> set[str]:
    titles = [re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(FENCE.sub("", text))]
    return {title.strip().replace(" ", "-") for title in titles}


def is_missing_link(target: str, page: Path) -> bool:
    if re.match(r"\w+:", target):
        return False
    name, _, anchor = target.partition("#")
    if "generated" in Path(name).parts:  # written by `make site`, which checks them
        return False
    path = page.parent / name if name else page
    return not path.exists() or bool(anchor and path.suffix == ".md" and anchor not in anchors(path.read_text()))


def targets_of(makefile: Path) -> set[str]:
    lines = makefile.read_text().splitlines() if makefile.exists() else []
    return {name for line in lines if re.match(r"[\w.-]+[\w .-]*:(?!=)", line) for name in line.split(":")[0].split()}


def faults_of(page: Path, names: set[str], targets: set[str], has_name: Callable[[str], bool]) -> Iterator[str]:
    text = page.read_text()
    found: list[tuple[int, str]] = [
        (match.start(), f"link to {match.group(1)}")
        for match in LINK.finditer(FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text))
        if is_missing_link(match.group(1), page)
    ]
    for start, code in code_of(text):
        for match in MAKE.finditer(code):
            unknown = [word for word in match.group(1).split() if word not in targets]
            found += [(start + match.start(), f"target {word} of make") for word in unknown[:1]]
        for match in PATH.finditer(code):
            if is_missing_path(match.group(), names):
                found.append((start + match.start(), f"path {match.group()}"))
        for match in NAME.finditer(code):
            if match.group() not in REASONS and not has_name(match.group()):
                found.append((start + match.start(), f"name {match.group()}"))
    for position, fault in sorted(found):
        yield f"{page.name}:{text.count(chr(10), 0, position) + 1}: {fault}: it is not there"


def resolver() -> Callable[[str], bool] | str:
    """Returns a predicate for names of the package, or the reason why there is none."""
    sys.path.insert(0, str(ROOT))
    try:
        importlib.import_module("torch_overlap")
    except Exception as error:
        return f"{type(error).__name__}: {error}"

    def has_name(name: str) -> bool:
        parts = re.sub(r"^to\.", "torch_overlap.", name).split(".")
        for length in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:length]))
            except ImportError as error:
                if not (error.name or "").startswith("torch_overlap"):
                    return True  # needs a package that is not installed, and cannot be looked at
                continue
            for part in parts[length:]:
                if not hasattr(found, part):
                    return False
                found = getattr(found, part)
            return True
        return False

    return has_name


def main(root: Path = ROOT, has_name: Callable[[str], bool] | None = None) -> int:
    names, targets = tree(root), targets_of(root / "Makefile")
    notice = ""
    if has_name is None:
        found = resolver()
        notice = f"; names of the package were skipped ({found})" if isinstance(found, str) else ""
        has_name = (lambda name: True) if isinstance(found, str) else found
    found_pages = [page for pattern in PAGES for page in sorted(root.glob(pattern))]
    pages = [page for page in found_pages if page.relative_to(root).as_posix() in names]  # not what a build writes
    faults = [fault for page in pages for fault in faults_of(page, names, targets, has_name)]
    print(*faults, f"check_docs: {len(pages)} pages, {len(faults)} errors{notice}", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
