"""What hooks are given: one class an operation, with the operation's arguments.

    def show(name: OpName, op_id: int, args: PreHookArgs) -> None: ...
    handle = comm.register_pre_hook(show)

Ready to use: `FlightRecorderHook`, `NanCheckHook`, `clog` and `HealthCheck`; each but the last has
`register_with_comm(comm)`.

Tensors are the ones that the operation reads and writes (of lists and pieces: views of them), so a hook may look at
values before an operation, but keeps none longer than it must.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from torch_overlap._C import OpName, P2POp, ReduceOp, TorchWork
from torch_overlap._debug_hooks import FlightRecorderHook, HealthCheck, NanCheckHook, clog

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

# One class an operation: its fields are its arguments.


@dataclass(frozen=True)
class SendPreHookArgs:
    """`tensor` goes to rank `peer`."""

    tensor: Tensor
    peer: int
    async_op: bool


@dataclass(frozen=True)
class RecvPreHookArgs:
    """`tensor` becomes what rank `peer` sends."""

    tensor: Tensor
    peer: int
    async_op: bool


@dataclass(frozen=True)
class BroadcastPreHookArgs:
    """`tensor` becomes that of rank `root`."""

    tensor: Tensor
    root: int
    async_op: bool


@dataclass(frozen=True)
class AllReducePreHookArgs:
    """`tensor` becomes the reduction of all."""

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
    """`tensor` of rank `root` becomes the reduction of all."""

    tensor: Tensor
    root: int
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class AllGatherPreHookArgs:
    """output[r] becomes the `input` of rank r."""

    output: list[Tensor]
    input: Tensor
    async_op: bool


@dataclass(frozen=True)
class AllGatherVPreHookArgs:
    """output[r] becomes the `input` of rank r, of sizes that may differ by rank."""

    output: list[Tensor]
    input: Tensor
    async_op: bool


@dataclass(frozen=True)
class AllGatherSinglePreHookArgs:
    """The r-th piece of `output` becomes the `input` of rank r."""

    output: Tensor
    input: Tensor
    async_op: bool


@dataclass(frozen=True)
class ReduceScatterPreHookArgs:
    """`output` of rank r becomes the reduction of all input[r]."""

    output: Tensor
    input: list[Tensor]
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class ReduceScatterVPreHookArgs:
    """`output` of rank r becomes the reduction of all input[r], of sizes that may differ by rank."""

    output: Tensor
    input: list[Tensor]
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class ReduceScatterSinglePreHookArgs:
    """`output` of rank r becomes the reduction of the r-th pieces of `input`."""

    output: Tensor
    input: Tensor
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class AllToAllPreHookArgs:
    """output[r] becomes what rank r's `input` has for this rank."""

    output: list[Tensor]
    input: list[Tensor]
    async_op: bool


@dataclass(frozen=True)
class AllToAllSinglePreHookArgs:
    """The r-th piece of `output` becomes the piece of rank r's `input` of this rank's number."""

    output: Tensor
    input: Tensor
    async_op: bool


@dataclass(frozen=True)
class AllToAllVSinglePreHookArgs:
    """all_to_all_single in pieces of so many slices of dimension 0, by rank."""

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
    """`output` of rank r becomes input[r] of rank `root`; `input` is empty elsewhere."""

    output: Tensor
    input: list[Tensor]
    root: int
    async_op: bool


@dataclass(frozen=True)
class GatherPreHookArgs:
    """output[r] of rank `root` becomes the `input` of rank r; `output` is empty elsewhere."""

    output: list[Tensor]
    input: Tensor
    root: int
    async_op: bool


@dataclass(frozen=True)
class GatherSinglePreHookArgs:
    """The r-th piece of `output` of rank `root` becomes the `input` of rank r; None elsewhere."""

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
        """How many sends and receives there are."""
        return len(self.ops)


@dataclass(frozen=True)
class PutPreHookArgs:
    """`tensor` goes to the window of rank `peer`, from element `offset` on."""

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
    """The members of the new communicator, empty where this rank is none, and its name if one was given."""

    ranks: list[int]
    name: str | None


@dataclass(frozen=True)
class NewWindowPreHookArgs:
    """new_window() begins."""


@dataclass(frozen=True)
class FinalizePreHookArgs:
    """finalize() begins; operations may still be under way."""


@dataclass(frozen=True)
class CollectivePostHookArgs:
    """`error` is what the operation raised when it was issued, or None; `work` is its work, where it has one."""

    name: OpName
    error: BaseException | None
    work: TorchWork | None = None


@dataclass(frozen=True)
class BatchOpIssuePostHookArgs(CollectivePostHookArgs):
    """After a batch was issued."""


@dataclass(frozen=True)
class SplitPostHookArgs(CollectivePostHookArgs):
    """After a split; it has no work."""


@dataclass(frozen=True)
class NewWindowPostHookArgs(CollectivePostHookArgs):
    """After a window was made; it has no work."""


@dataclass(frozen=True)
class FinalizePostHookArgs(CollectivePostHookArgs):
    """After finalize(); it has no work."""


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
    """Called from C++ for each operation while there are pre-hooks."""
    args: PreHookArgs = _PRE[name.name](**fields)
    return args


def _make_post_args(name: OpName, error: BaseException | None, work: TorchWork | None) -> PostHookArgs:
    args: PostHookArgs = _POST[name.name](name, error, work)
    return args
