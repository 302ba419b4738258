"""torch.ops.torch_overlap.put, signal and wait_signal: values, tracing, compilation, errors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_overlap as to
from torch_overlap import TorchComm, ops
from torch_overlap.testing import run_ranks

raw = torch.ops.torch_overlap
COUNT = 500


def exchange(buffer: torch.Tensor, x: torch.Tensor, window: to.TorchCommWindow, right: int, left: int) -> torch.Tensor:
    """Returns the left neighbour's x times two, plus one; a signal that it was read is last."""
    ops.put(buffer, x * 2, window, right)
    ops.signal(buffer, window, right)
    ops.wait_signal(buffer, window, left)
    out = buffer + 1
    ops.signal(buffer, window, left)
    ops.wait_signal(buffer, window, right)
    return out


def run_exchange(comm: TorchComm, seed: int, backend: str | None) -> None:
    torch._dynamo.reset()
    rank, size = comm.get_rank(), comm.get_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    buffer = to.symmetric_empty(COUNT, torch.float32, comm)
    window = comm.new_window(buffer)
    call = exchange if backend is None else torch.compile(exchange, backend=backend, fullgraph=True)
    for step in range(5):
        x = torch.arange(COUNT, dtype=torch.float32) + seed % 100 + 10 * step
        out = call(buffer, x + rank, window, right, left)
        assert torch.equal(out, (x + left) * 2 + 1), step
    window.tensor_deregister()


@pytest.mark.parametrize(("which", "ranks"), [("gloo", 1), ("gloo", 2), ("gloo", 3), ("local", 3)])
def test_eager(which: str, ranks: int, seed: int) -> None:
    run_ranks(run_exchange, ranks, seed, None, backend=which)


@pytest.mark.inductor
def test_compiled(seed: int) -> None:
    run_ranks(run_exchange, 2, seed, "inductor", backend="gloo", timeout=540)


def run_changes(comm: TorchComm) -> None:
    """Compiles functions that change the window's tensor before a put, or read it before and after."""
    rank = comm.get_rank()
    buffer = to.symmetric_empty(COUNT, torch.float32, comm)
    window = comm.new_window(buffer)
    buffer.fill_(3)
    x = torch.arange(COUNT, dtype=torch.float32)

    def fill(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        buffer.fill_(0)
        ops.put(buffer, x, window, rank)
        return buffer + 1

    def before_and_after(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        before = buffer * 2
        ops.put(buffer, x, window, rank)
        return before + buffer

    def put_to_itself(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ops.put(buffer, torch.zeros_like(buffer), window, rank)
        ops.put(buffer, x[:4] + buffer[:4], window, rank)
        return buffer + 1

    for function in (fill, before_and_after):
        torch._dynamo.reset()
        with pytest.raises(to.InvalidValueError, match=r"put: expected x to be the tensor of window .* or a copy"):
            torch.compile(function, fullgraph=True)(buffer, x)
    torch._dynamo.reset()
    out = torch.compile(put_to_itself, fullgraph=True)(buffer, x)
    assert torch.equal(out, torch.cat([x[:4] + 1, torch.ones(COUNT - 4)]))
    window.tensor_deregister()


@pytest.mark.inductor
def test_a_compiled_function_changes_the_window_by_put_alone() -> None:
    run_ranks(run_changes, 2, backend="gloo", timeout=540)


def run_copying_compiler(comm: TorchComm) -> None:
    torch._dynamo.reset()
    buffer = to.symmetric_empty(COUNT, torch.float32, comm)
    window = comm.new_window(buffer)
    buffer.fill_(3)
    rank = comm.get_rank()

    def wait(buffer: torch.Tensor) -> torch.Tensor:
        ops.wait_signal(buffer, window, rank)
        return buffer + 1

    with pytest.raises(to.InvalidValueError, match=r"wait_signal: expected x to be the tensor of window .* copy"):
        torch.compile(wait, backend="aot_eager", fullgraph=True)(buffer)
    assert (buffer == 3).all()
    window.tensor_deregister()


def test_a_compiler_that_works_on_copies_is_refused() -> None:
    run_ranks(run_copying_compiler, 2, backend="gloo", timeout=540)


def run_fake_tensors(comm: TorchComm) -> None:
    """Checks the operators on a fake window tensor, which opcheck does not support."""
    buffer = to.symmetric_empty(8, torch.float32, comm)
    window = comm.new_window(buffer)
    with FakeTensorMode() as mode:
        x = mode.from_tensor(buffer)
        ops.put(x, torch.ones(3), window, 1, 5)
        ops.signal(x, window, 1)
        ops.wait_signal(x, window, 1)
    assert (buffer == 0).all()
    for name in ("put", "signal", "wait_signal"):
        schema = getattr(raw, name).default._schema
        assert schema.is_mutable
        assert schema.arguments[0].alias_info.is_write


def test_fake_tensors_and_schemas() -> None:
    run_ranks(run_fake_tensors, 2, backend="fake")


@pytest.mark.parametrize("name", ["put", "signal", "wait_signal"])
def test_opcheck(name: str) -> None:
    """On the meta device: on others opcheck passes copies, which these operators refuse."""
    x, source = torch.empty(8, device="meta"), torch.empty(3, device="meta")
    args = {"put": (x, source, 1, 5, "w"), "signal": (x, 1, "w"), "wait_signal": (x, 1, "w")}[name]
    results = torch.library.opcheck(getattr(raw, name).default, args)
    assert set(results.values()) == {"SUCCESS"}


def test_meta_kernels_need_no_window() -> None:
    x, source = torch.empty(8, device="meta"), torch.empty(3, device="meta")
    raw.put(x, source, 1, 5, "nobody's")
    raw.signal(x, 1, "nobody's")
    raw.wait_signal(x, 1, "nobody's")
    with pytest.raises(to.InvalidValueError, match="put: expected a rank >= 0 for dst, got -1"):
        raw.put(x, source, -1, 0, "nobody's")
    with pytest.raises(to.InvalidValueError, match="put: expected offset >= 0, got -2"):
        raw.put(x, source, 0, -2, "nobody's")
    with pytest.raises(to.InvalidTypeError, match="put: expected source of dtype"):
        raw.put(x, source.double(), 0, 0, "nobody's")


def run_errors(comm: TorchComm) -> None:
    buffer = to.symmetric_empty(8, torch.float32, comm)
    window = comm.new_window(buffer)
    name = window.get_name()
    with pytest.raises(to.InvalidValueError, match="get_window: expected the name of a live window"):
        raw.signal(buffer, 0, "nobody's")
    for other in (buffer.clone(), buffer[:4], buffer.view(2, 4), buffer.view(torch.int32)):
        with pytest.raises(to.InvalidValueError, match=f"signal: expected x to be the tensor of window '{name}'"):
            raw.signal(other, 0, name)
    with pytest.raises(to.UnsupportedError, match="put: expected a tensor that needs no gradient"):
        ops.put(buffer, torch.ones(3, requires_grad=True), window, 0)
    version = buffer._version
    ops.put(buffer, torch.ones(3), window, comm.get_rank())
    assert buffer._version == version + 1


def test_errors() -> None:
    run_ranks(run_errors, 2, backend="local")
