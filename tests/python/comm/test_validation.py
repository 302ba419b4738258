"""A mistake raises before anything is sent, in one grammar, and leaves the communicator usable."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_overlap import Error, InvalidTypeError, InvalidValueError, ReduceOp, TorchComm, symmetric_empty
from torch_overlap.testing import run_ranks

Mistake = tuple[str, type[Error], Callable[[TorchComm, Tensor], object]]
SUM = ReduceOp.SUM
# Formats that move, and are not added up.
FOUR_BITS = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
EXPONENTS = torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def _pair(tensor: Tensor) -> list[Tensor]:
    return [tensor.clone(), tensor.clone()]


# What is wrong, the error, and the call. `x` is a good tensor of 4 floats; there are two ranks.
MISTAKES: list[Mistake] = [
    # ranks
    ("dst", InvalidValueError, lambda c, x: c.send(x, 2, False)),
    ("dst", InvalidValueError, lambda c, x: c.send(x, -1, True)),
    ("dst", InvalidValueError, lambda c, x: c.send(x, c.get_rank(), False)),
    ("src", InvalidValueError, lambda c, x: c.recv(x, 7, False)),
    ("root", InvalidValueError, lambda c, x: c.broadcast(x, 2, False)),
    ("root", InvalidValueError, lambda c, x: c.reduce(x, -1, SUM, False)),
    ("root", InvalidValueError, lambda c, x: c.gather(_pair(x), x, 2, False)),
    ("root", InvalidValueError, lambda c, x: c.gather_single(x, x, 2, False)),
    ("root", InvalidValueError, lambda c, x: c.scatter(x, _pair(x), 2, False)),
    # layout
    ("contiguous", InvalidValueError, lambda c, x: c.all_reduce(torch.ones(4, 4).t(), SUM, False)),
    ("contiguous", InvalidValueError, lambda c, x: c.send(torch.ones(4, 4)[:, 0], 1 - c.get_rank(), False)),
    ("contiguous", InvalidValueError, lambda c, x: c.all_gather([x, torch.ones(8)[::2]], x, False)),
    ("dense", InvalidTypeError, lambda c, x: c.broadcast(x.to_sparse(), 0, False)),
    ("plain memory", InvalidValueError, lambda c, x: c.broadcast(torch.ones(2, dtype=torch.cfloat).conj(), 0, False)),
    # device
    ("on cpu", InvalidTypeError, lambda c, x: c.all_reduce(x.to("meta"), SUM, False)),
    ("on cpu", InvalidTypeError, lambda c, x: c.all_gather_single(torch.ones(8, device="meta"), x, False)),
    # dtype
    ("dtype", InvalidTypeError, lambda c, x: c.all_gather(_pair(x.double()), x, False)),
    ("dtype", InvalidTypeError, lambda c, x: c.all_gather_single(torch.ones(8).half(), x, False)),
    ("dtype", InvalidTypeError, lambda c, x: c.reduce_scatter(x, _pair(x.int()), SUM, False)),
    ("dtype", InvalidTypeError, lambda c, x: c.all_to_all_single(x.int(), x, False)),
    ("dtype", InvalidTypeError, lambda c, x: c.all_reduce(x, ReduceOp.BAND, False)),
    ("dtype", InvalidTypeError, lambda c, x: c.all_reduce(x.bool(), ReduceOp.AVG, False)),
    ("dtype", InvalidTypeError, lambda c, x: c.all_reduce(x.int(), ReduceOp.PREMUL_SUM(2), False)),
    ("dtype", InvalidTypeError, lambda c, x: c.all_reduce(x, ReduceOp.PREMUL_SUM(x[:1].double()), False)),
    ("a number dtype", InvalidTypeError, lambda c, x: c.all_reduce(FOUR_BITS.to(x.device), SUM, True)),
    ("a number dtype", InvalidTypeError, lambda c, x: c.all_reduce(FOUR_BITS.to(x.device), ReduceOp.MAX, False)),
    ("a number dtype", InvalidTypeError, lambda c, x: c.reduce(EXPONENTS.to(x.device), 0, SUM, True)),
    # sizes
    ("2 tensors", InvalidValueError, lambda c, x: c.all_gather([x], x, False)),
    ("4 elements", InvalidValueError, lambda c, x: c.all_gather([x, torch.ones(5)], x, False)),
    ("8 elements", InvalidValueError, lambda c, x: c.all_gather_single(torch.ones(4), x, False)),
    ("elements", InvalidValueError, lambda c, x: c.all_gather_v([torch.ones(3)] * 2, x, False)),
    ("2 tensors", InvalidValueError, lambda c, x: c.reduce_scatter(x, [x] * 3, SUM, False)),
    ("4 elements", InvalidValueError, lambda c, x: c.reduce_scatter(x, [torch.ones(5)] * 2, SUM, False)),
    ("elements", InvalidValueError, lambda c, x: c.reduce_scatter_v(x, [torch.ones(5)] * 2, SUM, False)),
    ("8 elements", InvalidValueError, lambda c, x: c.reduce_scatter_single(x, x, SUM, False)),
    ("2 tensors", InvalidValueError, lambda c, x: c.scatter(x, [x], c.get_rank(), False)),
    ("2 tensors", InvalidValueError, lambda c, x: c.scatter(x, None, c.get_rank(), False)),
    ("2 tensors", InvalidValueError, lambda c, x: c.gather([x], x, c.get_rank(), False)),
    ("8 elements", InvalidValueError, lambda c, x: c.gather_single(x, x, c.get_rank(), False)),
    ("2 tensors", InvalidValueError, lambda c, x: c.all_to_all([], [x, x], False)),
    ("2 tensors", InvalidValueError, lambda c, x: c.all_to_all([x, x], [x], False)),
    ("elements", InvalidValueError, lambda c, x: c.all_to_all_single(torch.ones(2), x, False)),
    ("divisible", InvalidValueError, lambda c, x: c.all_to_all_single(torch.ones(3), torch.ones(3), False)),
    ("split sizes", InvalidValueError, lambda c, x: c.all_to_all_v_single(x, x, [4], [2, 2], False)),
    ("split sizes", InvalidValueError, lambda c, x: c.all_to_all_v_single(x, x, [2, 2], [2, 3], False)),
    ("split sizes", InvalidValueError, lambda c, x: c.all_to_all_v_single(x, x, [2, 2], [5, -1], False)),
    # options
    ("timedelta", InvalidTypeError, lambda c, x: c.all_reduce(x, SUM, False, timeout=5)),
    ("dict of strings", InvalidTypeError, lambda c, x: c.all_reduce(x, SUM, False, hints={"a": 1})),
    ("dict of strings", InvalidTypeError, lambda c, x: c.all_reduce(x, SUM, False, hints="fast")),
    ("AllReduceOptions", InvalidTypeError, lambda c, x: c.all_reduce(x, SUM, False, options=object())),
]


def run_mistakes(comm: TorchComm) -> None:
    device = comm.get_device()
    for number, (what, kind, call) in enumerate(MISTAKES):
        if device.type != "cpu" and what == "on cpu":
            continue
        x = torch.arange(4.0, device=device)
        kept = x.clone()
        with torch.device(device), pytest.raises(kind) as caught:
            call(comm, x)
        message = f"mistake {number}: {caught.value}"
        assert what in str(caught.value), message
        assert re.match(r"^[a-z_]+: expected .*, got ", str(caught.value), re.S), message
        assert isinstance(caught.value, RuntimeError), message
        assert isinstance(caught.value, ValueError if kind is InvalidValueError else TypeError), message
        assert torch.equal(x, kept), message
    comm.barrier(False).wait()


def test_mistakes_raise_at_once_and_send_nothing(any_backend: str, device: str) -> None:
    run_ranks(run_mistakes, 2, backend=any_backend, device=device)


def run_batch_mistakes(comm: TorchComm) -> None:
    x = torch.ones(3, device=comm.get_device())
    rank, peer = comm.get_rank(), 1 - comm.get_rank()
    with pytest.raises(InvalidValueError, match="batch_op_issue: expected at least one"):
        comm.batch_op_create().issue(False)
    for bad_peer in (-1, 2):
        batch = comm.batch_op_create()
        batch.send(x, peer)
        batch.recv(x, bad_peer)
        with pytest.raises(InvalidValueError, match=r"expected peer in \[0, 2\)"):
            batch.issue(True)
    batch = comm.batch_op_create()
    batch.send(x, rank)
    with pytest.raises(InvalidValueError, match="expected as many sends to this rank"):
        batch.issue(False)
    batch = comm.batch_op_create()
    batch.send(x.to("meta"), peer)
    with pytest.raises(InvalidTypeError, match="expected tensor on"):
        batch.issue(False)
    comm.barrier(False).wait()


def test_mistakes_in_a_batch_raise_at_issue(any_backend: str, device: str) -> None:
    run_ranks(run_batch_mistakes, 2, backend=any_backend, device=device)


def run_another_device(comm: TorchComm) -> None:
    other = torch.device("cuda", (comm.get_device().index + 1) % torch.cuda.device_count())
    for wrong in (torch.ones(2, device=other), torch.ones(2)):
        with pytest.raises(InvalidTypeError, match=f"expected tensor on {comm.get_device()}, got {wrong.device}"):
            comm.all_reduce(wrong, SUM, False)


class Wrapper(torch.Tensor):
    """A tensor whose elements are elsewhere, as DTensor's are."""

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
    is_alone = comm.get_backend() == "gloo"  # in its process: modes and maps are not for several threads at once
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
