"""One-sided operations on a window (`TorchComm.new_window`), as operators that a compiler can see.

`x` is the window's own tensor, `window.get_tensor()`, and stands for the window: all three operators are declared to
mutate it, so they are kept, in order with each other and with other uses of `x`. No gradients.

Pass `x` to a compiled function as an argument. Inductor works in the window's memory, unless another operation in the
function changes `x`, or one result needs values of `x` from before and after one of the three: then it works on a copy,
which raises. Put to the own rank instead of changing `x`, and compute with earlier values in a function of its own. A
backend that always works on copies (aot_eager) raises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_overlap._C import TorchCommWindow

_ops = torch.ops.torch_overlap
torch.utils._pytree.register_constant(TorchCommWindow)


@torch.compiler.assume_constant_result
def _name(window: TorchCommWindow) -> str:
    return window.get_name()


def put(x: Tensor, source: Tensor, window: TorchCommWindow, dst: int, offset: int = 0) -> None:
    """Copies `source` into the tensor of rank `dst`, starting at element `offset`. Sends no signal."""
    _ops.put(x, source, dst, offset, _name(window))


def signal(x: Tensor, window: TorchCommWindow, dst: int) -> None:
    """Increments rank `dst`'s count of signals from this rank. Previous puts are visible once it is seen."""
    _ops.signal(x, dst, _name(window))


def wait_signal(x: Tensor, window: TorchCommWindow, src: int) -> None:
    """Waits for a signal of rank `src` that no wait has consumed. That rank's previous puts are then visible in `x`."""
    _ops.wait_signal(x, src, _name(window))
