"""Invalid arguments raise before anything is sent, with messages of one format, and leave the communicator usable."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_overlap import (
    BatchSendRecv,
    Error,
    InvalidTypeError,
    InvalidValueError,
    ReduceOp,
    TorchComm,
    symmetric_empty,
)
from torch_overlap.testing import run_ranks

Mistake = tuple[str, type[Error], Callable[[TorchComm, Tensor], object]]
SUM = ReduceOp.SUM
# Dtypes that can be moved but not reduced.
FOUR_BITS = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
EXPONENTS = torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def _each(comm: TorchComm, tensor: Tensor) -> list[Tensor]:
    """Returns one tensor for each rank."""
    return [tensor.clone() for _ in range(comm.get_size())]


def _too_many(comm: TorchComm, tensor: Tensor) -> list[Tensor]:
    return [*_each(comm, tensor), tensor]


def _first(comm: TorchComm, count: int) -> list[int]:
    """Returns split sizes that send all to rank 0."""
    return [count] + [0] * (comm.get_size() - 1)


def _next(comm: TorchComm) -> int:
    return (comm.get_rank() + 1) % comm.get_size()


# The argument at fault, the error, and the call. `x` is a valid tensor of 4 floats; `n` ranks have `all` of them.
MISTAKES: list[Mistake] = [
    # ranks
    ("dst", InvalidValueError, lambda c, x: c.send(x, c.get_size(), False)),
    ("dst", InvalidValueError, lambda c, x: c.send(x, -1, True)),
    ("dst", InvalidValueError, lambda c, x: c.send(x, c.get_rank(), False)),
    ("src", InvalidValueError, lambda c, x: c.recv(x, c.get_size() + 5, False)),
    ("root", InvalidValueError, lambda c, x: c.broadcast(x, c.get_size(), False)),
    ("root", InvalidValueError, lambda c, x: c.reduce(x, -1, SUM, False)),
    ("root", InvalidValueError, lambda c, x: c.gather(_each(c, x), x, c.get_size(), False)),
    ("root", InvalidValueError, lambda c, x: c.gather_single(x, x, c.get_size(), False)),
    ("root", InvalidValueError, lambda c, x: c.scatter(x, _each(c, x), c.get_size(), False)),
    # layout
    ("contiguous", InvalidValueError, lambda c, x: c.all_reduce(torch.ones(4, 4).t(), SUM, False)),
    ("contiguous", InvalidValueError, lambda c, x: c.send(torch.ones(4, 4)[:, 0], _next(c), False)),
    ("contiguous", InvalidValueError, lambda c, x: c.all_gather([*_each(c, x)[1:], torch.ones(8)[::2]], x, False)),
    ("dense", InvalidTypeError, lambda c, x: c.broadcast(x.to_sparse(), 0, False)),
    ("plain memory", InvalidValueError, lambda c, x: c.broadcast(torch.ones(2, dtype=torch.cfloat).conj(), 0, False)),
    # device
    ("on cpu", InvalidTypeError, lambda c, x: c.all_reduce(x.to("meta"), SUM, False)),
    ("on cpu", InvalidTypeError, lambda c, x: c.all_gather_single(torch.ones(8, device="meta"), x, False)),
    # dtype
    ("dtype", InvalidTypeError, lambda c, x: c.all_gather(_each(c, x.double()), x, False)),
    ("dtype", InvalidTypeError, lambda c, x: c.all_gather_single(torch.ones(8).half(), x, False)),
    ("dtype", InvalidTypeError, lambda c, x: c.reduce_scatter(x, _each(c, x.int()), SUM, False)),
    ("dtype", InvalidTypeError, lambda c, x: c.all_to_all_single(x.int(), x, False)),
    ("dtype", InvalidTypeError, lambda c, x: c.all_reduce(x, ReduceOp.BAND, False)),
    ("dtype", InvalidTypeError, lambda c, x: c.all_reduce(x.bool(), ReduceOp.AVG, False)),
    ("dtype", InvalidTypeError, lambda c, x: c.all_reduce(x.int(), ReduceOp.PREMUL_SUM(2), False)),
    ("dtype", InvalidTypeError, lambda c, x: c.all_reduce(x, ReduceOp.PREMUL_SUM(x[:1].double()), False)),
    ("a number dtype", InvalidTypeError, lambda c, x: c.all_reduce(FOUR_BITS.to(x.device), SUM, True)),
    ("a number dtype", InvalidTypeError, lambda c, x: c.all_reduce(FOUR_BITS.to(x.device), ReduceOp.MAX, False)),
    ("a number dtype", InvalidTypeError, lambda c, x: c.reduce(EXPONENTS.to(x.device), 0, SUM, True)),
    # sizes
    ("{n} tensors", InvalidValueError, lambda c, x: c.all_gather(_too_many(c, x), x, False)),
    ("4 elements", InvalidValueError, lambda c, x: c.all_gather([*_each(c, x)[1:], torch.ones(5)], x, False)),
    ("{all} elements", InvalidValueError, lambda c, x: c.all_gather_single(torch.ones(3), x, False)),
    ("elements", InvalidValueError, lambda c, x: c.all_gather_v(_each(c, torch.ones(3)), x, False)),
    ("{n} tensors", InvalidValueError, lambda c, x: c.reduce_scatter(x, _too_many(c, x), SUM, False)),
    ("4 elements", InvalidValueError, lambda c, x: c.reduce_scatter(x, _each(c, torch.ones(5)), SUM, False)),
    ("elements", InvalidValueError, lambda c, x: c.reduce_scatter_v(x, _each(c, torch.ones(5)), SUM, False)),
    ("{all} elements", InvalidValueError, lambda c, x: c.reduce_scatter_single(x, torch.ones(3), SUM, False)),
    ("{n} tensors", InvalidValueError, lambda c, x: c.scatter(x, _too_many(c, x), c.get_rank(), False)),
    ("{n} tensors", InvalidValueError, lambda c, x: c.scatter(x, None, c.get_rank(), False)),
    ("{n} tensors", InvalidValueError, lambda c, x: c.gather(_too_many(c, x), x, c.get_rank(), False)),
    ("{all} elements", InvalidValueError, lambda c, x: c.gather_single(torch.ones(3), x, c.get_rank(), False)),
    ("{n} tensors", InvalidValueError, lambda c, x: c.all_to_all([], _each(c, x), False)),
    ("{n} tensors", InvalidValueError, lambda c, x: c.all_to_all(_each(c, x), _each(c, x)[1:], False)),
    ("elements", InvalidValueError, lambda c, x: c.all_to_all_single(torch.ones(2), x, False)),
    ("split sizes", InvalidValueError, lambda c, x: c.all_to_all_v_single(x, x, [4] * 9, _first(c, 4), False)),
    ("split sizes", InvalidValueError, lambda c, x: c.all_to_all_v_single(x, x, _first(c, 4), _first(c, 5), False)),
    ("split sizes", InvalidValueError, lambda c, x: c.all_to_all_v_single(x, x, _first(c, 4), _first(c, -1), False)),
    # options
    ("timedelta", InvalidTypeError, lambda c, x: c.all_reduce(x, SUM, False, timeout=5)),
    ("dict of strings", InvalidTypeError, lambda c, x: c.all_reduce(x, SUM, False, hints={"a": 1})),
    ("dict of strings", InvalidTypeError, lambda c, x: c.all_reduce(x, SUM, False, hints="fast")),
    ("AllReduceOptions", InvalidTypeError, lambda c, x: c.all_reduce(x, SUM, False, options=object())),
]
# Three elements for an even number of ranks.
OF_EVEN: list[Mistake] = [
    ("divisible by {n}", InvalidValueError, lambda c, x: c.all_to_all_single(x[1:], x[:-1].clone(), False)),
]


def run_mistakes(comm: TorchComm) -> None:
    size, device = comm.get_size(), comm.get_device()
    for number, (what, kind, call) in enumerate(MISTAKES + ([] if size % 2 else OF_EVEN)):
        if device.type != "cpu" and what == "on cpu":
            continue
        x = torch.arange(4.0, device=device)
        kept = x.clone()
        with torch.device(device), pytest.raises(kind) as caught:
            call(comm, x)
        message = f"mistake {number}: {caught.value}"
        assert what.format(n=size, all=4 * size) in str(caught.value), message
        assert re.match(r"^[a-z_]+: expected .*, got ", str(caught.value), re.S), message
        assert isinstance(caught.value, RuntimeError), message
        assert isinstance(caught.value, ValueError if kind is InvalidValueError else TypeError), message
        assert torch.equal(x, kept), message
    comm.barrier(False).wait()


def test_mistakes_raise_at_once_and_send_nothing(any_backend: str, any_size: int, device: str) -> None:
    run_ranks(run_mistakes, any_size, backend=any_backend, device=device)


Add = Callable[[BatchSendRecv, TorchComm, Tensor], object]


def _to_itself(sent: Tensor, received: Tensor) -> Add:
    def add(batch: BatchSendRecv, comm: TorchComm, x: Tensor) -> None:
        batch.send(sent.to(x.device), comm.get_rank())
        batch.recv(received.to(x.device), comm.get_rank())

    return add


# Part of the message, the error, and the operation added to a batch that has a valid send and a valid receive.
MISTAKES_IN_A_BATCH: list[tuple[str, type[Error], Add]] = [
    ("peer in [0, {n}), got -1", InvalidValueError, lambda b, c, x: b.recv(x, -1)),
    ("peer in [0, {n}), got {n}", InvalidValueError, lambda b, c, x: b.send(x, c.get_size())),
    ("as many sends to this rank", InvalidValueError, lambda b, c, x: b.send(x, c.get_rank())),
    ("as many sends to this rank", InvalidValueError, lambda b, c, x: b.recv(x, c.get_rank())),
    ("tensor on ", InvalidTypeError, lambda b, c, x: b.send(x.to("meta"), _next(c))),
    ("tensor on ", InvalidTypeError, lambda b, c, x: b.recv(x.to("meta"), _next(c))),
    ("a contiguous tensor", InvalidValueError, lambda b, c, x: b.send(x.expand(3, 4), _next(c))),
    ("a contiguous tensor", InvalidValueError, lambda b, c, x: b.recv(x[::2], _next(c))),
    ("a dense tensor", InvalidTypeError, lambda b, c, x: b.send(x.to_sparse(), _next(c))),
    (
        "of dtype torch.float32, got torch.int32",
        InvalidTypeError,
        _to_itself(torch.ones(4), torch.ones(4, dtype=torch.int32)),
    ),
    ("of 4 elements, got 5", InvalidValueError, _to_itself(torch.ones(4), torch.ones(5))),
]
# Mistakes on a backend that moves data, in two ranks or more.
OVERLAPPING: list[Mistake] = [
    ("share no memory", InvalidValueError, lambda c, x: _exchange(c, x, x)),
    ("share no memory", InvalidValueError, lambda c, x: _exchange(c, x[:3], x[2:])),
    ("share no memory", InvalidValueError, lambda c, x: _exchange(c, x[2:], x[:3])),
    ("share no memory", InvalidValueError, lambda c, x: _exchange(c, x.clone(), x, x[3:])),
]


def _exchange(comm: TorchComm, sent: Tensor, *received: Tensor) -> None:
    batch = comm.batch_op_create()
    batch.send(sent, _next(comm))
    for tensor in received:
        batch.recv(tensor, (comm.get_rank() - 1) % comm.get_size())
    batch.issue(False).wait()


def run_batch_mistakes(comm: TorchComm) -> None:
    with pytest.raises(InvalidValueError, match="batch_op_issue: expected at least one"):
        comm.batch_op_create().issue(False)
    size, rank = comm.get_size(), comm.get_rank()
    for number, (what, kind, add) in enumerate(MISTAKES_IN_A_BATCH):
        x = torch.arange(4.0, device=comm.get_device())
        out = torch.full_like(x, 9)
        batch = comm.batch_op_create()
        batch.send(x, _next(comm))
        batch.recv(out, (rank - 1) % size)
        add(batch, comm, x)
        with pytest.raises(kind) as caught:
            batch.issue(bool(number % 2))
        message = f"mistake {number}: {caught.value}"
        assert str(caught.value).startswith("batch_op_issue: expected "), message
        assert what.format(n=size) in str(caught.value), message
        assert (out == 9).all(), message
    comm.barrier(False).wait()


def test_mistakes_in_a_batch_raise_at_issue(any_backend: str, any_size: int, device: str) -> None:
    run_ranks(run_batch_mistakes, any_size, backend=any_backend, device=device)


def run_overlapping(comm: TorchComm) -> None:
    x = torch.arange(4.0, device=comm.get_device())
    for what, kind, call in OVERLAPPING:
        with pytest.raises(kind, match=f"^batch_op_issue: expected .*{what}"):
            call(comm, x)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    _exchange(comm, x[:2], x[2:])  # adjacent
    assert x.tolist() == [0.0, 1.0, 0.0, 1.0]
    batch = comm.batch_op_create()
    for peer in (r for r in range(comm.get_size()) if r != comm.get_rank()):  # one tensor to many
        batch.send(x, peer)
        batch.recv(torch.empty_like(x), peer)
    batch.issue(True).wait()


@pytest.mark.sizes(2, 3)
def test_what_a_batch_receives_shares_no_memory(backend: str, size: int, device: str) -> None:
    run_ranks(run_overlapping, size, backend=backend, device=device)


def elsewhere(x: Tensor) -> Tensor:
    """Returns the same memory as another storage."""
    return torch.from_dlpack(x)


def run_shared_memory(comm: TorchComm) -> None:
    size, rank, device = comm.get_size(), comm.get_rank(), comm.get_device()
    whole = torch.arange(4.0 * size, device=device)
    before = whole.clone()
    mine, parts = whole.view(size, 4)[rank], list(whole.view(size, 4))
    next_part = elsewhere(parts[(rank + 1) % size])
    twice = [torch.zeros(4, device=device)] * size
    crossing = [elsewhere(torch.zeros(7, device=device))[3 * (r == 1) :][:4] for r in range(size)]
    memory = torch.zeros(7, device=device)
    crossing[:2] = [memory[:4], elsewhere(memory)[3:]]
    factor = ReduceOp.PREMUL_SUM(elsewhere(mine)[0])
    x = torch.ones(4, device=device)
    for call in (
        lambda: comm.all_gather_single(whole, next_part, False),
        lambda: comm.all_gather(parts, next_part, False),
        lambda: comm.all_gather_v(parts, next_part, False),
        lambda: comm.gather(parts if rank == 0 else [], next_part, 0, False) if rank == 0 else _overlap(),
        lambda: comm.gather_single(whole, next_part, 0, False) if rank == 0 else _overlap(),
        lambda: comm.reduce_scatter_single(next_part, whole, SUM, False),
        lambda: comm.reduce_scatter(next_part, parts, SUM, False),
        lambda: comm.reduce_scatter_v(next_part, parts, SUM, False),
        lambda: comm.scatter(next_part, parts, 0, False) if rank == 0 else _overlap(),
        lambda: comm.all_gather(twice, x, False),
        lambda: comm.all_gather_v(crossing, x, False),
        lambda: comm.gather(crossing, x, 0, False) if rank == 0 else _overlap(),
        lambda: comm.all_to_all(twice, parts, False),
        lambda: comm.all_reduce(mine, factor, False),
        lambda: comm.reduce_scatter_single(mine, before, factor, False),
    ):
        with pytest.raises(InvalidValueError, match=r"shares? no memory"):
            call()
    assert torch.equal(whole, before)
    # In place, also through another storage; and inputs that are one tensor.
    comm.all_gather_single(whole, elsewhere(mine), False)
    assert torch.equal(whole, before)
    comm.gather(parts if rank == 0 else [], elsewhere(mine), 0, False)
    comm.scatter(elsewhere(mine), parts if rank == 0 else [], 0, False)
    assert torch.equal(whole, before)
    comm.reduce_scatter_single(elsewhere(mine), whole, SUM, False)
    assert torch.equal(mine, before.view(size, 4)[rank] * size)
    comm.all_to_all([torch.empty_like(x) for _ in range(size)], [x] * size, False)
    moved = torch.arange(4.0 * size, device=device) + 100 * rank
    comm.all_to_all_single(elsewhere(moved), moved, False)
    want = torch.cat([4.0 * rank + torch.arange(4.0) + 100 * r for r in range(size)])
    assert torch.equal(moved.cpu(), want)


def _overlap() -> None:
    raise InvalidValueError("a root alone sees that it shares no memory")


@pytest.mark.sizes(2, 3)
def test_what_a_collective_writes_shares_no_memory(backend: str, size: int, device: str) -> None:
    run_ranks(run_shared_memory, size, backend=backend, device=device)


def run_another_device(comm: TorchComm) -> None:
    other = torch.device("cuda", (comm.get_device().index + 1) % torch.cuda.device_count())
    others = [torch.ones(2)] + [torch.ones(2, device=other)] * (other != comm.get_device())  # one GPU: no other
    for wrong in others:
        with pytest.raises(InvalidTypeError, match=f"expected tensor on {comm.get_device()}, got {wrong.device}"):
            comm.all_reduce(wrong, SUM, False)


class Wrapper(torch.Tensor):
    """A tensor whose elements are elsewhere, like DTensor's."""

    @staticmethod
    def __new__(cls) -> "Wrapper":
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32, device="cpu")  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise NotImplementedError(str(func))


def _resized(count: int) -> Tensor:
    x = torch.ones(4)
    x.untyped_storage().resize_(count)
    return x


def _refuse_without_memory(comm: TorchComm) -> None:
    peer = 1 - comm.get_rank()
    makers: list[Callable[[], Tensor]] = [
        lambda: _resized(0), lambda: _resized(12), lambda: torch._efficientzerotensor(4), Wrapper,
    ]  # fmt: skip
    is_alone = comm.get_backend() == "gloo"  # in its own process: modes and maps do not support several threads at once
    if is_alone:
        with FakeTensorMode():
            fake = torch.ones(4)
        makers.append(lambda: fake)
    calls: list[Callable[[Tensor], object]] = [
        lambda x: comm.all_reduce(x, SUM, False), lambda x: comm.send(x, peer, False),
        lambda x: comm.recv(x, peer, True), lambda x: comm.all_gather_single(torch.empty(8), x, False),
        lambda x: comm.all_gather([torch.empty(4), x], torch.ones(4), False),
        lambda x: comm.reduce_scatter_single(x, torch.empty(8), SUM, True),
    ]  # fmt: skip
    for make in makers:
        for call in calls:
            with pytest.raises(InvalidTypeError, match=r"^\w+: expected a tensor with memory of its own as "):
                call(make())
    if is_alone:
        with pytest.raises(InvalidTypeError, match=r"^all_reduce: expected a tensor with memory of its own as "):
            torch.vmap(lambda x: (comm.all_reduce(x, SUM, False), x)[1])(torch.ones(2, 4))
    good = torch.ones(4)
    comm.all_reduce(good, SUM, False)
    comm.all_reduce(torch.empty(0), SUM, False)
    assert good.tolist() == [2.0] * 4


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_tensors_without_memory_are_refused(backend: str) -> None:
    run_ranks(_refuse_without_memory, 2, backend=backend)


def _ask_for_more_than_there_is(comm: TorchComm) -> None:
    with pytest.raises(Error, match=r"expected at most the [0-9]+ bytes of memory of this machine, got"):
        symmetric_empty(1 << 50, torch.float32, comm)


def test_more_shared_memory_than_the_machine_has_is_an_error() -> None:
    run_ranks(_ask_for_more_than_there_is, 2, backend="gloo")


@pytest.mark.gpu(2)
def test_the_index_of_a_device_is_checked_too() -> None:
    run_ranks(run_another_device, 2, backend="nccl", device="cuda")
