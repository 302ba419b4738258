"""One group, and the operator by which a compiled model sums over it."""

from __future__ import annotations

import torch
from stand_in_operators import ALL_REDUCE
from torch import Tensor

from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator


class GroupCoordinator:
    unique_name: str
    device_communicator: CudaCommunicator | None

    def __init__(self, unique_name: str, device_communicator: CudaCommunicator | None) -> None:
        self.unique_name, self.device_communicator = unique_name, device_communicator


_groups: dict[str, GroupCoordinator] = {}


def set_tp_group(group: GroupCoordinator) -> None:
    assert group.device_communicator is not None
    _groups["tp"] = group
    ALL_REDUCE[group.unique_name] = group.device_communicator.all_reduce


def get_tp_group() -> GroupCoordinator:
    return _groups["tp"]


def tensor_model_parallel_all_reduce(input_: Tensor) -> Tensor:
    return torch.ops.vllm.all_reduce(input_, group_name=get_tp_group().unique_name)
