"""The device communicator: vLLM's for CUDA, with a TorchComm for the calls that it serves."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import vllm.envs
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from torch_overlap import ops
from torch_overlap.comm import new_comm
from torch_overlap.compat.vllm.sizes import MAX_RANKS, max_served_bytes

if TYPE_CHECKING:
    from vllm.distributed.utils import StatelessProcessGroup

    from torch_overlap import TorchComm

__all__ = ["OverlapCommunicator"]

_logger = logging.getLogger("torch_overlap.vllm")

# vLLM's names of the groups that are served: tensor and pipeline parallelism, and context parallelism of both kinds.
# Expert and data parallelism use collectives of unequal parts, which stay vLLM's.
_SERVED_GROUPS = ("tp", "pp", "dcp", "pcp")
_SUMMED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


class OverlapCommunicator(CudaCommunicator):  # type: ignore[misc]
    """vLLM's CudaCommunicator, of which a TorchComm serves all_reduce, all_gather, reduce_scatter, send, recv and
    broadcast.

    Every rank decides by the same facts (group, operation, dtype, size) whether a call is served; vLLM's own
    implementation runs the others. All ranks of a group make it together, outside of a CUDA graph capture, and that
    allocates the memory that captured calls use. Operations run on the current stream and can be captured.

    Attributes:
        overlap_comm: the TorchComm, named "vllm.<unique_name>"; None if the group is not served.
    """

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
        global_ranks: list[int] | None = None,
        global_world_size: int | None = None,
        tcp_store_group: StatelessProcessGroup | None = None,
    ) -> None:
        super().__init__(
            cpu_group, device, device_group, unique_name, global_ranks, global_world_size, tcp_store_group
        )  # fmt: skip
        self.overlap_comm: TorchComm | None = None
        reason = self._unsupported_reason(tcp_store_group is not None)
        if reason is not None:
            _logger.info("torch_overlap does not serve vLLM's group '%s': %s.", unique_name, reason)
            return
        self.overlap_comm = new_comm(
            _BACKENDS[self.device.type],
            self.device,
            f"vllm.{unique_name}",
            store=PrefixStore(f"torch_overlap/{unique_name}", cpu_group.get_group_store()),
            rank=self.rank_in_group,
            size=self.world_size,
        )
        # A communicator whose first call is captured could not allocate its memory any more and would capture NCCL.
        ops.all_reduce(torch.zeros(8, dtype=torch.bfloat16, device=self.device), self.overlap_comm)

    def _unsupported_reason(self, is_stateless: bool) -> str | None:
        """Returns why the group is not served, the same on all of its ranks; None if it is."""
        if self.unique_name.split(":")[0] not in _SERVED_GROUPS:
            return f"expected one of {', '.join(_SERVED_GROUPS)}"
        if not 2 <= self.world_size <= MAX_RANKS:
            return f"expected 2 to {MAX_RANKS} ranks, got {self.world_size}"
        if is_stateless:
            return "its process groups are stateless"
        if vllm.envs.VLLM_BATCH_INVARIANT:
            return "VLLM_BATCH_INVARIANT is set, and the order of additions would depend on the number of tokens"
        return None

    def _serves(self, operation: str, part: Tensor, num_bytes: int) -> bool:
        """Returns True if the TorchComm runs the call.

        Args:
            operation: its name in sizes.py.
            part: the operand.
            num_bytes: bytes of one rank's part.
        """
        return (
            self.overlap_comm is not None
            and part.device.type == self.device.type
            and 0 < num_bytes <= max_served_bytes(operation, self.world_size)
            and (operation == "all_gather" or part.dtype in _SUMMED_DTYPES)
        )

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Returns the sum of all ranks' `input_`, which does not change."""
        if self.overlap_comm is not None and self._serves("all_reduce", input_, input_.nbytes):
            return ops.all_reduce(input_, self.overlap_comm)
        result: Tensor = super().all_reduce(input_)
        return result

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Returns all ranks' `input_`, concatenated along `dim`."""
        if self.overlap_comm is not None and self._serves("all_gather", input_, input_.nbytes):
            return ops.all_gather(input_, self.overlap_comm, dim).contiguous()
        result: Tensor = super().all_gather(input_, dim)
        return result

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Returns this rank's part, along `dim`, of the sum of all ranks' `input_`."""
        num_bytes = input_.nbytes // self.world_size
        if self.overlap_comm is not None and self._serves("reduce_scatter", input_, num_bytes):
            return ops.reduce_scatter(input_, self.overlap_comm, dim).contiguous()
        result: Tensor = super().reduce_scatter(input_, dim)
        return result

    def send(self, tensor: Tensor, dst: int | None = None) -> None:
        """Sends `tensor` to rank `dst` of the group; None: the next rank."""
        if self.overlap_comm is None:
            super().send(tensor, dst)
            return
        target = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        self.overlap_comm.send(tensor.contiguous(), target, False)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> Tensor:
        """Returns a new tensor of this shape and dtype from rank `src` of the group; None: the previous rank."""
        if self.overlap_comm is None:
            received: Tensor = super().recv(size, dtype, src)
            return received
        source = (self.rank_in_group - 1) % self.world_size if src is None else src
        tensor = torch.empty(size, dtype=dtype, device=self.device)
        self.overlap_comm.recv(tensor, source, False)
        return tensor

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Gives `tensor`, in place, the value that it has on rank `src` of the group, and returns it."""
        if self.overlap_comm is None:
            same: Tensor = super().broadcast(tensor, src)
            return same
        self.overlap_comm.broadcast(tensor, src, False)
        return tensor

    def destroy(self) -> None:
        """Finalizes the TorchComm, then destroys vLLM's communicators. Collective."""
        comm, self.overlap_comm = self.overlap_comm, None
        if comm is not None and not comm.is_aborted():
            comm.finalize()
        super().destroy()
