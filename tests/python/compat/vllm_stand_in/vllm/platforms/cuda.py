from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CudaPlatform:
    additional_env_vars: list[str] = ["SOMETHING"]  # noqa: RUF012

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        return "vllm.compilation.passes.pass_manager.PostGradPassManager"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        vllm_config.compilation_config.custom_ops.append("+checked")
