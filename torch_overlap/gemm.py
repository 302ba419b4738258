"""Matrix products with the epilogues, scalings and gradients of a linear layer, as values.

The product is row-major: `out [m, n] = epilogue(op(lhs) [m, k] @ op(rhs) [k, n])`, where `op` is the matrix as stored
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

These functions write into tensors that the caller made and have no gradients. The operator that allocates its output
and has gradients is `torch_overlap.ops.gemm`. On CUDA the work is on the current stream and may be captured in a graph.
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
    """Counts since process start, or since `reset_gemm_statistics`."""

    calls: int  # number of products that were not empty
    plans: int  # number of plans made: descriptors built
    queries: int  # number of queries of cuBLASLt for algorithms
    measured: int  # number of algorithms that were timed
    composed: int  # number of calls whose epilogue ran as torch operators after the product


def gemm(args: GemmArgs) -> None:
    """Computes one product.

    Args:
        args: lhs [m, k] and rhs [k, n] after their transposes, out [m, n]; rows of all matrices are contiguous. Without
            scaling the operands are float64, float32 (under torch's TF32 setting), float16 or bfloat16, and out has
            their dtype or float32. With scaling they are float8_e4m3fn or, at most one of them, float8_e5m2, and out is
            float32, float16 or bfloat16. All but float64 may also have an 8-bit out: `out = value * out_scale`,
            saturated, and `out_amax` becomes the largest |value|. Accumulation is in float32 (float64 for float64),
            rounded once.

    `residual`, a matrix like out or out itself, is added after the epilogue; `accumulate` adds to the content of out.
    Neither is supported with 8-bit out.

    8-bit operands must have contiguous rows along k (K-major): otherwise the operand is read from `columnwise_data`. k
    must be a multiple of 16 (MXFP8: 32), and rows must start at multiples of 16 bytes.

    Raises:
        InvalidValueError: a shape, a stride or a missing part.
        InvalidTypeError: a dtype or device.
        UnsupportedError: a combination that no backend supports, such as a residual with 8-bit out, or MXFP8 on a GPU
            without it after `set_gemm_mxfp8("native")`. Nothing is computed then.
    """
    _gemm.gemm(args)


def grouped_gemm(group: Sequence[GemmArgs]) -> None:
    """Computes several products of one device, in no particular order.

    On CUDA they run on up to four streams, which start after the work on the current stream; subsequent work on the
    current stream sees their results. No product may write a tensor that another one reads or writes. Sizes are known
    to the host and may be 0. All products are validated before any is computed; errors are those of `gemm`.

    Args:
        group: the products.
    """
    _gemm.grouped_gemm(list(group))


def set_gemm_tuning(tuning: Literal["heuristic", "measured", "best"]) -> None:
    """Sets how the algorithm for a new problem is chosen, for the whole process.

    Products of overlapped operators that run concurrently with transfers always use the first proposal: the algorithm
    that is fastest without transfers need not be so with them.

    Args:
        tuning: "heuristic" (the default) uses cuBLASLt's first proposal. "measured" times its first eight on the
            operands of the first call outside of a capture, which that call waits for; measured choices are kept.
            "best" also times our own kernels, which exist on sm_90 for float16, bfloat16 and 8-bit floats: with rhs
            transposed or not and lhs not transposed, or, for 16 bits, lhs transposed and rhs not; with a bias, GELU, a
            residual.
    """
    _gemm.set_gemm_tuning(tuning)


def set_gemm_mxfp8(path: Literal["dequantize", "native"]) -> None:
    """Sets how MXFP8 runs on a GPU whose tensor cores do not support it (sm_100 and sm_110 do), for the whole process.

    Args:
        path: "dequantize" (the default) multiplies in bfloat16; "native" raises UnsupportedError.
    """
    _gemm.set_gemm_mxfp8(path)


def gemm_statistics() -> GemmStatistics:
    """Returns the counts. A call with an existing plan adds 1 to `calls` and nothing to `plans` and `queries`."""
    return _gemm.gemm_statistics()


def reset_gemm_statistics() -> None:
    """Sets all counts to 0. Plans are kept."""
    _gemm.reset_gemm_statistics()
