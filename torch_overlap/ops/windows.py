"""One-sided operations on a window (`TorchComm.new_window`): what its methods do, where a compiler can see it.

`x` is the window's own tensor, `window.get_tensor()`, and stands for the window: all three are said to change it, so
they stay, in order with each other and with what is done with `x`. Pass it to a compiled function as an argument.
Inductor works in the window's memory; a backend that works on copies (aot_eager) gets an error. No gradients.
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
    """Copies `source` to the elements from `offset` on of the tensor of rank `dst`. Signals nobody."""
    _ops.put(x, source, dst, offset, _name(window))


def signal(x: Tensor, window: TorchCommWindow, dst: int) -> None:
    """Adds one to the signals that rank `dst` has of this rank: what was put before is there when it is seen."""
    _ops.signal(x, dst, _name(window))


def wait_signal(x: Tensor, window: TorchCommWindow, src: int) -> None:
    """Waits for a signal of rank `src` that no wait has consumed; what that rank had put before is then in `x`."""
    _ops.wait_signal(x, src, _name(window))
