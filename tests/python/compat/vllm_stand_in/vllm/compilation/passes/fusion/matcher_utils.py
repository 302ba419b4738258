"""Static quantization to float8_e4m3fn: as ATen operators, or as one operator if the configuration has it."""

from __future__ import annotations

from typing import Any

import torch
from stand_in_operators import quantized
from torch import Tensor
from torch._higher_order_ops import auto_functionalized
from vllm.config import get_current_vllm_config_or_none


class MatcherQuantFP8:
    def __init__(
        self,
        quant_key: Any,
        enabled: bool | None = None,
        has_col_major_scales: bool = False,
        is_e8m0: bool = False,
        match_rocm_aiter: bool = False,
        is_tma_aligned: bool = False,
    ) -> None:
        config = get_current_vllm_config_or_none()
        assert config is not None, "the plug-in did not set the configuration"
        assert quant_key == "float8_e4m3fn, static, per tensor"
        self.enabled = "+quant_fp8" in config.compilation_config.custom_ops

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        input, scale = args
        if not self.enabled:
            return quantized(input, scale), scale
        result = torch.empty(input.shape, device=input.device, dtype=torch.float8_e4m3fn)
        operator = torch.ops._C.static_scaled_fp8_quant.default
        return auto_functionalized(operator, result=result, input=input, scale=scale)[1], scale

    def inputs(self) -> list[Tensor]:
        return [torch.empty(5, 16), torch.empty(1, 1)]
