"""The platform: vLLM's CUDA platform with our communicator and pass manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms.cuda import CudaPlatform

from torch_overlap.compat.vllm.sizes import max_fused_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["OverlapPlatform"]


class OverlapPlatform(CudaPlatform):  # type: ignore[misc]
    """vLLM's CUDA platform, which names our device communicator and our pass manager in place of vLLM's.

    Everything else is inherited: it is still the CUDA platform to vLLM.
    """

    # Ray's workers get the variable too.
    additional_env_vars = (*CudaPlatform.additional_env_vars, "TORCH_OVERLAP_VLLM")

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Returns the name of our communicator class; that of vLLM's for elastic expert parallelism, which needs it."""
        from vllm.config import get_current_vllm_config_or_none

        config: VllmConfig | None = get_current_vllm_config_or_none()
        if config is not None and config.parallel_config.enable_elastic_ep:
            name: str = super().get_device_communicator_cls()
            return name
        return "torch_overlap.compat.vllm.communicator.OverlapCommunicator"

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        """Returns the name of our pass manager class."""
        return "torch_overlap.compat.vllm.fusion.OverlapPassManager"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Adds a range of token counts that vLLM compiles separately: the range in which our pass fuses.

        Args:
            vllm_config: changed in place.
        """
        super().check_and_update_config(vllm_config)
        compilation_config, model_config = vllm_config.compilation_config, vllm_config.model_config
        if model_config is None or not compilation_config.pass_config.fuse_allreduce_rms:
            return
        num_tokens = max_fused_tokens(
            vllm_config.parallel_config.tensor_parallel_size,
            model_config.get_hidden_size(),
            model_config.dtype.itemsize,
        )
        if num_tokens > 1:
            endpoints = compilation_config.compile_ranges_endpoints or []
            compilation_config.compile_ranges_endpoints = sorted({*endpoints, num_tokens})
