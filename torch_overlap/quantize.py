"""8-bit tensors as values, and the state of delayed scaling.

    from torch_overlap import quantize
    weight8 = quantize.quantize(weight)                          # one scale from the largest magnitude
    y, *_ = ops.gemm(x8.data, x8.scale_inv, weight8.data, weight8.scale_inv, scaling_mode=weight8.scaling_mode,
                     rhs_transposed=True)

The layouts of data and scales are those of `torch_overlap.ops.quantize`. Nothing here waits for a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_overlap import ops
from torch_overlap._C import ScalingMode

__all__ = ["DelayedScaling", "Quantized", "ScalingMode", "quantize"]


class Quantized(NamedTuple):
    """A matrix of 8-bit floats and its scales; value = data * scale_inv.

    `columnwise_data` [cols, rows] is the transposed matrix, quantized along its own rows, or None.
    """

    data: Tensor
    scale_inv: Tensor
    scaling_mode: ScalingMode
    swizzled: bool = False
    columnwise_data: Tensor | None = None
    columnwise_scale_inv: Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the values, rounded once from float32."""
        return ops.dequantize(self.data, self.scale_inv, self.scaling_mode, dtype, swizzled=self.swizzled)

    def transposed(self) -> Quantized:
        """Returns the transposed matrix of a quantization with columnwise=True."""
        if self.columnwise_data is None or self.columnwise_scale_inv is None:
            raise ValueError("Quantized.transposed: expected columnwise data, got none; quantize with columnwise=True")
        return Quantized(
            self.columnwise_data,
            self.columnwise_scale_inv,
            self.scaling_mode,
            self.swizzled,
            self.data if self.data.dim() == 2 else self.data.flatten(0, -2),
            self.scale_inv,
        )


def quantize(
    x: Tensor,
    scaling_mode: ScalingMode = ScalingMode.CURRENT_TENSOR_SCALING,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    columnwise: bool = False,
    swizzled: bool = False,
    power_of_two: bool = False,
) -> Quantized:
    """Applies `torch_overlap.ops.quantize` to a detached x [..., cols], and returns one value."""
    data, scale_inv, columns, column_scales = ops.quantize(
        x.detach(), scaling_mode, dtype, columnwise=columnwise, swizzled=swizzled, power_of_two=power_of_two
    )
    if not columnwise:
        return Quantized(data, scale_inv, scaling_mode, swizzled)
    one_scale = scaling_mode in (ScalingMode.CURRENT_TENSOR_SCALING, ScalingMode.DELAYED_TENSOR_SCALING)
    return Quantized(data, scale_inv, scaling_mode, swizzled, columns, scale_inv if one_scale else column_scales)


class DelayedScaling:
    """The scale of one tensor, from the largest magnitudes of its last steps.

        scaling = DelayedScaling(device="cuda")
        for step in ...:
            x8 = scaling.quantize(x)      # any number of times
            scaling.update()              # at the end of the step

    Ranks that share a scale must reduce `amax_history[0]` by maximum over the ranks before `update`.

    Args:
        length: number of steps in the history.
        dtype: the 8-bit type.
        margin: the scale is divided by 2^margin.
        amax_compute: "max" of the history, or its "most_recent" entry.
        device: the device of the scale and the history.
    """

    def __init__(
        self,
        length: int = 1024,
        dtype: torch.dtype = torch.float8_e4m3fn,
        *,
        margin: int = 0,
        amax_compute: str = "max",
        device: torch.device | str | None = None,
    ) -> None:
        if length < 1:
            raise ValueError(f"DelayedScaling: expected a history of one or more steps, got {length}")
        self.dtype = dtype
        self.margin = margin
        self.amax_compute = amax_compute
        self.scale = torch.ones(1, device=device)
        self.amax_history = torch.zeros(length, device=device)

    def quantize(self, x: Tensor, *, columnwise: bool = False) -> Quantized:
        """Returns `x * scale`, and records the largest magnitude of x in entry 0 of the history."""
        data, scale_inv, columns, amax = ops.quantize_delayed(x.detach(), self.scale, self.dtype, columnwise=columnwise)
        self.amax_history[:1].copy_(torch.maximum(self.amax_history[:1], amax))
        mode = ScalingMode.DELAYED_TENSOR_SCALING
        if not columnwise:
            return Quantized(data, scale_inv, mode)
        return Quantized(data, scale_inv, mode, False, columns, scale_inv)

    def update(self) -> None:
        """Ends a step: computes a new scale, and rotates the history. See `torch_overlap.ops.update_scale_`."""
        ops.update_scale_(self.amax_history, self.scale, self.dtype, margin=self.margin, amax_compute=self.amax_compute)
