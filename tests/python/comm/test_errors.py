"""The classes of errors, from methods and from operators."""

import builtins

import pytest
import torch

import torch_overlap as to


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("InvalidValueError", "ValueError"),
        ("InvalidTypeError", "TypeError"),
        ("OperationTimeoutError", "TimeoutError"),
        ("UnsupportedError", "NotImplementedError"),
        ("StateError", "RuntimeError"),
        ("Error", "RuntimeError"),
    ],
)
def test_every_error_is_a_runtime_error_and_its_builtin(name: str, builtin: str) -> None:
    kind = getattr(to, name)
    assert issubclass(kind, to.Error)
    assert issubclass(kind, RuntimeError)
    assert issubclass(kind, getattr(builtins, builtin))
    assert kind.__module__ == "torch_overlap"
    assert kind.__doc__


def test_an_error_inside_an_operator_keeps_its_class() -> None:
    with pytest.raises(to.InvalidValueError, match="no_such_comm"):
        torch.ops.torch_overlap.all_reduce(torch.ones(1), "sum", "no_such_comm", 1)
