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
from torch_overlap._debug_hooks import FlightRecorderHook as FlightRecorderHook
from torch_overlap._debug_hooks import HealthCheck as HealthCheck
from torch_overlap._debug_hooks import NanCheckHook as NanCheckHook
from torch_overlap._debug_hooks import clog as clog

# One line an operation: its fields are its arguments.


@dataclass(frozen=True)
class SendPreHookArgs:
    tensor: Tensor
    peer: int
    async_op: bool


@dataclass(frozen=True)
class RecvPreHookArgs:
    tensor: Tensor
    peer: int
    async_op: bool


@dataclass(frozen=True)
class BroadcastPreHookArgs:
    tensor: Tensor
    root: int
    async_op: bool


@dataclass(frozen=True)
class AllReducePreHookArgs:
    tensor: Tensor
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class AllReduceRmsNormPreHookArgs:
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
    tensor: Tensor
    root: int
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class AllGatherPreHookArgs:
    output: list[Tensor]
    input: Tensor
    async_op: bool


@dataclass(frozen=True)
class AllGatherVPreHookArgs:
    output: list[Tensor]
    input: Tensor
    async_op: bool


@dataclass(frozen=True)
class AllGatherSinglePreHookArgs:
    output: Tensor
    input: Tensor
    async_op: bool


@dataclass(frozen=True)
class ReduceScatterPreHookArgs:
    output: Tensor
    input: list[Tensor]
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class ReduceScatterVPreHookArgs:
    output: Tensor
    input: list[Tensor]
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class ReduceScatterSinglePreHookArgs:
    output: Tensor
    input: Tensor
    op: ReduceOp
    async_op: bool


@dataclass(frozen=True)
class AllToAllPreHookArgs:
    output: list[Tensor]
    input: list[Tensor]
    async_op: bool


@dataclass(frozen=True)
class AllToAllSinglePreHookArgs:
    output: Tensor
    input: Tensor
    async_op: bool


@dataclass(frozen=True)
class AllToAllVSinglePreHookArgs:
    output: Tensor
    input: Tensor
    output_split_sizes: list[int]
    input_split_sizes: list[int]
    async_op: bool


@dataclass(frozen=True)
class BarrierPreHookArgs:
    async_op: bool


@dataclass(frozen=True)
class ScatterPreHookArgs:
    output: Tensor
    input: list[Tensor]
    root: int
    async_op: bool


@dataclass(frozen=True)
class GatherPreHookArgs:
    output: list[Tensor]
    input: Tensor
    root: int
    async_op: bool


@dataclass(frozen=True)
class GatherSinglePreHookArgs:
    output: Tensor | None
    input: Tensor
    root: int
    async_op: bool


@dataclass(frozen=True)
class BatchOpIssuePreHookArgs:
    ops: list[P2POp]
    async_op: bool

    @property
    def num_ops(self) -> int:
        return len(self.ops)


@dataclass(frozen=True)
class PutPreHookArgs:
    tensor: Tensor
    peer: int
    offset: int
    async_op: bool


@dataclass(frozen=True)
class SignalPreHookArgs:
    peer: int
    async_op: bool


@dataclass(frozen=True)
class WaitSignalPreHookArgs:
    peer: int
    async_op: bool


@dataclass(frozen=True)
class SplitPreHookArgs:
    ranks: list[int]
    name: str | None


@dataclass(frozen=True)
class NewWindowPreHookArgs:
    pass


@dataclass(frozen=True)
class FinalizePreHookArgs:
    pass


@dataclass(frozen=True)
class CollectivePostHookArgs:
    """`error` is what the operation raised when it was issued, or None; `work` is its work, where it has one."""

    name: OpName
    error: BaseException | None
    work: TorchWork | None = None


@dataclass(frozen=True)
class BatchOpIssuePostHookArgs(CollectivePostHookArgs):
    pass


@dataclass(frozen=True)
class SplitPostHookArgs(CollectivePostHookArgs):
    pass


@dataclass(frozen=True)
class NewWindowPostHookArgs(CollectivePostHookArgs):
    pass


@dataclass(frozen=True)
class FinalizePostHookArgs(CollectivePostHookArgs):
    pass


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
