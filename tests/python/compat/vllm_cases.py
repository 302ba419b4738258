"""The plug-ins over stand-in packages: what each rank of test_vllm.py and test_sglang.py runs."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torch_overlap as to


@contextlib.contextmanager
def stand_in(package: str = "vllm") -> Iterator[None]:
    """Makes the stand-in importable as the package; afterwards neither it nor the plug-in is left."""
    folder, ours = str(Path(__file__).parent / f"{package}_stand_in"), f"torch_overlap.compat.{package}"

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] == package or name.startswith(ours)]

    before = {name: sys.modules.pop(name) for name in loaded()}
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
        for name in loaded():
            del sys.modules[name]
        vars(importlib.import_module("torch_overlap.compat")).pop(package, None)
        sys.modules.update(before)
        importlib.invalidate_caches()


def plug_in(name: str) -> ModuleType:
    return importlib.import_module(f"torch_overlap.compat.vllm.{name}")


@contextlib.contextmanager
def group(rank: int, size: int, store: Any, name: str = "tp:0") -> Iterator[Any]:
    """Yields our communicator, of vLLM's interface, over a gloo group of all ranks."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        with stand_in():
            made = plug_in("communicator").OverlapCommunicator(
                cpu_group=dist.new_group(backend="gloo"), device=torch.device("cpu"), unique_name=name
            )
            try:
                yield made
            finally:
                made.destroy()
    finally:
        dist.destroy_process_group()


def parts_of(rank: int, size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Returns every rank's part: small integers, of which every dtype holds the sum exactly."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 10, shape, generator=generator).to(dtype) for _ in range(size)]


def same(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert got.is_contiguous()


def collectives(rank: int, size: int, store: Any, seed: int) -> None:
    with group(rank, size, store) as made:
        assert made.overlap_comm.get_name() == "vllm.tp:0"
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int32):
            parts = parts_of(rank, size, (3, 2 * size, 5), dtype, seed)
            x, total = parts[rank].clone(), torch.stack(parts).sum(0).to(dtype)
            same(made.all_reduce(x), total)
            for dim in (-3, -2, -1, 0, 1, 2) if dtype == torch.bfloat16 else (1,):
                same(made.all_gather(x, dim), torch.cat(parts, dim))
            for dim in (1, -2) if dtype == torch.bfloat16 else (1,):
                same(made.reduce_scatter(x, dim), total.chunk(size, dim)[rank].contiguous())
            same(made.all_gather(x), torch.cat(parts, -1))
            same(made.reduce_scatter(x.movedim(1, 2)), total.movedim(1, 2).chunk(size, -1)[rank].contiguous())
            same(made.all_reduce(x.movedim(0, 2)), total.movedim(0, 2).contiguous())
            same(x, parts[rank])
        assert made.calls == []


def messages(rank: int, size: int, store: Any, seed: int) -> None:
    with group(rank, size, store) as made:
        parts = parts_of(rank, size, (4, 3), torch.bfloat16, seed)
        x, previous = parts[rank], parts[(rank - 1) % size]
        if rank == 0:
            made.send(x)
            got = made.recv(x.shape, x.dtype)
        else:
            got = made.recv(x.shape, x.dtype)
            made.send(x)
        same(got, previous)
        if rank == 0:
            made.send(x.t(), size - 1)
        elif rank == size - 1:
            same(made.recv(torch.Size((3, 4)), x.dtype, 0), parts[0].t().contiguous())
        for root in range(size):
            y = x.clone()
            assert made.broadcast(y, root) is y
            same(y, parts[root])
        assert made.calls == []


def left_to_vllm(rank: int, size: int, store: Any, seed: int) -> None:
    """Checks that vLLM's own implementation has what is not served: too large, of another dtype, empty."""
    with group(rank, size, store) as made:
        sizes = plug_in("sizes")
        sizes._MAX_BYTES = dict.fromkeys(sizes._MAX_BYTES, (64, 64, 64))
        parts = parts_of(rank, size, (size, 16), torch.float32, seed)
        x, total = parts[rank], torch.stack(parts).sum(0)
        same(made.all_reduce(x), total)
        same(made.all_gather(x, 0), torch.cat(parts))
        wide = parts_of(rank, size, (size, 17), torch.float32, seed)
        same(made.reduce_scatter(wide[rank], 0), torch.stack(wide).sum(0)[rank : rank + 1])
        small = parts_of(rank, size, (4,), torch.uint8, seed)
        same(made.all_reduce(small[rank]), torch.stack(small).sum(0).to(torch.uint8))
        assert made.calls == ["all_reduce", "all_gather", "reduce_scatter", "all_reduce"]
        same(made.reduce_scatter(x, 0), total[rank : rank + 1])
        assert made.all_reduce(torch.empty(0)).numel() == 0
        assert made.calls == ["all_reduce", "all_gather", "reduce_scatter", "all_reduce", "all_reduce"]


def unserved_groups(rank: int, size: int, store: Any) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    with stand_in():
        kind, envs = plug_in("communicator").OverlapCommunicator, importlib.import_module("vllm.envs")
        cpu_group = dist.new_group(backend="gloo")

        def is_served(name: str, **options: Any) -> bool:
            made = kind(cpu_group, torch.device("cpu"), None, name, **options)
            is_served = made.overlap_comm is not None
            x = torch.full((2,), float(rank + 1))
            same(made.all_reduce(x), torch.full((2,), size * (size + 1) / 2))
            same(made.broadcast(x), torch.ones(2))
            assert made.calls == ([] if is_served else ["all_reduce", "broadcast"])
            made.destroy()
            assert made.calls[-1] == "destroy"
            return is_served

        assert [is_served(f"{name}:0") for name in ("tp", "pp", "dcp", "pcp")] == [True] * 4
        assert [is_served(f"{name}:0") for name in ("ep", "dp", "world", "eplb")] == [False] * 4
        assert not is_served("tp:1", tcp_store_group=object())
        envs.VLLM_BATCH_INVARIANT = True
        assert not is_served("tp:2")
        envs.VLLM_BATCH_INVARIANT = False
        assert is_served("tp:2")
        assert "vllm.tp:2" not in to.comm_names()
    dist.destroy_process_group()


def sglang_groups(rank: int, size: int, store: Any) -> None:
    """Checks a group of the backend that the platform names, as SGLang makes it."""
    with stand_in("sglang"):
        platform = importlib.import_module("torch_overlap.compat.sglang").OverlapPlatform()
        backend = platform.get_torch_distributed_backend_str()
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        made = dist.new_group(list(range(size)), backend=backend, group_desc="tp:device")
        x = torch.full((3,), float(rank + 1))
        dist.all_reduce(x, group=made)
        same(x, torch.full((3,), size * (size + 1) / 2))
        assert to.comm_from_group(made, "cpu").get_size() == size
        dist.destroy_process_group()
