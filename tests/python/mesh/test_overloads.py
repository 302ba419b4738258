"""Rules are found by an operator's name: an overload with another meaning has a rule of its own, or none."""

from __future__ import annotations

import random
from typing import Any

import pytest
import simulated as sim
import torch
from torch import Tensor

from torch_overlap import UnsupportedError
from torch_overlap.mesh import Mesh
from torch_overlap.mesh.aten_call import AtenCall, Operand
from torch_overlap.mesh.capture import capture
from torch_overlap.mesh.rules import known_operators, rule_of

aten = torch.ops.aten
INDEX = torch.tensor([[0, 2, 1, 3, 0, 1]])


def data(*shape: int) -> Tensor:
    return (torch.randn(shape) * 64).round() / 64 + 0.0  # -0.0 becomes 0.0, as in a sum of terms: view(dtype) sees bits


X, Y, ROW = data(4, 6), data(4, 6), data(1, 6)
# Arguments of each overload whose positions have another meaning than in its neighbour.
CALLS: dict[Any, tuple[Any, ...]] = {
    aten.softmax.int: (X, 0, torch.float64),
    aten.log_softmax.int: (X, 1, torch.float64),
    aten.max.dim: (X, 0),
    aten.min.dim: (X, 1, True),
    aten.scatter.src: (X, 0, INDEX, ROW),
    aten.scatter.reduce: (X, 0, INDEX, ROW),
    aten.split.default: (X, [1, 3], 0),
    aten.std.dim: (X, [0], False),
    aten.var.dim: (X, [1], True, True),
    aten.std_mean.dim: (X, [0], False),
    aten.var_mean.dim: (X, [0, 1]),
    aten.tensor_split.indices: (X, [1, 2], 1),
    aten.to.device: (X, torch.device("cpu"), torch.float64),
    aten.to.dtype: (X, torch.float16),
    aten.to.other: (X, Y.double()),
    aten.view.dtype: (X, torch.int32),
    aten.view_copy.dtype: (X, torch.int16),
}
for n in (1, 2, 3):
    for name in ("upsample_nearest", "_upsample_nearest_exact"):
        CALLS[getattr(aten, f"{name}{n}d").vec] = data(2, 4, *[3] * n), None, [2.0] * n
for name in ("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa",
             "_upsample_bicubic2d_aa", "upsample_trilinear3d"):  # fmt: skip
    n = int(next(c for c in name if c.isdigit()))
    CALLS[getattr(aten, name).vec] = data(2, 4, *[3] * n), [5] * n, False, None
NAMED: dict[Any, dict[str, Any]] = {aten.scatter.reduce: {"reduce": "add"}}
WITHOUT_RULE = {aten.mm.dtype, aten.bmm.dtype, aten.addmm.dtype, aten.baddbmm.dtype}
READ_ELEMENTS: dict[Any, tuple[Any, ...]] = {
    aten.repeat_interleave.Tensor: (torch.tensor([1, 2]),),
    aten.repeat_interleave.self_Tensor: (X, torch.tensor([1, 2, 0, 1]), 0),
    aten.where.default: (X > 0,),
    aten.tensor_split.tensor_indices_or_sections: (X, torch.tensor(2)),
}


def is_called(overload: Any) -> bool:
    """Returns True if torch calls the overload on tensors: not those that write, or have named dimensions or
    TorchScript's values."""
    kinds = [str(a.type) for a in overload._schema.arguments]
    named = any(a.name in ("dim", "dims", "start_dim") and "str" in str(a.type) for a in overload._schema.arguments)
    written = overload._schema.is_mutable or any(a.is_out for a in overload._schema.arguments)
    return any("Tensor" in kind for kind in kinds) and not (named or written or "Dict[Tensor, t]" in kinds)


def other_overloads() -> set[Any]:
    """Returns overloads of operators with a rule that name a position differently than the one before, or have a
    dtype."""
    found = set()
    for name in known_operators():
        packet, before = getattr(aten, name, None), list[str]()
        for overload in [] if packet is None else [getattr(packet, o) for o in packet.overloads()]:
            names = [a.name for a in overload._schema.arguments if not a.kwarg_only]
            if is_called(overload) and not overload._overloadname.startswith(
                ("prim_", "Tensor_list", "list_", "sublist")
            ):
                is_other = any(a != b for a, b in zip(before, names, strict=False))
                found |= {overload} if is_other or any("dtype" in n for n in names) else set()
                before = max(before, names, key=len)
    return found


def test_every_overload_of_another_meaning_is_known() -> None:
    """A new overload belongs into one of the tables above, and call.py must name it if no rule fits."""
    assert other_overloads() - {*CALLS, *WITHOUT_RULE, *READ_ELEMENTS} == set()


@pytest.mark.parametrize("overload", CALLS, ids=str)
def test_it_gives_what_torch_gives(overload: Any, seed: int) -> None:
    """Values and dtypes, of whole, sharded and partial operands."""
    rng, args, named = random.Random(seed), CALLS[overload], NAMED.get(overload, {})
    expected = overload(*args, **named)
    for text in ("x=2", "x=2,y=2", "x=4"):
        for _ in range(4):
            mesh = Mesh.parse(text)
            tensors = [x for x in args if isinstance(x, Tensor)]
            layouts = [sim.random_layout(rng, mesh, x.dim(), partial=x.is_floating_point()) for x in tensors]
            operands = [sim.spread(x, layout, rng) for x, layout in zip(tensors, layouts, strict=True)]
            given = [Operand(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in args]
            results = sim.run_program(capture(overload, given, named, layouts=layouts), operands, mesh)
            pairs = [(results, expected)] if isinstance(expected, Tensor) else zip(results, expected, strict=True)
            for value, want in pairs:
                torch.testing.assert_close(value.collected(), want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("overload", sorted(WITHOUT_RULE, key=str), ids=str)
def test_products_of_another_dtype_have_no_rule(overload: Any) -> None:
    """They run on whole operands: rules, expansions and overlapped operators have no result of another dtype."""
    batch = (2,) if "bmm" in str(overload) else ()
    a, b = Operand((*batch, 4, 6), torch.bfloat16), Operand((*batch, 6, 8), torch.bfloat16)
    bias = [Operand((*batch, 4, 8), torch.bfloat16)] if "addmm" in str(overload) or "baddbmm" in str(overload) else []
    out = Operand((*batch, 4, 8), torch.float32)
    call = AtenCall(overload, [*bias, a, b, torch.float32], {}, [out])
    assert call.name == str(overload).removeprefix("aten.")
    assert rule_of(call) is None


@pytest.mark.parametrize("overload", READ_ELEMENTS, ids=str)
def test_those_that_read_elements_are_refused(overload: Any) -> None:
    given = [Operand(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in READ_ELEMENTS[overload]]
    with pytest.raises(UnsupportedError, match=r"meta|data-dependent"):
        capture(overload, given)
