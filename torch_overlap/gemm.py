"""Matrix products with the epilogues, scalings and gradients of a linear layer, as values.

The product is row-major: `out [m, n] = epilogue(op(lhs) [m, k] @ op(rhs) [k, n])`, where `op` is the matrix as it lies
or its transpose.

| | lhs | rhs |
|---|---|---|
| forward, y | x [tokens, in] | w [out, in], transposed |
| gradient, dx | dy [tokens, out] | w [out, in] |
| gradient, dw | dy [tokens, out], transposed | x [tokens, in] |

```python
from torch_overlap.gemm import GemmArgs, GemmOperand, gemm

gemm(GemmArgs(GemmOperand(x), GemmOperand(w, transposed=True), out, bias=b, gelu=True, pre_gelu_out=h))
```

These functions write into tensors that the caller made and have no gradients; the operator with both is
`torch_overlap.ops.gemm`. On CUDA the work is on the current stream and may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from torch_overlap import _gemm
from torch_overlap._C import ScalingMode
from torch_overlap._gemm import GemmArgs, GemmOperand

__all__ = [
    "GemmArgs",
    "GemmOperand",
    "GemmStatistics",
    "ScalingMode",
    "gemm",
    "gemm_statistics",
    "grouped_gemm",
    "reset_gemm_statistics",
    "set_gemm_mxfp8",
    "set_gemm_tuning",
]


class GemmStatistics(TypedDict):
    """Counts since the process began, or since `reset_gemm_statistics`."""

    calls: int  # products that were not empty
    plans: int  # plans made: descriptors built
    queries: int  # times that cuBLASLt was asked for algorithms
    measured: int  # algorithms whose time was measured
    composed: int  # calls whose epilogue ran as operators of torch after the product


def gemm(args: GemmArgs) -> None:
    """Computes one product.

    Args:
        args: lhs [m, k] and rhs [k, n] after their transposes, out [m, n]; rows of all matrices are contiguous. Without
            scaling the operands are float64, float32 (under torch's TF32 setting), float16 or bfloat16, and out is of
            their dtype or float32. With scaling they are float8_e4m3fn or, one at most, float8_e5m2, and out is
            float32, float16 or bfloat16. All but float64 may also go into 8 bits: `out = value * out_scale`, saturated,
            and `out_amax` becomes the largest |value|. Sums are float32 (float64), rounded once.

    Behind the epilogue `residual`, a matrix like out or out itself, is added; `accumulate` adds to what out holds. Not
    with 8-bit out.

    8-bit operands need rows along k: an operand that has them not is read from `columnwise_data`. k is a multiple of 16
    (MXFP8: 32), rows begin at multiples of 16 bytes.

    Raises:
        InvalidValueError: a shape, stride or missing part; InvalidTypeError: a dtype or device; UnsupportedError: a
            combination that no backend has, such as a residual for 8 bits, or MXFP8 on a GPU without it after
            `set_gemm_mxfp8("native")`. Nothing is computed then.
    """
    _gemm.gemm(args)


def grouped_gemm(group: Sequence[GemmArgs]) -> None:
    """Computes several products of one device, in no order among themselves.

    On CUDA they run on up to four streams, which begin after what is on the current stream; their results are there for
    what follows on it. None may write what another reads or writes. Sizes are the host's and may be 0. All are checked
    before any is computed; errors are those of `gemm`.
    """
    _gemm.grouped_gemm(list(group))


def set_gemm_tuning(tuning: Literal["heuristic", "measured", "best"]) -> None:
    """How the algorithm for a new problem is chosen, in the whole process.

    "heuristic" (the default) takes cuBLASLt's first proposal. "measured" times its first eight on the operands of the
    first call outside of a capture, for which that call waits; choices that were measured stay. What overlapped
    operators multiply beside transfers goes by the first proposal: what is quickest alone need not be so there.
    "best" times our own kernels too, which an sm_90 has for float16, bfloat16 and 8-bit floats: with rhs transposed or
    not, lhs as it is, or of 16 bits lhs transposed and rhs not, a bias, GELU, a residual.
    """
    _gemm.set_gemm_tuning(tuning)


def set_gemm_mxfp8(path: Literal["dequantize", "native"]) -> None:
    """What MXFP8 does on a GPU whose tensor cores do not read it (they do on sm_100 and sm_110), in the whole process.

    "dequantize" (the default) multiplies in bfloat16; "native" raises UnsupportedError.
    """
    _gemm.set_gemm_mxfp8(path)


def gemm_statistics() -> GemmStatistics:
    """The counts. A call with a plan adds 1 to `calls` and nothing to `plans` and `queries`."""
    counts = _gemm.gemm_statistics()
    return GemmStatistics(**counts)


def reset_gemm_statistics() -> None:
    """Sets all counts to 0. Plans stay."""
    _gemm.reset_gemm_statistics()
