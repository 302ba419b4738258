"""The package itself: its version check, its stubs, its command, its names."""

import ast
import importlib
import inspect
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from command_line import run_here

import torch_overlap as to
from torch_overlap import _C, _load

PACKAGE = Path(to.__file__).parent


def test_another_torch_is_refused_by_both_names() -> None:
    _load.check_version("2.11.0+cu130", "13.0", "2.11.0+cu130", "13.0")
    _load.check_version("2.11.0+cu130", "", "2.11.0+cpu", None)
    with pytest.raises(ImportError, match=r"expected torch 2\.11\.0\+cu130, .* got torch 2\.12\.0"):
        _load.check_version("2.11.0+cu130", "13.0", "2.12.0", "13.0")
    with pytest.raises(ImportError, match=r"expected a torch for CUDA 13\.0, .* for CUDA 12\.6"):
        _load.check_version("2.11.0+cu130", "13.0", "2.11.0+cu126", "12.6")
    with pytest.raises(ImportError, match=r"\(none\)"):
        _load.check_version("2.11.0+cu130", "13.0", "2.11.0+cpu", None)


def test_another_torch_than_the_tested_ones_is_warned_of_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tested in _load.TESTED_TORCH:
            _load.warn_of_untested(f"{tested}.1+cpu")
    with pytest.warns(UserWarning, match=r"expected torch .*2\.11.*tested with, got torch 2\.99\.0") as caught:
        _load.warn_of_untested("2.99.0")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch_overlap: expected torch")
        _load.warn_of_untested("2.99.0")


def test_all_names_are_there_and_sorted() -> None:
    assert to.__all__ == sorted(to.__all__)
    for name in to.__all__:
        assert hasattr(to, name), name
    assert to.__version__ == _C.build_config["version"]


def stub_names() -> dict[str, set[str]]:
    """Returns the top-level names of _C.pyi, each with its members (for a class: its own and those of its bases in
    the file)."""
    tree = ast.parse((PACKAGE / "_C.pyi").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    names: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            members: set[str] = set()
            for ancestor in [node, *(classes[b.id] for b in node.bases if isinstance(b, ast.Name) and b.id in classes)]:
                for item in ancestor.body:
                    if isinstance(item, ast.FunctionDef):
                        members.add(item.name)
                    elif isinstance(item, ast.AnnAssign | ast.Assign):
                        target = item.target if isinstance(item, ast.AnnAssign) else item.targets[0]
                        assert isinstance(target, ast.Name)
                        members.add(target.id)
            names[node.name] = members
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = set()
        elif isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, ast.Name)
            names[node.target.id] = set()
    return names


ONLY_TYPES = {"_Env", "_OpOptions"}
# Members that pybind11, enum and object give every class.
GIVEN = set(dir(object)) | {"__module__", "__getstate__", "__setstate__", "__eq__", "__ne__", "__hash__", "__repr__"}
GIVEN |= {"__dict__"}
# Attributes that torch_overlap.mesh.connect gives each object.
ATTRIBUTES = {"MeshComms": {"_specs", "_recipes", "_parts", "constant_name"}}


def test_the_stub_is_the_module() -> None:
    stub = stub_names()
    real = {name for name in dir(_C) if not name.startswith("__")} - {"_pybind11_conduit_v1_"}
    assert set(stub) - ONLY_TYPES == real
    for name in real:
        kind = getattr(_C, name)
        if not isinstance(kind, type) or issubclass(kind, BaseException) or hasattr(kind, "__members__"):
            continue
        base = kind.__mro__[1]
        inherited = set() if base.__name__ == "pybind11_object" else set(dir(base))
        members = {m for m in dir(kind) if m != "_pybind11_conduit_v1_"} - GIVEN - inherited
        missing = members - stub[name]
        assert not missing, f"{name}: not in _C.pyi: {sorted(missing)}"
        extra = stub[name] - set(dir(kind)) - ATTRIBUTES.get(name, set())
        assert not extra, f"{name}: only in _C.pyi: {sorted(extra)}"


def test_the_stub_has_the_methods_of_the_classes() -> None:
    """A line such as `send = collectives.send` of the stub names the function that the class has."""
    tree = ast.parse((PACKAGE / "_C.pyi").read_text())
    named = [(node.name, item.value) for node in tree.body if isinstance(node, ast.ClassDef) for item in node.body
             if isinstance(item, ast.Assign) and isinstance(item.value, ast.Attribute)]  # fmt: skip
    assert len(named) > 60
    for kind, value in named:
        module = importlib.import_module(f"torch_overlap._methods.{ast.unparse(value.value)}")
        assert inspect.unwrap(getattr(getattr(_C, kind), value.attr)) is getattr(module, value.attr), value.attr


def test_everything_public_is_documented() -> None:
    for name in to.__all__:
        member = getattr(to, name)
        if isinstance(member, type) or callable(member):
            assert (member.__doc__ or "").strip(), name
    for name in dir(to.TorchComm):
        if not name.startswith("_"):
            assert getattr(to.TorchComm, name).__doc__, name


@pytest.mark.smoke
def test_info_says_what_is_there() -> None:
    done = subprocess.run([sys.executable, "-m", "torch_overlap", "info"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for expected in (to.__version__, torch.__version__, "backends", "gloo", "GPU", "timeout"):
        assert expected in done.stdout


def test_an_unknown_command_says_which_there_are() -> None:
    done = run_here("fly")
    assert done.returncode == 2
    assert "info" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("plan", "--cost", "{}", "--ranks", "2"), ("tune", "--cache", "cache.json", "--results", "{}")],
    ids=lambda given: given[0],
)
def test_a_file_that_is_not_there_is_named(arguments: tuple[str, ...], tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.json")
    done = run_here(*(part.format(missing) for part in arguments))
    assert done.returncode == 2
    assert f"{arguments[0]}: expected a file that can be used, got {missing}: No such file" in done.stderr


@pytest.mark.smoke
def test_the_operators_are_loaded() -> None:
    assert torch.ops.torch_overlap.all_reduce is not None
