"""distribute, simulate and collect: plans and layouts on the arrays of all ranks, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_overlap._C import InvalidTypeError
from torch_overlap.mesh import _core
from torch_overlap.mesh._core import Layout, Plan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

__all__ = ["collect", "distribute", "simulate"]


def distribute(array: ArrayLike, layout: Layout) -> list[NDArray[np.float64]]:
    """Returns the local arrays of a global `array` (converted to float64) in `layout`, one per mesh index.

    Raises:
        InvalidTypeError: the array is complex.
    """
    _refuse_complex("distribute", "array", array)
    return _core.distribute(array, layout)


def collect(locals: Sequence[ArrayLike], layout: Layout, shape: Sequence[int]) -> NDArray[np.float64]:
    """Returns the global array of this `shape` from the `locals` of all mesh indices in `layout`.

    Raises:
        InvalidTypeError: one of the arrays is complex.
        InvalidValueError: copies are not bitwise equal, or a local shape does not fit.
    """
    for local in locals:
        _refuse_complex("collect", "locals", local)
    return _core.collect(locals, layout, shape)


def simulate(plan: Plan, locals: Sequence[ArrayLike]) -> list[NDArray[np.float64]]:
    """Returns the local arrays after `plan`, given the `locals` of all mesh indices.

    Raises:
        InvalidTypeError: one of the arrays is complex.
    """
    for local in locals:
        _refuse_complex("simulate", "locals", local)
    return _core.simulate(plan, locals)


def _refuse_complex(op: str, argument: str, array: ArrayLike) -> None:
    """Raises InvalidTypeError for a complex array: its conversion to float64 would drop the imaginary parts."""
    import numpy as np

    if np.iscomplexobj(array):
        raise InvalidTypeError(
            f"{op}: expected real numbers for {argument}, got {np.asarray(array).dtype}; "
            "call it for the real and for the imaginary part"
        )
