"""The published TorchComm API page, block by block: each code block is one test, in its order.

A block that shows a signature is called with its documented argument names; an example runs as it is written, with
torch_overlap.compat.torchcomms for torchcomms, on gloo with the CPU for cuda, and on nccl if there are two GPUs. If the
page is wrong, the test names the correction.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_overlap
import torch_overlap.compat.torchcomms as torchcomms
from torch_overlap import ReduceOp, TorchComm
from torch_overlap.testing import run_ranks

# The page's code blocks: the first line of a signature, the title of an example.
BLOCKS = (
    "import torchcomms",
    "torchcomms.new_comm(backend, device, ...)",
    "finalize()",
    "get_rank()",
    "get_size()",
    "send(tensor, dst, async_op, hints=None, timeout=None)",
    "recv(tensor, src, async_op, hints=None, timeout=None)",
    "broadcast(tensor, root, async_op, hints=None, timeout=None)",
    "all_reduce(tensor, op, async_op, hints=None, timeout=None)",
    "reduce(tensor, root, op, async_op, hints=None, timeout=None)",
    "all_gather(tensor_list, tensor, async_op, hints=None, timeout=None)",
    "all_gather_single(output, input, async_op, hints=None, timeout=None)",
    "reduce_scatter(output, input_list, op, async_op, hints=None, timeout=None)",
    "reduce_scatter_single(output, input, op, async_op, hints=None, timeout=None)",
    "all_to_all_single(output, input, async_op, hints=None, timeout=None)",
    "all_to_all(output_tensor_list, input_tensor_list, async_op, hints=None, timeout=None)",
    "all_to_all_v_single(output, input, output_split_sizes, input_split_sizes, async_op, hints=None, timeout=None)",
    "barrier(async_op, hints=None, timeout=None)",
    "scatter(output_tensor, input_tensor_list, root, async_op, hints=None, timeout=None)",
    "gather(output_tensor_list, input_tensor, root, async_op, hints=None, timeout=None)",
    "split(ranks)",
    "is_completed()",
    "wait()",
    "Basic Usage",
    "Asynchronous Operations",
    "CUDA Graphs",
    "Custom Options",
)
OPTIONAL: dict[str, Any] = {"hints": {}, "timeout": timedelta(seconds=60)}

Body = Callable[[TorchComm], None]


@pytest.fixture(params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu(2))])
def run(request: pytest.FixtureRequest) -> Callable[[Body], None]:
    """Runs a block on two ranks."""
    device = "cuda" if request.param == "nccl" else "cpu"

    def run_body(body: Body) -> None:
        run_ranks(body, 2, backend=request.param, device=device)

    return run_body


def ones(comm: TorchComm, *shape: int) -> torch.Tensor:
    return torch.ones(shape, device=comm.get_device())


def own(comm: TorchComm, *shape: int) -> torch.Tensor:
    """Returns a tensor filled with the rank + 1."""
    return ones(comm, *shape) * (comm.get_rank() + 1)


def check(tensor: torch.Tensor, *expected: float) -> None:
    """Checks that row r of the tensor is filled with expected[r]."""
    rows = tensor.cpu().view(len(expected), -1)
    assert rows.tolist() == [[value] * rows.shape[1] for value in expected]


# 1: import


def test_block_01_import() -> None:
    assert importlib.import_module("torch_overlap.compat.torchcomms") is torchcomms
    # The objects are the package's own.
    own = [name for name in torchcomms.__all__ if name not in ("device_mesh", "hooks", "objcol")]
    assert [name for name in own if getattr(torchcomms, name) is not getattr(torch_overlap, name)] == []


# 2 to 5: construction


def construct(rank: int, size: int, store: Any) -> None:
    options = torchcomms.CommOptions()
    options.store = store
    with in_environment(rank, size):
        comm = torchcomms.new_comm(backend="gloo", device=torch.device("cpu"), options=options)
    assert (comm.get_rank(), comm.get_size()) == (rank, size)
    comm.finalize()


def by_position(rank: int, size: int, store: Any) -> None:
    """torchcomms' order: the abort flag, timeout, priority, store, reconfiguration, hints."""
    with in_environment(rank, size):
        seconds = timedelta(seconds=31)
        comm = torchcomms.new_comm(
            "gloo", torch.device("cpu"), "positions", False, seconds, True, store, False, {"lazy": "true"}
        )
    options = comm.get_options()
    assert (comm.get_name(), options.timeout, options.abort_process_on_timeout_or_error) == (
        "positions",
        seconds,
        False,
    )
    assert (options.is_high_priority_stream, options.enable_reconfigure) == (True, False)
    x = own(comm, 3)
    comm.all_reduce(x, ReduceOp.SUM, False)
    check(x, 3)
    comm.finalize()


def test_the_arguments_of_new_comm_by_position() -> None:
    run_ranks(by_position, 2, comm=False)


def test_block_02_new_comm() -> None:
    run_ranks(construct, 2, comm=False)


def finalize(comm: TorchComm) -> None:
    assert comm.finalize() is None  # type: ignore[func-returns-value]
    with pytest.raises(RuntimeError):
        comm.barrier(False)


def test_block_03_finalize(run: Callable[[Body], None]) -> None:
    run(finalize)


def get_rank(comm: TorchComm) -> None:
    rank = comm.get_rank()
    assert isinstance(rank, int)
    x = torch.tensor([rank], device=comm.get_device())
    comm.all_reduce(x, ReduceOp.SUM, False).wait()
    assert x.item() == 1


def test_block_04_get_rank(run: Callable[[Body], None]) -> None:
    run(get_rank)


def get_size(comm: TorchComm) -> None:
    assert comm.get_size() == 2


def test_block_05_get_size(run: Callable[[Body], None]) -> None:
    run(get_size)


# 6, 7: point to point


def send(comm: TorchComm) -> None:
    x = own(comm, 3)
    if comm.get_rank() == 0:
        comm.send(tensor=x, dst=1, async_op=True).wait()
        comm.send(tensor=x, dst=1, async_op=False, **OPTIONAL).wait()
    else:
        for _ in range(2):
            comm.recv(x.fill_(9), 0, False).wait()
            check(x, 1)


def test_block_06_send(run: Callable[[Body], None]) -> None:
    run(send)


def recv(comm: TorchComm) -> None:
    x = own(comm, 3)
    if comm.get_rank() == 1:
        comm.recv(tensor=x, src=0, async_op=True).wait()
        check(x, 1)
        comm.recv(tensor=x.zero_(), src=0, async_op=False, **OPTIONAL).wait()
        check(x, 1)
    else:
        for _ in range(2):
            comm.send(x, 1, False).wait()


def test_block_07_recv(run: Callable[[Body], None]) -> None:
    run(recv)


# 8 to 18: collectives


def broadcast(comm: TorchComm) -> None:
    for arguments in ({"async_op": True}, {"async_op": False, **OPTIONAL}):
        x = own(comm, 3)
        comm.broadcast(tensor=x, root=1, **arguments).wait()
        check(x, 2)


def test_block_08_broadcast(run: Callable[[Body], None]) -> None:
    run(broadcast)


def all_reduce(comm: TorchComm) -> None:
    for arguments in ({"async_op": True}, {"async_op": False, **OPTIONAL}):
        x = own(comm, 3)
        comm.all_reduce(tensor=x, op=ReduceOp.SUM, **arguments).wait()
        check(x, 3)


def test_block_09_all_reduce(run: Callable[[Body], None]) -> None:
    run(all_reduce)


def reduce(comm: TorchComm) -> None:
    for arguments in ({"async_op": True}, {"async_op": False, **OPTIONAL}):
        x = own(comm, 3)
        comm.reduce(tensor=x, root=0, op=ReduceOp.PRODUCT, **arguments).wait()
        check(x, 2)  # 1 * 2 at the root; rank 1 keeps its own 2


def test_block_10_reduce(run: Callable[[Body], None]) -> None:
    run(reduce)


def all_gather(comm: TorchComm) -> None:
    for arguments in ({"async_op": True}, {"async_op": False, **OPTIONAL}):
        outputs = [ones(comm, 3) * 9 for _ in range(2)]
        comm.all_gather(tensor_list=outputs, tensor=own(comm, 3), **arguments).wait()
        check(torch.stack(outputs), 1, 2)


def test_block_11_all_gather(run: Callable[[Body], None]) -> None:
    run(all_gather)


def all_gather_single(comm: TorchComm) -> None:
    for arguments in ({"async_op": True}, {"async_op": False, **OPTIONAL}):
        output = ones(comm, 6) * 9
        comm.all_gather_single(output=output, input=own(comm, 3), **arguments).wait()
        check(output, 1, 2)


def test_block_12_all_gather_single(run: Callable[[Body], None]) -> None:
    run(all_gather_single)


def reduce_scatter(comm: TorchComm) -> None:
    for arguments in ({"async_op": True}, {"async_op": False, **OPTIONAL}):
        output = ones(comm, 3) * 9
        inputs = [own(comm, 3), own(comm, 3) * 10]
        comm.reduce_scatter(output=output, input_list=inputs, op=ReduceOp.SUM, **arguments).wait()
        check(output, 3 if comm.get_rank() == 0 else 30)


def test_block_13_reduce_scatter(run: Callable[[Body], None]) -> None:
    run(reduce_scatter)


def reduce_scatter_single(comm: TorchComm) -> None:
    for arguments in ({"async_op": True}, {"async_op": False, **OPTIONAL}):
        output = ones(comm, 3) * 9
        joined = torch.cat([own(comm, 3), own(comm, 3) * 10])
        comm.reduce_scatter_single(output=output, input=joined, op=ReduceOp.MAX, **arguments).wait()
        check(output, 2 if comm.get_rank() == 0 else 20)


def test_block_14_reduce_scatter_single(run: Callable[[Body], None]) -> None:
    run(reduce_scatter_single)


def all_to_all_single(comm: TorchComm) -> None:
    for arguments in ({"async_op": True}, {"async_op": False, **OPTIONAL}):
        output = ones(comm, 6) * 9
        joined = torch.cat([own(comm, 3), own(comm, 3) * 10])
        comm.all_to_all_single(output=output, input=joined, **arguments).wait()
        check(output, *((1, 2) if comm.get_rank() == 0 else (10, 20)))


def test_block_15_all_to_all_single(run: Callable[[Body], None]) -> None:
    run(all_to_all_single)


def all_to_all(comm: TorchComm) -> None:
    for arguments in ({"async_op": True}, {"async_op": False, **OPTIONAL}):
        outputs = [ones(comm, 3) * 9 for _ in range(2)]
        inputs = [own(comm, 3), own(comm, 3) * 10]
        comm.all_to_all(output_tensor_list=outputs, input_tensor_list=inputs, **arguments).wait()
        check(torch.stack(outputs), *((1, 2) if comm.get_rank() == 0 else (10, 20)))


def test_block_16_all_to_all(run: Callable[[Body], None]) -> None:
    run(all_to_all)


def all_to_all_v_single(comm: TorchComm) -> None:
    rank = comm.get_rank()
    sends = [[1, 2], [3, 0]]  # slices from rank a to rank b
    for arguments in ({"async_op": True}, {"async_op": False, **OPTIONAL}):
        out_splits = [sends[source][rank] for source in range(2)]
        output = ones(comm, sum(out_splits), 2) * 9
        comm.all_to_all_v_single(
            output=output,
            input=own(comm, sum(sends[rank]), 2),
            output_split_sizes=out_splits,
            input_split_sizes=sends[rank],
            **arguments,
        ).wait()
        check(output, *[1] * out_splits[0], *[2] * out_splits[1])


def test_block_17_all_to_all_v_single(run: Callable[[Body], None]) -> None:
    run(all_to_all_v_single)


def barrier(comm: TorchComm) -> None:
    comm.barrier(async_op=True).wait()
    comm.barrier(async_op=False, **OPTIONAL).wait()


def test_block_18_barrier(run: Callable[[Body], None]) -> None:
    run(barrier)


# 19, 20: scatter and gather


def scatter(comm: TorchComm) -> None:
    for arguments in ({"async_op": True}, {"async_op": False, **OPTIONAL}):
        output = ones(comm, 3) * 9
        inputs = [own(comm, 3), own(comm, 3) * 10] if comm.get_rank() == 1 else []
        comm.scatter(output_tensor=output, input_tensor_list=inputs, root=1, **arguments).wait()
        check(output, 2 if comm.get_rank() == 0 else 20)


def test_block_19_scatter(run: Callable[[Body], None]) -> None:
    run(scatter)


def gather(comm: TorchComm) -> None:
    for arguments in ({"async_op": True}, {"async_op": False, **OPTIONAL}):
        outputs = [ones(comm, 3) * 9 for _ in range(2)] if comm.get_rank() == 0 else []
        comm.gather(output_tensor_list=outputs, input_tensor=own(comm, 3), root=0, **arguments).wait()
        if outputs:
            check(torch.stack(outputs), 1, 2)


def test_block_20_gather(run: Callable[[Body], None]) -> None:
    run(gather)


# 21: management


def split(comm: TorchComm) -> None:
    alone = comm.split(ranks=[comm.get_rank()])
    assert alone is not None
    assert alone.get_size() == 1
    alone.finalize()
    nothing = comm.split(ranks=[] if comm.get_rank() == 0 else [1])
    if comm.get_rank() == 0:
        assert nothing is None
    else:
        assert nothing is not None
        nothing.finalize()
    with pytest.raises(RuntimeError):
        comm.split(ranks=[1 - comm.get_rank()])


def test_block_21_split(run: Callable[[Body], None]) -> None:
    run(split)


# 22, 23: works


def is_completed(rank: int, size: int, given: Any, backend: str, device_type: str) -> None:
    with in_environment(rank, size):
        comm = torchcomms.new_comm(backend, torch.device(device_type), store=given)
        x = own(comm, 10)
        comm.all_reduce(x, ReduceOp.SUM, True).wait_blocking()
        if rank == 1:
            given.wait(["rank 0 has looked"])
        work = comm.all_reduce(x, ReduceOp.SUM, True)
        if rank == 0:
            assert work.is_completed() is False  # rank 1 has not called
            given.set("rank 0 has looked", "")
        work.wait_blocking()
        assert work.is_completed() is True
        check(x, 6)
        comm.finalize()


WHERE = [("gloo", "cpu"), pytest.param("nccl", "cuda", marks=pytest.mark.gpu(2))]


@pytest.mark.parametrize(("backend", "device_type"), WHERE)
def test_block_22_is_completed(backend: str, device_type: str) -> None:
    run_ranks(is_completed, 2, backend, device_type, comm=False)


def wait(comm: TorchComm) -> None:
    x = own(comm, 10)
    assert comm.all_reduce(x, ReduceOp.SUM, True).wait() is None  # type: ignore[func-returns-value]
    check(x, 3)


def test_block_23_wait(run: Callable[[Body], None]) -> None:
    run(wait)


# 24 to 27: the examples. The page's store is a FileStore under /tmp; the launcher sets rank and size.


class in_environment:
    """Sets the variables that torchrun would have set."""

    def __init__(self, rank: int, size: int) -> None:
        self.names = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}

    def __enter__(self) -> None:
        self.before = {name: os.environ.get(name) for name in self.names}
        os.environ.update(self.names)

    def __exit__(self, *_: object) -> None:
        for name, value in self.before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def basic_usage(rank_: int, size_: int, _: object, backend: str, device_type: str, path: str) -> None:
    with in_environment(rank_, size_):
        store = torch.distributed.FileStore(path, 2)
        device = torch.device(device_type)  # the page writes "cuda:0" for every rank
        comm = torchcomms.new_comm(backend, device, store=store)
        rank = comm.get_rank()
        world_size = comm.get_size()
        tensor = torch.ones(10, device=device) * rank
        comm.all_reduce(tensor, torchcomms.ReduceOp.SUM, async_op=False)
        assert f"Rank {rank}: {tensor}".startswith(f"Rank {rank_}: tensor([1., 1., 1., 1., 1., 1., 1., 1., 1., 1.]")
        check(tensor, sum(range(world_size)))
        comm.finalize()


def asynchronous(rank_: int, size_: int, _: object, backend: str, device_type: str, path: str) -> None:
    with in_environment(rank_, size_):
        store = torch.distributed.FileStore(path, 2)
        device = torch.device(device_type)
        comm = torchcomms.new_comm(backend, device, store=store)
        rank = comm.get_rank()
        send_tensor = torch.ones(10, device=device) * rank
        recv_tensor = torch.zeros(10, device=device)
        send_tensor += 5  # rank 0 sends zeros on the page: their arrival could not be seen
        if rank == 0:
            work = comm.send(send_tensor, dst=1, async_op=True)
        else:
            work = comm.recv(recv_tensor, src=0, async_op=True)
        work.wait()
        check(recv_tensor, 0 if rank == 0 else 5)
        comm.finalize()


@pytest.mark.parametrize(("backend", "device_type"), WHERE)
def test_block_24_basic_usage(backend: str, device_type: str, tmp_path: Path) -> None:
    run_ranks(basic_usage, 2, backend, device_type, str(tmp_path / "store"), comm=False)


@pytest.mark.parametrize(("backend", "device_type"), WHERE)
def test_block_25_asynchronous_operations(backend: str, device_type: str, tmp_path: Path) -> None:
    run_ranks(asynchronous, 2, backend, device_type, str(tmp_path / "store"), comm=False)


def cuda_graphs(rank_: int, size_: int, given: Any) -> None:
    with in_environment(rank_, size_):
        device = torch.device("cuda")
        # "ncclx" is another name of nccl here. The page makes it without a store: run_ranks has no launcher's.
        comm = torchcomms.new_comm("ncclx", device, store=given)
        rank = comm.get_rank()
        world_size = comm.get_size()
        tensor = torch.ones(10, device=device) * rank
        comm.barrier(False).wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.all_reduce(tensor, torchcomms.ReduceOp.SUM, async_op=True)
        for _ in range(10):
            graph.replay()
            torch.cuda.current_stream().synchronize()
        check(tensor, world_size**9 * sum(range(world_size)))
        comm.finalize()


@pytest.mark.gpu(2)
def test_block_26_cuda_graphs() -> None:
    run_ranks(cuda_graphs, 2, comm=False)


def custom_options(rank: int, size: int, given: Any, backend: str, device_type: str) -> None:
    with in_environment(rank, size):
        device = torch.device(device_type)
        with pytest.warns(UserWarning, match="backend_option"):
            comm = torchcomms.new_comm(
                backend,
                device,
                store=given,
                timeout=timedelta(seconds=60),  # the page's torch.timedelta does not exist
                abort_process_on_timeout_or_error=False,
                hints={
                    "torchcomm::ncclx::high_priority_stream": "true",
                    "backend_option": "value",
                },
            )
        options = comm.get_options()
        assert options.timeout == timedelta(seconds=60)
        assert options.abort_process_on_timeout_or_error is False
        assert options.is_high_priority_stream is True
        comm.finalize()


@pytest.mark.parametrize(
    ("backend", "device_type"), [("gloo", "cpu"), pytest.param("ncclx", "cuda", marks=pytest.mark.gpu(2))]
)
def test_block_27_custom_options(backend: str, device_type: str) -> None:
    run_ranks(custom_options, 2, backend, device_type, comm=False)


def test_every_block_is_a_test() -> None:
    names = [block.split("(")[0].removeprefix("torchcomms.").split(" torchcomms")[0] for block in BLOCKS]
    expected = [
        f"test_block_{number:02}_{name.lower().replace(' ', '_')}" for number, name in enumerate(names, start=1)
    ]
    assert [name for name in globals() if name.startswith("test_block_")] == expected


@pytest.mark.parametrize("block", [block for block in BLOCKS if "(" in block and "." not in block])
def test_every_signature_is_ours(block: str) -> None:
    """The documented parameters, by name and order, are the first ones of the method."""
    name, arguments = block.removesuffix(")").split("(")
    documented = [argument.split("=")[0].strip() for argument in arguments.split(",") if argument]
    owner = torchcomms.TorchWork if name in ("is_completed", "wait") else TorchComm
    assert list(inspect.signature(getattr(owner, name)).parameters)[: len(documented) + 1] == ["self", *documented]
