"""Types of the compiled products, which torch_overlap/gemm.py documents."""

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from torch_overlap._C import ScalingMode
from torch_overlap.gemm import GemmStatistics

class GemmOperand:
    def __init__(
        self,
        data: Tensor,
        transposed: bool = False,
        *,
        scaling: int = 0,
        scale_inv: Tensor | None = None,
        swizzled: bool = False,
        columnwise_data: Tensor | None = None,
        columnwise_scale_inv: Tensor | None = None,
    ) -> None: ...
    data: Final[Tensor]
    transposed: Final[bool]
    scaling: Final[ScalingMode]
    scale_inv: Final[Tensor | None]
    swizzled: Final[bool]
    columnwise_data: Final[Tensor | None]
    columnwise_scale_inv: Final[Tensor | None]

class GemmArgs:
    def __init__(
        self,
        lhs: GemmOperand,
        rhs: GemmOperand,
        out: Tensor,
        *,
        bias: Tensor | None = None,
        gelu: bool = False,
        pre_gelu_out: Tensor | None = None,
        gelu_input: Tensor | None = None,
        bias_grad: Tensor | None = None,
        residual: Tensor | None = None,
        accumulate: bool = False,
        use_split_accumulator: bool = False,
        out_scale: Tensor | None = None,
        out_amax: Tensor | None = None,
        sm_target: int = 0,
        workspace: Tensor | None = None,
    ) -> None: ...
    lhs: Final[GemmOperand]
    rhs: Final[GemmOperand]
    out: Final[Tensor]
    bias: Final[Tensor | None]
    gelu: Final[bool]
    pre_gelu_out: Final[Tensor | None]
    gelu_input: Final[Tensor | None]
    bias_grad: Final[Tensor | None]
    residual: Final[Tensor | None]
    accumulate: Final[bool]
    use_split_accumulator: Final[bool]
    out_scale: Final[Tensor | None]
    out_amax: Final[Tensor | None]
    sm_target: Final[int]
    workspace: Final[Tensor | None]
    def rows(self, begin: int, length: int) -> GemmArgs: ...
    def columns(self, begin: int, length: int) -> GemmArgs: ...

def gemm(args: GemmArgs) -> None: ...
def grouped_gemm(group: Sequence[GemmArgs]) -> None: ...
def custom_gemm_kernels(args: GemmArgs) -> list[str]: ...
def run_custom_gemm_kernel(args: GemmArgs, kernel: str) -> None: ...
def set_gemm_tuning(tuning: str) -> None: ...
def set_gemm_mxfp8(path: str) -> None: ...
def gemm_statistics() -> GemmStatistics: ...
def reset_gemm_statistics() -> None: ...
