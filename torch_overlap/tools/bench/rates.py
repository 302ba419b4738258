"""Bandwidths, measured in the same run as the results whose floor they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torch_overlap as to
from torch_overlap._timing import interleave, slowest_rank, spread_of
from torch_overlap.tools.bench.cases import MIB
from torch_overlap.tools.bench.floor import Rates
from torch_overlap.tools.bench.ranks import Ranks

ROUNDS = 9


def measure_rates(ranks: Ranks) -> Rates:
    """Measures a copy to the next rank while all ranks send, and a copy within memory. Collective."""
    on_gpu = ranks.device.type == "cuda"
    size = 256 * MIB if on_gpu else MIB
    source = torch.empty(size, dtype=torch.uint8, device=ranks.device).random_()
    target = torch.empty_like(source)
    copies: dict[str, Callable[[], object]] = {"memory": lambda: target.copy_(source)}
    keep: list[Any] = []
    if ranks.size > 1:
        copies["link"] = _peer_copy(ranks, source, keep) if on_gpu else _exchange(ranks, source)
    samplers = {name: ranks.captured.sampler(copy) for name, copy in copies.items()}
    samples = slowest_rank(interleave(samplers, ROUNDS), ranks.comm)
    rate = {name: size / spread_of(values).median * 1e6 for name, values in samples.items()}
    ranks.synchronize()
    return Rates(link=rate.get("link", rate["memory"]), memory=2 * rate["memory"])


def _peer_copy(ranks: Ranks, source: Tensor, keep: list[Any]) -> Callable[[], object]:
    """Returns a copy to the peer by a copy engine, or by messages if ranks cannot map each other's memory."""
    found: list[Tensor] = []

    def reach() -> None:
        import torch.distributed._symmetric_memory as symmetric

        world: Any = dist.group.WORLD
        mine = symmetric.empty(source.numel(), dtype=torch.uint8, device=ranks.device)
        handle: Any = symmetric.rendezvous(mine, world)
        keep.extend((mine, handle))
        found.append(handle.get_buffer((ranks.rank + 1) % ranks.size, [source.numel()], torch.uint8))
        found[0].copy_(source)

    if ranks.try_on_all_ranks(reach):
        return _exchange(ranks, source)
    return lambda: found[0].copy_(source)


def _exchange(ranks: Ranks, source: Tensor) -> Callable[[], object]:
    """Returns a function that sends every rank's bytes to the next rank through the communicator."""
    out = torch.empty_like(source)
    pairs = [(rank, (rank + 1) % ranks.size) for rank in range(ranks.size)]

    def exchange() -> None:
        out.copy_(to.ops.permute(source, ranks.comm, pairs))

    return exchange
