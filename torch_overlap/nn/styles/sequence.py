"""Styles that split the sequence over the ranks and put it together again, and norms of a part of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torch_overlap import ops
from torch_overlap.nn.functional import local_shard
from torch_overlap.nn.layout import comm_of
from torch_overlap.nn.styles.base import Style, first_tensor, with_first


class SequenceParallel(Style):
    """Marks a norm, or any module without communication, that works on this rank's part of the sequence.

    The gradients of its parameters, which every rank has in full, are summed over the ranks in the backward pass. It
    serves as well for a norm of split heads (q_norm, k_norm), with and without sequence parallelism.
    """

    def __init__(self) -> None:
        super().__init__()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._replicate(module, device_mesh, is_partial=True)
        return module


class ShardInput(Style):
    """Passes this rank's part of the module's first argument, which is whole on every rank.

    Use it where sequence parallelism begins: at the first block, since the code before it (embedding, mask) sees the
    whole sequence. The gradient is gathered, so the modules before it need no synchronization.

    Args:
        sequence_dim: the dimension to split. A length that the number of ranks does not divide is padded with zeros, of
            which the model's code sees nothing; under torch.compile and `parallelize_module` it must divide.
        argument: the name of the argument, if it is passed by name.
    """

    def __init__(self, *, sequence_dim: int = 1, argument: str = "hidden_states") -> None:
        super().__init__(sequence_dim=sequence_dim)
        self.argument = argument

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = comm_of(device_mesh)
        sequence = self._sequence(comm)

        def split(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = first_tensor("ShardInput", args, kwargs, self.argument)
            x = sequence.start(x, self.sequence_dim, module)
            return with_first(args, kwargs, self.argument, local_shard(x, self.sequence_dim, comm))

        module.register_forward_pre_hook(split, with_kwargs=True)
        return module


class GatherSequence(Style):
    """Gathers the result of a module that works on this rank's part of the sequence, such as the last norm.

    Use it where sequence parallelism ends: the code after it (a head of the last rows only, for example) sees the whole
    sequence, without padding. The gradients of the module's parameters are summed, as by `SequenceParallel`. The
    gradient of the result must be whole on every rank, as from a `ColumnParallel(sequence_parallel=False)`.

    Args:
        sequence_dim: the dimension of the result to gather.
    """

    def __init__(self, *, sequence_dim: int = 1) -> None:
        super().__init__(sequence_dim=sequence_dim)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = self._replicate(module, device_mesh, is_partial=True)
        sequence = self._sequence(comm)

        def gather(_: nn.Module, args: Any, y: Tensor) -> Tensor:
            whole = ops.all_gather(y, comm, self.sequence_dim, grad="I")
            return sequence.end(whole, self.sequence_dim)

        module.register_forward_hook(gather)
        return module
