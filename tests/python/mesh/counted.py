"""Bytes moved by a program's elementwise kernels: its ATen operators as they run, without products and attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PRODUCTS = ("mm.", "matmul", "attention", "embedding_dense_backward")
# Operators of many tensors at once: number of passes over their operands. AdamW reads four and writes three of four.
_PASSES = {"_foreach_norm": 1.0, "_foreach_mul_": 2.0, "_foreach_add_": 2.0, "_foreach_copy_": 1.0,
           "_fused_adamw_": 7 / 4}  # fmt: skip


class Counted(TorchDispatchMode):
    """Sums the bytes of operands and results, each read or written once; views move nothing.

    Attributes:
        bytes: Number of bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        if name.startswith("torch_overlap.") or any(part in name for part in _PRODUCTS):
            return out
        operands, results = _tensors((args, kwargs)), _tensors(out)
        if (passes := _PASSES.get(name.split(".")[0])) is not None:
            self.bytes += passes * sum(map(_size, operands))
        elif not _is_view(func):
            self.bytes += sum(map(_size, results))
            self.bytes += sum(map(_size, operands)) if name != "zero_.default" else 0
            if name.startswith("native_layer_norm_backward"):  # another kernel, for the weight
                self.bytes += 2 * _size(operands[0])
        return out


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def _is_view(func: Any) -> bool:
    returns = [r.alias_info for r in func._schema.returns]
    is_view_by_name = any(part in str(func) for part in ("_unsafe_view", "unsafe_split"))
    return is_view_by_name or any(info is not None and not info.is_write for info in returns)


def _size(x: Tensor) -> int:
    """Returns the bytes in memory: an expanded dimension counts once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count * x.element_size()
