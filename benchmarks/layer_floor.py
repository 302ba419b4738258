"""The least time of a transformer layer on one GPU, and where the time of a measured layer goes.

The floor is what remains if all communication is hidden and every element-wise kernel is fused with its neighbours:
the layer's products alone, its attention alone, and the bytes of its element-wise work at the rate of a copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from async_tp import Products
from torch import Tensor
from torch._C._autograd import DeviceType

from torch_overlap.mesh.models import Transformer
from torch_overlap.tools.bench.trace import lane_of

Kernel = tuple[str, float, float]  # name, start and duration in microseconds

COPY_BYTES = 256 << 20
# Bytes read or written by fused element-wise kernels, forward and backward, in units of this rank's rows [S/n, hidden]
# and of its hidden features [S, ffn/n]: two norms with residuals, and the activation with its gate.
ROWS_MOVED, HIDDEN_MOVED = 14, 8

_ATTENTION = re.compile(r"fmha|flash|sdpa|attention", re.IGNORECASE)
# Kernels of torch itself and copies within the GPU, by category; the first match counts.
_OWN = re.compile(r"at::native|triton|Memcpy DtoD|Memset")
_OWN_CATEGORIES = {"norms": r"norm", "copies": r"cat|copy|memcpy|memset|fill", "element-wise": ""}


@dataclass(frozen=True)
class Parts:
    """The products and the attention of one rank: calls of their own, and the bytes of the element-wise work."""

    products: Callable[[], object]
    attention: Callable[[], object]
    copy: Callable[[], object]
    elementwise_bytes: int

    def calls(self) -> dict[str, Callable[[], object]]:
        return {"products": self.products, "attention": self.attention, "copy": self.copy}

    def floor_us(self, products_us: float, attention_us: float, copy_us: float) -> float:
        """Returns the floor from the times of the three calls."""
        return products_us + attention_us + self.elementwise_us(copy_us)

    def elementwise_us(self, copy_us: float) -> float:
        return us_of_bytes(self.elementwise_bytes, copy_us)


def us_of_bytes(count: float, copy_us: float) -> float:
    """Returns the microseconds in which bytes are read or written at the rate of the copy of `Parts`."""
    return count * copy_us / (2 * COPY_BYTES)


def products_of(
    rows: int, shapes: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> Callable[[], None]:
    """Returns a call of the three products of each weight [n, k] of `shapes` (k, n): the result and both gradients."""
    made = [tuple(torch.randn(size, device=device, dtype=dtype) for size in ((rows, k), (n, k), (rows, n)))
            for k, n in shapes]  # fmt: skip

    def products() -> None:
        for x, w, y in made:
            torch.mm(x, w.t())
            torch.mm(y, w)
            torch.mm(y.t(), x)

    return products


def parts_of(model: Transformer, ranks: int, batch: int, device: torch.device, dtype: torch.dtype) -> Parts:
    """Makes the parts of a layer whose features are split over `ranks`, forward and backward; weights of one gather are
    joined."""
    rows, head = model.sequence * batch, model.hidden // model.heads
    heads, kv_heads, hidden = model.heads // ranks, model.kv_heads // ranks, model.ffn // ranks
    wide = (2 if model.gated else 1) * hidden
    shapes = [(model.hidden, (heads + 2 * kv_heads) * head), (heads * head, model.hidden),
              (model.hidden, wide), (hidden, model.hidden)]  # fmt: skip
    q, k, v = (torch.randn(batch, count, model.sequence, head, device=device, dtype=dtype, requires_grad=True)
               for count in (heads, kv_heads, kv_heads))  # fmt: skip
    grad = torch.randn_like(q)
    source = torch.empty(COPY_BYTES if device.type == "cuda" else 1 << 16, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def attention() -> None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        torch.autograd.grad(y, (q, k, v), grad)

    size = torch.finfo(dtype).bits // 8
    moved = (ROWS_MOVED * rows // ranks * model.hidden + HIDDEN_MOVED * rows * hidden) * size
    return Parts(products_of(rows, shapes, device, dtype), attention, lambda: target.copy_(source), moved)


def without_communication(ranks: int) -> Products:
    """Returns operators that send nothing: other ranks' rows are whatever is in memory. For timing only."""
    memory: dict[tuple[int, ...], Tensor] = {}

    def gathered(x: Tensor) -> Tensor:
        shape = (ranks * x.size(0), x.size(1))
        if shape not in memory:
            memory[shape] = x.repeat(ranks, 1)
        return memory[shape]

    def gather_matmul(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        rows = gathered(x)
        return rows, [rows @ weight for weight in weights]

    def scatter(x: Tensor) -> Tensor:
        return x[: x.size(0) // ranks].clone()

    return Products(gather_matmul, lambda x, weight: scatter(x @ weight), scatter)


def category_of(kernel: str) -> str:
    """Returns the category of a kernel or copy by its name."""
    if _ATTENTION.search(kernel):
        return "attention"
    if _OWN.search(kernel):
        return next(category for category, names in _OWN_CATEGORIES.items() if re.search(names, kernel.lower()))
    lane = lane_of(kernel)
    return "products" if lane == "product" else lane


def time_by_category(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Returns microseconds by category of kernels, and two more entries.

    "idle": no kernel runs between the first and the last. "communication alone": communication runs and nothing else.
    Categories overlap in time, so their sum may exceed the whole.
    """
    spans = sorted((start, start + duration, category_of(name)) for name, start, duration in kernels)
    found: dict[str, float] = {}
    for start, end, category in spans:
        found[category] = found.get(category, 0.0) + end - start
    busy = _union((start, end) for start, end, _ in spans)
    working = _union((start, end) for start, end, category in spans if category != "communication")
    if spans:
        found["idle"] = max(end for _, end, _ in spans) - spans[0][0] - _length(busy)
        found["communication alone"] = _length(busy) - _length(working)
    return found


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the disjoint spans that cover `spans`, which are sorted."""
    covered: list[tuple[float, float]] = []
    for start, end in spans:
        if covered and start <= covered[-1][1]:
            covered[-1] = covered[-1][0], max(end, covered[-1][1])
        else:
            covered.append((start, end))
    return covered


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def longest(kernels: Iterable[Kernel], count: int) -> list[tuple[str, int, float]]:
    """Returns the kernels that take the longest together: name, number of launches, microseconds."""
    found: dict[str, tuple[int, float]] = {}
    for name, _, duration in kernels:
        launches, us = found.get(name, (0, 0.0))
        found[name] = launches + 1, us + duration
    return [(name, *found[name]) for name in sorted(found, key=lambda name: -found[name][1])[:count]]


def profile(call: Callable[[], object]) -> list[Kernel]:
    """Returns the kernels of one call on this rank's GPU. The call waits for the other ranks: all make it."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    return [(event.name, event.time_range.start, event.time_range.elapsed_us())
            for event in recorded.events() if event.device_type == DeviceType.CUDA]  # fmt: skip
