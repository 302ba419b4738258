"""Behaviour of torch's own backends that this one has too, compared with gloo: arguments, options, devices."""

from __future__ import annotations

import secrets
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

import torch_overlap as to
from torch_overlap import _c10d
from torch_overlap.testing import run_ranks

CPU = torch.device("cpu")


def init(rank, size, store, backend="torch_overlap", **keywords):
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60), **keywords)


def generator(rank, store, is_shared=True):
    """Returns a generator with a seed of this run: the same on all ranks, or one for each."""
    if rank == 0:
        store.set("seed", str(secrets.randbits(32)))
    return torch.Generator().manual_seed(int(store.get("seed")) + (0 if is_shared else rank))


# --- Several tensors of a rank -------------------------------------------------------------------------------------


def several(rank, size, store):
    init(rank, size, store)
    random = generator(rank, store, is_shared=False)
    ours = dist.group.WORLD._get_backend(CPU)
    stock = dist.new_group(backend="gloo")._get_backend(CPU)

    def compare(call, *shapes, dtype=torch.float64):
        """Runs `call` on equal tensors over both backends, and compares everything it writes."""
        given = [torch.randint(1, 5, shape, generator=random).to(dtype) for shape in shapes]
        results = []
        for backend in (ours, stock):
            tensors = [tensor.clone() for tensor in given]
            work, outputs = call(backend, tensors)
            work.wait()
            results.append(outputs)
        for mine, expected in zip(*results, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0)

    def reduced(op):
        def call(backend, tensors):
            options = dist.AllreduceOptions()
            options.reduceOp = op
            return backend.allreduce(tensors, options), tensors

        return call

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        compare(reduced(op), (3, 2), (3, 2), (3, 2))
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        compare(reduced(op), (5,), (5,), dtype=torch.int32)

    def broadcast(root, index):
        def call(backend, tensors):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, index
            return backend.broadcast(tensors, options), tensors

        return call

    for root in range(size):
        for index in range(3):
            compare(broadcast(root, index), (2, 3), (2, 3), (2, 3))

    def gathered(backend, tensors):
        outputs = [[torch.full((4,), -1.0, dtype=torch.float64) for _ in range(2 * size)] for _ in range(2)]
        return backend.allgather(outputs, tensors), [one for part in outputs for one in part]

    compare(gathered, (4,), (4,))

    # The result is that of a transposed view, too.
    views = [torch.full((2, 3), rank + 1.0).t() for _ in range(2)]
    ours.allreduce(views).wait()
    total = 2.0 * sum(range(1, size + 1))
    assert [view.tolist() for view in views] == [[[total] * 2] * 3] * 2

    average = dist.AllreduceOptions()
    average.reduceOp = dist.ReduceOp.AVG
    with pytest.raises(RuntimeError, match=r"all_reduce: expected SUM, .* for several tensors of a rank, got AVG"):
        ours.allreduce([torch.ones(2), torch.ones(2)], average)
    with pytest.raises(RuntimeError, match=r"all_reduce: expected tensors of sizes \[2\] .* got \[3\]"):
        ours.allreduce([torch.ones(2), torch.ones(3)])
    with pytest.raises(RuntimeError, match=rf"all_gather: expected {2 * size} tensors in each list"):
        ours.allgather([[torch.ones(2)], [torch.ones(2)]], [torch.ones(2), torch.ones(2)])
    dist.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_several_tensors_of_a_rank_as_gloo_takes_them(size):
    run_ranks(several, size, comm=False)


# --- Version counters ----------------------------------------------------------------------------------------------


# gloo writes these outputs with copies of its own, which count; NCCL does not.
GLOO_COPIES = ("all_gather", "reduce_scatter")


def written(group, size):
    """Yields each collective and the tensor that it writes."""
    x = torch.ones(size, 2)
    yield "all_reduce", x, lambda: dist.all_reduce(x, group=group)
    yield "broadcast", x, lambda: dist.broadcast(x, 0, group=group)
    out = torch.empty(size * size, 2)
    yield "all_gather", out, lambda: dist.all_gather_into_tensor(out, x, group=group)
    part = torch.empty(1, 2)
    yield "reduce_scatter", part, lambda: dist.reduce_scatter_tensor(part, x, group=group)
    given = torch.empty(size, 2)
    yield "all_to_all", given, lambda: dist.all_to_all_single(given, x, group=group)
    view = torch.ones(2, size).t()
    yield "a view", view, lambda: dist.all_reduce(view, group=group)


def versions(rank, size, store):
    init(rank, size, store)
    stock = dist.new_group(backend="gloo")
    for (name, mine, run), (_, theirs, run_stock) in zip(
        written(None, size), written(stock, size), strict=True
    ):  # fmt: skip
        run()
        run_stock()
        assert mine._version == 0, name
        if name not in GLOO_COPIES:
            assert theirs._version == 0, name

    # A backward uses what a collective left in a tensor that it saved.
    weight = torch.tensor([2.0], requires_grad=True)
    saved = torch.tensor([float(rank + 1)])
    loss = (weight * saved).sum()
    dist.all_reduce(saved)
    loss.backward()
    assert weight.grad.tolist() == [sum(range(1, size + 1))]

    # The communicator's own operations are seen by autograd.
    comm = to.comm_from_group()
    saved = torch.tensor([1.0])
    loss = (weight * saved).sum()
    comm.all_reduce(saved, to.ReduceOp.SUM, False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_collectives_leave_version_counters_as_torchs_backends_do():
    run_ranks(versions, 2, comm=False)


# --- Options of ProcessGroupNCCL -----------------------------------------------------------------------------------


def nccl_options():
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.min_ctas = 2
    options.config.cga_cluster_size = 0
    options.config.net_name = "Socket"
    return options


def with_nccl_options(rank, size, store):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init(rank, size, store, pg_options=nccl_options())
    options = dist.group.WORLD._get_backend(CPU).options
    assert options.is_high_priority_stream is True
    assert options.cuda_hints == {"min_ctas": "2", "cga_cluster_size": "0", "net_name": "Socket"}
    assert dict(options.hints) == {}
    group = dist.new_group([0, 1], pg_options=nccl_options(), timeout=timedelta(seconds=41))
    assert group._get_backend(CPU).options._timeout == timedelta(seconds=41)
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0, 2.0]
    half = dist.group.WORLD.split_group([rank], group_name=f"alone{rank}")
    assert half._get_backend(CPU).options.cuda_hints["min_ctas"] == "2"
    with pytest.raises(TypeError, match=r"init_process_group: expected .* for pg_options, got builtins.object|object"):
        dist.new_group([0, 1], pg_options=object())
    dist.barrier()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_options_of_process_group_nccl_are_translated():
    run_ranks(with_nccl_options, 2, comm=False)


# --- Devices -------------------------------------------------------------------------------------------------------


def test_a_group_serves_the_devices_of_the_machine(monkeypatch):
    devices = dist.Backend.backend_capability["torch_overlap"]
    assert isinstance(devices, _c10d._Devices)
    for has_gpu, expected in ((False, ["cpu"]), (True, ["cpu", "cuda"])):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        config = dist.BackendConfig(dist.Backend("torch_overlap"))
        assert config.get_device_backend_map() == dict.fromkeys(expected, "torch_overlap")
        assert (list(devices), len(devices), devices[0], devices[-1]) == (expected, len(expected), "cpu", expected[-1])


def sharded(rank, size, store):
    init(rank, size, store)
    random = generator(rank, store)
    whole = torch.randn(7, 3, generator=random)
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(size)])
    tensor = sharded_tensor.empty(spec, 7, 3)
    for shard in tensor.local_shards():
        begin = shard.metadata.shard_offsets[0]
        shard.tensor.copy_(whole[begin : begin + shard.metadata.shard_sizes[0]])
    out = torch.full((7, 3), float("nan")) if rank == 0 else None
    tensor.gather(0, out)
    if out is not None:
        torch.testing.assert_close(out, whole, rtol=0, atol=0)
    dist.barrier()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine with GPUs it gathers over these")
def test_a_sharded_tensor_gathers_on_the_cpu():
    run_ranks(sharded, 2, comm=False)


# --- Split sizes of some ranks only --------------------------------------------------------------------------------


def splits(rank, size, store):
    init(rank, size, store)
    random = generator(rank, store)
    # Rank 0 gives no sizes: it exchanges 2 rows with each rank. The others exchange r + s rows with each other.
    rows = [[2 if 0 in (r, s) else r + s for s in range(size)] for r in range(size)]
    sent = [torch.randn(sum(rows[r]), 3, generator=random) for r in range(size)]
    expected = torch.cat([sent[r].split(rows[r])[rank] for r in range(size)])
    sizes = None if rank == 0 else rows[rank]
    for async_op in (False, True):
        output = torch.full_like(expected, float("nan"))
        work = dist.all_to_all_single(output, sent[rank], sizes, sizes, async_op=async_op)
        if work is not None:
            work.wait()
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
    # Sizes for one side.
    output = torch.full((2 * size, 3), float("nan"))
    given = torch.randn(size, 2 * size, 3, generator=random)
    dist.all_to_all_single(output, given[rank], [2] * size if rank == 0 else None, None if rank == 0 else [2] * size)
    torch.testing.assert_close(output, given[:, 2 * rank : 2 * rank + 2].reshape(-1, 3), rtol=0, atol=0)


@pytest.mark.parametrize("size", [2, 3])
def test_some_ranks_give_split_sizes_and_others_none(size):
    run_ranks(splits, size, comm=False)
