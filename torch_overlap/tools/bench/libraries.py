"""The collectives of other libraries, each over the kind of memory that it needs.

A library lends rows in the memory where its collectives are fastest, and lists the collectives that it does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_overlap.tools.bench.cases import MIB, Case, byte_text
from torch_overlap.tools.bench.ranks import Ranks

ALIGNMENT = 512
NO_CUDA = "needs CUDA"


class Arena:
    """One large allocation, lent out in parts that have the same offset on all ranks."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        begin = -(-self.used // ALIGNMENT) * ALIGNMENT
        if begin + size > self.memory.numel():
            raise RuntimeError(f"bench: expected room for {size} bytes more, got {self.memory.numel() - begin}")
        self.used = begin + size
        return self.memory[begin : begin + size].view(dtype).view(torch.Size(shape))

    def reset(self) -> None:
        self.used = 0


@dataclass
class Library:
    """torch.distributed over one group, with memory of its own kind.

    unsupported_collectives: the reason, for each collective that it does not have.
    close: frees its memory, before the group ends.
    """

    name: str
    device: torch.device
    group: Any = None
    arena: Arena | None = None
    unsupported_collectives: dict[str, str] = field(default_factory=dict)
    close: Callable[[], object] = lambda: None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.arena is not None:
            return self.arena.empty(shape, dtype)
        return torch.empty(torch.Size(shape), dtype=dtype, device=self.device)

    def like(self, values: Tensor) -> Tensor:
        """Returns a copy in this library's memory."""
        if self.arena is None:
            return values
        return self.empty(values.shape, values.dtype).copy_(values)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        dist.all_gather_into_tensor(_plain(out), _plain(x), group=self.group)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        dist.reduce_scatter_tensor(out, x, group=self.group)

    def all_reduce(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.group)

    def broadcast(self, x: Tensor) -> None:
        dist.broadcast(x, src=0, group=self.group)

    def all_to_all(self, out: Tensor, x: Tensor) -> None:
        dist.all_to_all_single(out, x, group=self.group)

    def reset(self) -> None:
        if self.arena is not None:
            self.arena.reset()


def _plain(x: Tensor) -> Tensor:
    """Views 8-bit floats as bytes, which every collective supports."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x


@dataclass
class TorchSymmetric:
    """torch.ops.symm_mem, over its own memory."""

    arena: Arena
    group_name: str
    # Beyond these sizes the kernels are not meant to be used, and one launch takes long.
    one_shot_bytes = 8 * MIB
    two_shot_bytes = 256 * MIB

    def one_shot_all_reduce(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", self.group_name)
        return result

    def two_shot_all_reduce(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", self.group_name)
        return result


@dataclass
class Libraries:
    """All libraries that are available here. `missing` has the reason for each other one."""

    plain: Library
    others: list[Library]
    torch_symmetric: TorchSymmetric | None
    missing: dict[str, str]

    @property
    def all(self) -> list[Library]:
        return [self.plain, *self.others]

    def reset(self) -> None:
        """Reclaims all lent memory."""
        for library in self.all:
            library.reset()
        if self.torch_symmetric is not None:
            self.torch_symmetric.arena.reset()

    def close(self) -> None:
        for library in self.all:
            library.close()

    @staticmethod
    def open(ranks: Ranks, cases: Sequence[Case]) -> Libraries:
        """Opens the libraries. Collective. The arenas have room for any of `cases`."""
        plain = Library("nccl" if ranks.device.type == "cuda" else "gloo", ranks.device)
        found = Libraries(plain, [], None, {})
        names = ("nccl symmetric", "nccl copy engine", "torch")
        if ranks.device.type != "cuda":
            found.missing = {name: NO_CUDA for name in ("nccl", *names)}
            return found
        if ranks.size == 1:
            found.missing = {name: "needs two ranks" for name in names}
            return found
        room = max((arena_bytes(case, ranks.size) for case in cases), default=MIB)
        openers: dict[str, Callable[[], None]] = {
            "nccl symmetric": lambda: found.others.append(_registered(ranks, room, zero_cta=False)),
            "nccl copy engine": lambda: found.others.append(_registered(ranks, room, zero_cta=True)),
            "torch": lambda: setattr(found, "torch_symmetric", torch_symmetric(ranks.device, room)),
        }
        for name, opener in openers.items():
            if reason := ranks.try_on_all_ranks(opener):
                found.missing[name] = f"{reason} ({byte_text(room)} of memory)"
                found.others = [library for library in found.others if library.name != name]
                if name == "torch":
                    found.torch_symmetric = None
        return found


def arena_bytes(case: Case, tp: int) -> int:
    """Returns the bytes that the largest user of an arena needs for a case: its inputs, its output, and padding."""
    if not case.is_gemm:
        return 2 * case.sets(tp) * (case.shape[0] + ALIGNMENT) + MIB
    m, n, k = case.shape
    inputs = dict.fromkeys(("bulk_ag", "bulk_rs", "a2a_gemm"), 2 * m * k)
    whole = (inputs | {"ag_gemm": m * k * case.element_size()}).get(case.pattern, 2 * m * n)
    return 2 * whole + case.sets(tp) * (whole // tp + ALIGNMENT) + MIB


def _registered(ranks: Ranks, room: int, zero_cta: bool) -> Library:
    """Returns NCCL over symmetric memory; with `zero_cta`, by its copy engines."""
    options = dist.ProcessGroupNCCL.Options()
    unsupported_collectives = dict.fromkeys(
        ("all_to_all", "broadcast"), "NCCL has no kernel for it over symmetric memory"
    )
    if zero_cta:
        nccl: Any = dist.ProcessGroupNCCL
        config: Any = options.config
        config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
        unsupported_collectives = dict.fromkeys(("all_reduce", "reduce_scatter"), "NCCL's copy engines do not add")
        unsupported_collectives["broadcast"] = "NCCL has no copies for it"
    group = dist.new_group(list(range(ranks.size)), backend="nccl", pg_options=options, device_id=ranks.device)
    backend: Any = group._get_backend(ranks.device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        memory = torch.empty(room, dtype=torch.uint8, device=ranks.device)
    backend.register_mem_pool(pool, symm=True)
    name = "nccl copy engine" if zero_cta else "nccl symmetric"
    return Library(
        name, ranks.device, group, Arena(memory), unsupported_collectives, lambda: backend.deregister_mem_pool(pool)
    )


def torch_symmetric(device: torch.device, room: int) -> TorchSymmetric:
    """Allocates `room` bytes of symmetric memory over the ranks of torch.distributed. Collective."""
    import torch.distributed._symmetric_memory as symmetric

    world: Any = dist.group.WORLD
    memory = symmetric.empty(room, dtype=torch.uint8, device=device)
    symmetric.rendezvous(memory, world)
    return TorchSymmetric(Arena(memory), world.group_name)
