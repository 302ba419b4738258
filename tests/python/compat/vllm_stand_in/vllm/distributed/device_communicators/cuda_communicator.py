"""Collectives over torch.distributed, which count their calls."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class CudaCommunicator:
    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
        global_ranks: list[int] | None = None,
        global_world_size: int | None = None,
        tcp_store_group: object | None = None,
    ) -> None:
        self.cpu_group, self.unique_name = cpu_group, unique_name
        self.device = device or torch.device("cpu")
        self.world_size, self.rank_in_group = cpu_group.size(), cpu_group.rank()
        self.ranks = dist.get_process_group_ranks(cpu_group)
        self.calls: list[str] = []

    def all_reduce(self, input_: Tensor) -> Tensor:
        self.calls.append("all_reduce")
        out = input_.clone()
        dist.all_reduce(out, group=self.cpu_group)
        return out

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        self.calls.append("all_gather")
        parts = [torch.empty_like(input_) for _ in range(self.world_size)]
        dist.all_gather(parts, input_.contiguous(), group=self.cpu_group)
        return torch.cat(parts, dim)

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        self.calls.append("reduce_scatter")
        out = input_.clone()
        dist.all_reduce(out, group=self.cpu_group)
        return out.chunk(self.world_size, dim)[self.rank_in_group].contiguous()

    def send(self, tensor: Tensor, dst: int | None = None) -> None:
        self.calls.append("send")
        dst = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        dist.send(tensor, self.ranks[dst], self.cpu_group)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> Tensor:
        self.calls.append("recv")
        src = (self.rank_in_group - 1) % self.world_size if src is None else src
        tensor = torch.empty(size, dtype=dtype)
        dist.recv(tensor, self.ranks[src], self.cpu_group)
        return tensor

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        self.calls.append("broadcast")
        dist.broadcast(tensor, self.ranks[src], self.cpu_group)
        return tensor

    def destroy(self) -> None:
        self.calls.append("destroy")
