"""Arguments of hooks: one class per operation, with the operation's arguments.

    def show(name: OpName, op_id: int, args: PreHookArgs) -> None: ...
    handle = comm.register_pre_hook(show)

Ready to use: `FlightRecorderHook`, `NanCheckHook`, `clog` and `HealthCheck`; all but the last have
`register_with_comm(comm)`.

Tensors are those that the operation reads and writes (views of them, for lists and pieces). A hook may therefore read
values before an operation, but should not keep the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from torch_overlap._C import OpName, P2POp, ReduceOp, TorchComm, TorchWork
from torch_overlap.compat._debug_hooks import FlightRecorderHook, HealthCheck, NanCheckHook, clog

__all__ = [
    "AllGatherPreHookArgs",
    "AllGatherSinglePreHookArgs",
    "AllGatherVPreHookArgs",
    "AllReducePreHookArgs",
    "AllReduceRmsNormPreHookArgs",
    "AllToAllPreHookArgs",
    "AllToAllSinglePreHookArgs",
    "AllToAllVSinglePreHookArgs",
    "BarrierPreHookArgs",
    "BatchOpIssuePostHookArgs",
    "BatchOpIssuePreHookArgs",
    "BroadcastPreHookArgs",
    "CollectivePostHookArgs",
    "FinalizePostHookArgs",
    "FinalizePreHookArgs",
    "FlightRecorderHook",
    "GatherPreHookArgs",
    "GatherSinglePreHookArgs",
    "HealthCheck",
    "NanCheckHook",
    "NewWindowPostHookArgs",
    "NewWindowPreHookArgs",
    "PostHookArgs",
    "PreHookArgs",
    "PutPreHookArgs",
    "RecvPreHookArgs",
    "ReducePreHookArgs",
    "ReduceScatterPreHookArgs",
    "ReduceScatterSinglePreHookArgs",
    "ReduceScatterVPreHookArgs",
    "ScatterPreHookArgs",
    "SendPreHookArgs",
    "SignalPreHookArgs",
    "SplitPostHookArgs",
    "SplitPreHookArgs",
    "WaitSignalPreHookArgs",
    "clog",
]

# One class per operation: its fields are the operation's arguments.


@dataclass(frozen=True)
class SendPreHookArgs:
    """Sends `tensor` to rank `peer`."""

    tensor: Tensor
    peer: int
    async_op: bool


@dataclass(frozen=True)
class RecvPreHookArgs:
    """Receives `tensor` from rank `peer`."""

    tensor: Tensor
    peer: int
    async_op: bool


@dataclass(frozen=True)
class BroadcastPreHookArgs:
    """Copies the `tensor` of rank `root` to all ranks."""

    tensor: Tensor
    root: int
    async_op: bool


@dataclass(frozen=True)
class AllReducePreHookArgs:
    """Reduces `tensor` over all ranks."""

    tensor: Tensor
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class AllReduceRmsNormPreHookArgs:
    """residual_out = residual + the sum of `tensor` + bias; `tensor` becomes its RMS norm times weight."""

    tensor: Tensor
    residual: Tensor
    residual_out: Tensor
    weight: Tensor
    bias: Tensor | None
    eps: float
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class ReducePreHookArgs:
    """Reduces `tensor` over all ranks into that of rank `root`."""

    tensor: Tensor
    root: int
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class AllGatherPreHookArgs:
    """Copies the `input` of rank r into output[r]."""

    output: list[Tensor]
    input: Tensor
    async_op: bool


@dataclass(frozen=True)
class AllGatherVPreHookArgs:
    """Copies the `input` of rank r into output[r], with sizes that may differ by rank."""

    output: list[Tensor]
    input: Tensor
    async_op: bool


@dataclass(frozen=True)
class AllGatherSinglePreHookArgs:
    """Copies the `input` of rank r into piece r of `output`."""

    output: Tensor
    input: Tensor
    async_op: bool


@dataclass(frozen=True)
class ReduceScatterPreHookArgs:
    """Reduces all ranks' input[r] into the `output` of rank r."""

    output: Tensor
    input: list[Tensor]
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class ReduceScatterVPreHookArgs:
    """Reduces all ranks' input[r] into the `output` of rank r, with sizes that may differ by rank."""

    output: Tensor
    input: list[Tensor]
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class ReduceScatterSinglePreHookArgs:
    """Reduces piece r of all ranks' `input` into the `output` of rank r."""

    output: Tensor
    input: Tensor
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class AllToAllPreHookArgs:
    """Copies the element of rank r's `input` that belongs to this rank into output[r]."""

    output: list[Tensor]
    input: list[Tensor]
    async_op: bool


@dataclass(frozen=True)
class AllToAllSinglePreHookArgs:
    """Copies the piece of rank r's `input` that belongs to this rank into piece r of `output`."""

    output: Tensor
    input: Tensor
    async_op: bool


@dataclass(frozen=True)
class AllToAllVSinglePreHookArgs:
    """all_to_all_single with pieces of given numbers of slices of dimension 0, by rank."""

    output: Tensor
    input: Tensor
    output_split_sizes: list[int]
    input_split_sizes: list[int]
    async_op: bool


@dataclass(frozen=True)
class BarrierPreHookArgs:
    """A barrier, which has no tensors."""

    async_op: bool


@dataclass(frozen=True)
class ScatterPreHookArgs:
    """Copies input[r] of rank `root` into the `output` of rank r; `input` is empty elsewhere."""

    output: Tensor
    input: list[Tensor]
    root: int
    async_op: bool


@dataclass(frozen=True)
class GatherPreHookArgs:
    """Copies the `input` of rank r into output[r] of rank `root`; `output` is empty elsewhere."""

    output: list[Tensor]
    input: Tensor
    root: int
    async_op: bool


@dataclass(frozen=True)
class GatherSinglePreHookArgs:
    """Copies the `input` of rank r into piece r of the `output` of rank `root`; None elsewhere."""

    output: Tensor | None
    input: Tensor
    root: int
    async_op: bool


@dataclass(frozen=True)
class BatchOpIssuePreHookArgs:
    """The sends and receives of a batch."""

    ops: list[P2POp]
    async_op: bool

    @property
    def num_ops(self) -> int:
        """Returns the number of sends and receives."""
        return len(self.ops)


@dataclass(frozen=True)
class PutPreHookArgs:
    """Copies `tensor` to the window of rank `peer`, starting at element `offset`."""

    tensor: Tensor
    peer: int
    offset: int
    async_op: bool


@dataclass(frozen=True)
class SignalPreHookArgs:
    """A signal of a window to rank `peer`."""

    peer: int
    async_op: bool


@dataclass(frozen=True)
class WaitSignalPreHookArgs:
    """A wait for a signal of rank `peer`."""

    peer: int
    async_op: bool


@dataclass(frozen=True)
class SplitPreHookArgs:
    """The members of the new communicator (empty if this rank is not a member), and its name if one was given."""

    ranks: list[int]
    name: str | None


@dataclass(frozen=True)
class NewWindowPreHookArgs:
    """Called before new_window()."""


@dataclass(frozen=True)
class FinalizePreHookArgs:
    """Called before finalize(); operations may still be in flight."""


@dataclass(frozen=True)
class CollectivePostHookArgs:
    """`error` is the exception that issuing the operation raised, or None; `work` is its work, if it has one."""

    name: OpName
    error: BaseException | None
    work: TorchWork | None = None


@dataclass(frozen=True)
class BatchOpIssuePostHookArgs(CollectivePostHookArgs):
    """Called after a batch was issued."""


@dataclass(frozen=True)
class SplitPostHookArgs(CollectivePostHookArgs):
    """Called after a split; it has no work. `new_comm` is None if this rank is not a member."""

    new_comm: TorchComm | None = None


@dataclass(frozen=True)
class NewWindowPostHookArgs(CollectivePostHookArgs):
    """Called after a window was made; it has no work."""


@dataclass(frozen=True)
class FinalizePostHookArgs(CollectivePostHookArgs):
    """Called after finalize(); it has no work."""


PreHookArgs: TypeAlias = (
    SendPreHookArgs
    | RecvPreHookArgs
    | BroadcastPreHookArgs
    | AllReducePreHookArgs
    | AllReduceRmsNormPreHookArgs
    | ReducePreHookArgs
    | AllGatherPreHookArgs
    | AllGatherVPreHookArgs
    | AllGatherSinglePreHookArgs
    | ReduceScatterPreHookArgs
    | ReduceScatterVPreHookArgs
    | ReduceScatterSinglePreHookArgs
    | AllToAllPreHookArgs
    | AllToAllSinglePreHookArgs
    | AllToAllVSinglePreHookArgs
    | BarrierPreHookArgs
    | ScatterPreHookArgs
    | GatherPreHookArgs
    | GatherSinglePreHookArgs
    | BatchOpIssuePreHookArgs
    | PutPreHookArgs
    | SignalPreHookArgs
    | WaitSignalPreHookArgs
    | SplitPreHookArgs
    | NewWindowPreHookArgs
    | FinalizePreHookArgs
)
PostHookArgs: TypeAlias = CollectivePostHookArgs


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


_PRE: dict[str, Any] = {name: globals()[f"{_camel(name)}PreHookArgs"] for name in OpName.__members__}
_POST: dict[str, Any] = {
    name: globals().get(f"{_camel(name)}PostHookArgs", CollectivePostHookArgs) for name in OpName.__members__
}


def _make_pre_args(name: OpName, fields: dict[str, Any]) -> PreHookArgs:
    """Makes the arguments of an operation's pre-hooks. Called from C++ if there are any."""
    args: PreHookArgs = _PRE[name.name](**fields)
    return args


def _make_post_args(
    name: OpName, error: BaseException | None, work: TorchWork | None, new_comm: TorchComm | None
) -> PostHookArgs:
    if name is OpName.split:
        return SplitPostHookArgs(name, error, work, new_comm)
    args: PostHookArgs = _POST[name.name](name, error, work)
    return args
