"""CUTLASS's products for own_gemm.py, from the library that is built from benchmarks/cpp/cutlass."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import torch

from torch_overlap.gemm import GemmArgs

WORKSPACE_BYTES = 64 << 20  # stream-K: the partial sums of less than two waves of tiles


class Setting(NamedTuple):
    """The order in which a kernel visits the tiles: the settings that CUTLASS's profiler tries for each kernel."""

    swizzle: int
    raster: str  # along "m" or "n"


SETTINGS = [Setting(swizzle, raster) for swizzle in (1, 2, 4, 8) for raster in ("m", "n")]


class _Product(ctypes.Structure):
    """CutlassProduct of benchmarks/cpp/cutlass/gemm.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("lhs", "rhs", "lhs_scale", "rhs_scale", "out", "workspace", "stream")),
        ("workspace_bytes", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "swizzle", "along_n")),
    )


class CutlassKernels:
    """The kernels of a library, by name."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library.resolve()))
        self._library.cutlass_kernel_name.restype = ctypes.c_char_p
        self._library.cutlass_version.restype = ctypes.c_char_p
        self._library.cutlass_run.argtypes = [ctypes.c_int, ctypes.POINTER(_Product)]
        count = self._library.cutlass_kernel_count()
        self._indices = {self._library.cutlass_kernel_name(index).decode(): index for index in range(count)}
        self._workspace: torch.Tensor | None = None
        self.version: str = self._library.cutlass_version().decode()

    def names(self, dtype: str) -> list[str]:
        """Returns the kernels for "bf16" or "fp8"."""
        return [name for name in self._indices if name.startswith(dtype)]

    def run(self, args: GemmArgs, kernel: str, setting: Setting) -> None:
        """Enqueues lhs rhs^T; both operands are K-major.

        Raises:
            RuntimeError: the kernel does not support the product.
        """
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        lhs, rhs = args.lhs, args.rhs
        m, k = lhs.data.shape
        product = _Product(
            lhs=lhs.data.data_ptr(),
            rhs=rhs.data.data_ptr(),
            lhs_scale=None if lhs.scale_inv is None else lhs.scale_inv.data_ptr(),
            rhs_scale=None if rhs.scale_inv is None else rhs.scale_inv.data_ptr(),
            out=args.out.data_ptr(),
            workspace=self._workspace.data_ptr(),
            stream=torch.cuda.current_stream().cuda_stream,
            workspace_bytes=WORKSPACE_BYTES,
            m=m,
            n=rhs.data.shape[0],
            k=k,
            swizzle=setting.swizzle,
            along_n=setting.raster == "n",
        )
        if status := self._library.cutlass_run(self._indices[kernel], product):
            raise RuntimeError(f"{kernel}: expected a product that it takes, got cutlass::Status {status}")
