"""The classes of errors raised by methods and by operators."""

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


def test_an_error_inside_a_gradient_keeps_its_class() -> None:
    x = torch.ones(2, requires_grad=True)
    with to.new_comm("fake", "cpu", name="gone", rank=0, size=2) as comm:
        loss = to.ops.all_gather(x, comm).sum()
    with pytest.raises(to.StateError, match="expected a live communicator, got 'gone', which was finalized"):
        loss.backward()
