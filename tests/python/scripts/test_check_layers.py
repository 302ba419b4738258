"""scripts/check_layers.py, on small trees of its own."""

from __future__ import annotations

import runpy
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

main = runpy.run_path(str(Path(__file__).resolve().parents[3] / "scripts" / "check_layers.py"))["main"]


def check(tmp_path: Path, files: dict[str, str]) -> str:
    """Returns the output of the checker for a tree of these files; empty if it finds nothing."""
    root = tmp_path / "csrc" / "torch_overlap"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    with redirect_stdout(StringIO()) as printed:
        failed = main(root)
    return printed.getvalue() if failed else ""


PLAIN = "namespace a::b {\nstruct Lanes {\n  int x;\n};\n}  // namespace a::b\n"

SAME = {
    "plain": PLAIN,
    "nested namespaces": "namespace a {\nnamespace b { struct Lanes { int x; }; }\n}\n",
    "inline namespace": "namespace a::inline b {\nclass Lanes {};\n}\n",
    "brace on its own line": "namespace a::b\n{\nclass Lanes\n  : public Base<int>\n{\n};\n}\n",
    "template": "namespace a::b {\ntemplate <typename T, class U = Pair<T, T>>\nclass Lanes {};\n}\n",
    "template on one line": "namespace a::b { template <int N = (3)> struct Lanes { int x[N]; }; }\n",
    "macro": "namespace a::b {\nclass TORCH_OVERLAP_API Lanes {};\n}\n",
    "macro of arguments": 'namespace a::b {\nstruct __attribute__((visibility("default"))) Lanes {};\n}\n',
    "attribute": "namespace a::b {\nstruct [[nodiscard]] Lanes {};\n}\n",
    "alignment": "namespace a::b {\nstruct alignas(16) Lanes { int x; };\n}\n",
    "final": "namespace a::b {\nclass Lanes final : public Base {};\n}\n",
    "final alone": "namespace a::b {\nclass Lanes final {};\n}\n",
    "enum class": "namespace a::b {\nenum class Lanes : unsigned char { kOne };\n}\n",
    "union": "namespace a::b {\nunion Lanes { int x; float y; };\n}\n",
    "indented": "namespace a::b {\n\n  struct Lanes { int x; };\n}\n",
    "after using": "namespace a::b {\nusing Other = c::Lanes;\nusing namespace c; struct Lanes { int x; };\n}\n",
    "in an alias": "namespace a::b {\nusing Other = struct Lanes { int x; };\n}\n",
    "after a function": "namespace a::b {\ninline int f() { return 1'000; }\nstruct Lanes { int x; };\n}\n",
    "after a literal": 'namespace a::b {\ninline auto f() { return "}{" R"x(}")x" \'}\'; }\nstruct Lanes {};\n}\n',
    "after a comment": "namespace a::b {\n// }\n/* }\n} */\nstruct Lanes {};\n}\n",
    "after a directive": '#define OPEN "C" {\nnamespace a::b {\nstruct Lanes {};\n}\n',
    "linkage": 'extern "C" {\nnamespace a::b { struct Lanes { int x; }; }\n}\n',
}


@pytest.mark.parametrize("how", SAME)
@pytest.mark.parametrize("file", ["ops/own.h", "ops/own.cpp"])
def test_a_second_class_of_a_name_is_found(tmp_path: Path, how: str, file: str) -> None:
    printed = check(tmp_path, {"comm/lanes.h": PLAIN, file: SAME[how]})
    line = max(number for number, text in enumerate(SAME[how].split("\n"), 1) if "Lanes" in text)
    assert f"{file}:{line}: a::b::Lanes is defined in comm/lanes.h too" in printed


OTHERS = {
    "declared": "namespace a::b {\nstruct Lanes;\nclass Lanes final_;\nenum class Lanes : int;\n}\n",
    "another namespace": "namespace a {\nstruct Lanes {};\n}\nnamespace b {\nstruct Lanes {};\n}\n",
    "unnamed namespace": "namespace a::b {\nnamespace {\nstruct Lanes {};\n}\n}\n",
    "inside a class": "namespace a::b {\nclass Other {\n  struct Lanes {};\n};\n}\n",
    "inside a function": "namespace a::b {\ninline void f() {\n  struct Lanes {};\n}\n}\n",
    "of another class": "namespace a::b {\nstruct Other::Lanes {};\n}\n",
    "a parameter": "namespace a::b {\ntemplate <class Lanes> struct Other {};\n}\n",
    "an argument": "namespace a::b {\ninline int f(struct Lanes* x) { return 0; }\n}\n",
    "a result": "namespace a::b {\ninline struct Lanes f() { return {}; }\n}\n",
    "a base": "namespace a::b {\nstruct Other : Lanes { int x; };\n}\n",
    "a specialization": "namespace a::b {\ntemplate <>\nstruct Lanes<int> {};\n}\n",
    "in text": 'namespace a::b {\n// struct Lanes {};\nconst char* x = "struct Lanes {};";\n}\n',
    "an alias of a namespace": "namespace a::b = c;\nstruct Lanes {};\n",
}


@pytest.mark.parametrize("how", OTHERS)
def test_what_is_no_second_class_is_allowed(tmp_path: Path, how: str) -> None:
    assert check(tmp_path, {"comm/lanes.h": PLAIN, "ops/own.h": OTHERS[how]}) == ""


def test_a_specialization_is_defined_once(tmp_path: Path) -> None:
    special = "namespace std {\ntemplate <>\nstruct hash<a::Key> {};\n}\n"
    assert "std::hash<a::Key> is defined in comm/key.h too" in check(
        tmp_path, {"comm/key.h": special, "ops/key.h": special}
    )


def test_layers_are_held(tmp_path: Path) -> None:
    files = {"comm/x.h": '#include "torch_overlap/ops/y.h"\n', "ops/y.h": '#include "torch_overlap/base/z.h"\n'}
    assert "csrc/torch_overlap/comm/x.h:1: comm/ may not include ops/" in check(tmp_path, files)
