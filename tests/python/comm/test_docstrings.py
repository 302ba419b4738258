"""Every public class, function, method and property has a docstring."""

import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest


def modules() -> list[str]:
    """Returns the public modules of the package, of torch_overlap.compat and of torch_overlap.tools."""
    names = ["torch_overlap"]
    for package in ("torch_overlap", "torch_overlap.compat", "torch_overlap.tools"):
        for found in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            is_optional = found.name == "torch_overlap.jax" and importlib.util.find_spec("jax") is None
            if not found.name.rpartition(".")[2].startswith(("_", "lib")) and not is_optional:
                names.append(found.name)
    return names


def public_modules() -> list[str]:
    """Returns the modules with public names; the command is the public part of bench."""
    return [name for name in modules() if getattr(importlib.import_module(name), "__all__", ())]


def text_of(what: Any) -> str:
    """Returns the object's own docstring, without the signatures that pybind11 and dataclasses write."""
    text = str(getattr(what, "__doc__", None) or "")
    name = re.escape(getattr(what, "__name__", "")) or r"\w+"
    signature = rf"(\d+\. )?{name}\(.*\)( -> .*)?|Overloaded function\."
    return "".join(line for line in text.splitlines() if not re.fullmatch(signature, line.strip())).strip()


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields the public methods and properties that the class has from this package."""
    for base in kind.__mro__:
        if not base.__module__.startswith("torch_overlap"):
            continue
        for name, value in vars(base).items():
            if name.startswith("_"):
                continue
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            if inspect.isroutine(value) or isinstance(value, property):
                yield f"{base.__qualname__}.{name}", value


def surface(module: ModuleType) -> Iterator[tuple[str, Any]]:
    yield module.__name__, module
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            yield f"{module.__name__}.{name}", value
            yield from members(value)
        elif inspect.isroutine(value):
            yield f"{module.__name__}.{name}", value


@pytest.mark.parametrize("module", modules())
def test_every_module_says_which_names_are_public(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []


def test_the_documented_modules_are_walked() -> None:
    documented = ("comm", "compat", "compat.comm_overlap", "compat.communication", "compat.hooks", "compat.options",
                  "device_mesh", "flight_recorder", "gemm", "hooks", "mesh", "nn", "objcol", "ops", "quantize",
                  "symmetric", "testing", "tools.cli", "tools.info", "tools.plan", "tools.tune")  # fmt: skip
    assert {f"torch_overlap.{name}" for name in documented} <= set(public_modules())


@pytest.mark.parametrize("module", public_modules())
def test_everything_public_has_a_docstring(module: str) -> None:
    walked = dict(surface(importlib.import_module(module)))
    assert len(walked) > 1
    assert [name for name, what in walked.items() if not text_of(what)] == []


def test_a_signature_alone_is_no_docstring() -> None:
    def written() -> None:
        """Says something."""

    def bare() -> None: ...

    bare.__doc__ = "bare(self: int, other: str) -> None\n"
    assert text_of(written) == "Says something."
    assert text_of(bare) == text_of(test_the_documented_modules_are_walked) == ""
