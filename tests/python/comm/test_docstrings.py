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

import torch_overlap


def modules() -> list[str]:
    """Returns the public modules of the package, of torch_overlap.compat and of torch_overlap.tools."""
    names = ["torch_overlap"]
    for package in ("torch_overlap", "torch_overlap.compat", "torch_overlap.tools"):
        for found in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            needed = found.name.rpartition(".")[2]  # the package that a module of its name needs
            is_there = needed not in ("jax", "sglang", "vllm") or importlib.util.find_spec(needed) is not None
            if not found.name.rpartition(".")[2].startswith(("_", "lib")) and is_there:
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


# Methods that wait for other ranks, beside those that take async_op.
COLLECTIVE = ("split", "finalize", "reconfigure", "new_window", "tensor_register", "tensor_deregister", "wait",
              "wait_blocking")  # fmt: skip
OWNERS = (torch_overlap.TorchComm, torch_overlap.TorchWork, torch_overlap.TorchCommWindow,
          torch_overlap.BatchSendRecv)  # fmt: skip


def sections(what: Any) -> dict[str, str]:
    """Returns the text of each section of a docstring, by its title; that of the beginning by ""."""
    found, title = {"": ""}, ""
    for line in (inspect.getdoc(what) or "").splitlines():
        if re.fullmatch(r"(Args|Returns|Streams|Raises|Example):", line):
            title = line.removesuffix(":")
            assert title not in found, f"{title} is there twice"
            found[title] = ""
        else:
            found[title] += line + "\n"
    return found


def documented_arguments(section: str) -> list[str]:
    """Returns the names in "Args:"; one entry may be of several."""
    entries = re.findall(r"^    (\w+(?:, \w+)*): \S", section, re.MULTILINE)
    return [name for entry in entries for name in entry.split(", ")]


def methods() -> list[tuple[str, Any]]:
    named = [(f"{owner.__name__}.{name}", getattr(owner, name)) for owner in OWNERS for name in dir(owner)
             if not name.startswith("_") and inspect.isfunction(getattr(owner, name))]  # fmt: skip
    functions = [(name, getattr(torch_overlap, name)) for name in torch_overlap.__all__]
    return named + [(name, value) for name, value in functions if inspect.isfunction(value)]


@pytest.mark.parametrize(("name", "method"), methods(), ids=[name for name, _ in methods()])
def test_a_method_documents_each_argument_and_what_it_raises(name: str, method: Any) -> None:
    found = sections(method)
    parameters = [parameter for parameter in inspect.signature(method).parameters if parameter != "self"]
    assert sorted(documented_arguments(found.get("Args", ""))) == sorted(parameters)
    assert found[""].strip()[0].isupper()
    assert found[""].splitlines()[0].endswith(".")
    assert all(text.strip() for text in found.values())
    if "async_op" in parameters:
        assert {"Returns", "Streams", "Raises", "Example"} <= found.keys()
        assert "OperationTimeoutError: " in found["Raises"]
    if name.rpartition(".")[2] in COLLECTIVE:
        assert "Raises" in found
    for line in (method.__doc__ or "").splitlines():
        assert len(line) <= 120


def test_the_methods_are_found() -> None:
    names = [name for name, _ in methods()]
    assert {"TorchComm.all_reduce", "TorchWork.wait", "TorchCommWindow.put", "BatchSendRecv.issue", "new_comm"} <= {
        *names
    }
    assert len(names) > 75
    communicating = [name for name, method in methods() if "async_op" in inspect.signature(method).parameters]
    assert len(communicating) == 22
