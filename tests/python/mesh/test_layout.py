"""Meshes, layouts and their spellings, against torch.chunk and DTensor."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

import torch_overlap as to
from torch_overlap.mesh import DimSpec, Layout, Mesh, P, ShardingSpec, _core, to_layout


def test_the_types_are_those_of_the_module() -> None:
    tree = ast.parse((Path(to.__file__).parent / "mesh" / "_core.pyi").read_text())
    stub = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    real = {name for name in dir(_core) if not name.startswith("_")}
    assert set(stub) == real
    given = set(dir(object)) | {"__module__", "__getstate__", "__setstate__", "_pybind11_conduit_v1_"}
    for name, node in stub.items():
        member = getattr(_core, name)
        assert (member.__doc__ or "").strip(), name
        if isinstance(node, ast.ClassDef):
            members = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            members |= {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
            assert {m for m in dir(member) if m not in given} == members - {"__init__"}, name
    assert to.mesh.__all__ == sorted(to.mesh.__all__)


@pytest.mark.smoke
def test_a_mesh_has_named_axes_over_any_ranks() -> None:
    mesh = Mesh({"dp": 2, "tp": 2}, ranks=[7, 4, 6, 5])
    assert mesh.axes == {"dp": 2, "tp": 2}
    assert mesh.size == 4
    assert mesh.group(6, "dp") == [7, 6]
    assert mesh.group(6, ("tp", "dp")) == [7, 6, 4, 5]
    assert mesh.coordinate(5, "tp") == 1
    assert mesh == Mesh({"dp": 2, "tp": 2}, ranks=[7, 4, 6, 5])
    assert hash(mesh) == hash(Mesh({"dp": 2, "tp": 2}, ranks=[7, 4, 6, 5]))
    assert mesh != Mesh({"dp": 2, "tp": 2})
    assert Mesh.parse("dp=4,tp=4", ranks_per_host=8).links("dp") == {"nvlink": 2, "network": 2}
    assert Mesh({"a": 4}, links={"a": "network"}).links("a") == {"network": 4}
    with pytest.raises(ValueError, match="expected a rank of the mesh, got 0"):
        mesh.coordinate(0, "dp")
    with pytest.raises(ValueError, match=r"one of the axes \[dp, tp\], got 'pp'"):
        mesh.group(7, "pp")
    with pytest.raises(ValueError, match="got one of 'b'"):
        Mesh({"a": 4}, links={"b": "network"})
    with pytest.raises(TypeError, match="expected None, an axis or axes in order, got int"):
        Layout(mesh, [3])  # type: ignore[list-item]


@pytest.mark.parametrize("axes", [{"dp", "tp"}, frozenset(["dp"]), {"dp": 1}, {"dp": 1}.keys(), b"dp"],
                         ids=["set", "frozenset", "dict", "keys", "bytes"])  # fmt: skip
def test_a_spelling_without_order_is_refused(axes: Any) -> None:
    """A set of names is ordered differently in another process; the keys of a dict are not entries by dimension."""
    mesh = Mesh({"dp": 2, "tp": 4})
    an_axis = r"expected an axis or a sequence of axes a dimension, got {} .*; write axes as a tuple"
    name = type(axes).__name__
    with pytest.raises(TypeError, match="to_layout: " + an_axis.format(name)):
        to_layout([None, axes], mesh, 2)
    with pytest.raises(TypeError, match="P: " + an_axis.format(name)):
        P(None, axes)
    with pytest.raises(TypeError, match="DimSpec: " + an_axis.format(name)):
        DimSpec(axes)
    with pytest.raises(TypeError, match=f"to_layout: expected a layout or a sequence .*, got {name} "):
        to_layout(axes, mesh, 2)
    if isinstance(axes, set | frozenset | dict):
        with pytest.raises(TypeError, match=f"Layout: expected None, an axis or axes in order, got {name}"):
            Layout(mesh, [axes, None])


def test_what_is_no_spelling_is_refused() -> None:
    mesh = Mesh({"dp": 2, "tp": 4})
    with pytest.raises(TypeError, match="P: expected an axis or a sequence of axes a dimension, got int 3"):
        P(3)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="to_layout: expected a layout or a sequence with an entry a dimension, got int 3"
    ):
        to_layout(3, mesh, 2)


def test_every_spelling_is_one_layout() -> None:
    mesh = Mesh({"dp": 2, "tp": 4})
    expected = Layout(mesh, ["dp", None, ("tp",)])
    assert expected.dims == (("dp",), (), ("tp",))
    assert str(expected) == "[dp],[],[tp]"
    for spec in (
        P("dp", None, "tp"),
        ["dp", None, ["tp"]],
        "[dp],[],[tp]",
        [DimSpec(("dp",)), DimSpec(is_open=True), DimSpec("tp")],  # type: ignore[arg-type]
        ShardingSpec(mesh, (DimSpec(("dp",)), DimSpec(), DimSpec(("tp",)))),
        expected,
    ):
        assert to_layout(spec, mesh, 3) == expected
    assert to_layout(P("dp"), mesh, 3) == Layout(mesh, ["dp", None, None])  # shorter than the number of dimensions
    assert to_layout(P(), mesh, 2) == to_layout(None, mesh, 2) == Layout.replicated(mesh, 2)
    assert to_layout(P(("dp", "tp")), mesh, 1).dims == (("dp", "tp"),)
    assert repr(P("dp", None, ("dp", "tp"))) == "P('dp', None, ('dp', 'tp'))"
    pending = Layout(mesh, [None], partial={"dp": "max"}, invariant="tp")
    assert (pending.partial, pending.invariant) == ({"dp": "max"}, ("tp",))
    assert Layout.parse(mesh, str(pending)) == pending
    assert ShardingSpec(mesh, [DimSpec()], partial_sum_axes={"tp"}).layout.partial == {"tp": "sum"}  # type: ignore[arg-type]


def test_wrong_specs_are_refused() -> None:
    mesh, other = Mesh({"dp": 2, "tp": 4}), Mesh({"x": 8})
    with pytest.raises(ValueError, match="at most 1 entries"):
        to_layout(P("dp", "tp"), mesh, 1)
    with pytest.raises(ValueError, match=r"a layout on Mesh\(dp=2, tp=4\)"):
        to_layout(Layout.parse(other, "[x]"), mesh, 1)
    with pytest.raises(ValueError, match="a layout of 2 dimensions"):
        to_layout("[dp]", mesh, 2)
    with pytest.raises(ValueError, match="every axis once, got 'dp'"):
        to_layout(P("dp", "dp"), mesh, 2)
    with pytest.raises(ValueError, match="every axis once"):
        ShardingSpec(mesh, (DimSpec(("dp",)),), replicated_axes=frozenset({"dp"}))
    with pytest.raises(ValueError, match="every axis once"):
        ShardingSpec(mesh, (DimSpec(),), frozenset({"dp"}), frozenset({"dp"}))
    with pytest.raises(ValueError, match="share nothing"):
        Layout(other, ["x", "x:(1)2"])
    with pytest.raises(ValueError, match="priority 0 for a closed dimension"):
        DimSpec(priority=1)
    with pytest.raises(ValueError, match="got 'median'"):
        Layout(mesh, [None], partial={"dp": "median"})


def test_parts_are_those_of_torch_chunk() -> None:
    mesh = Mesh({"x": 4})
    layout = Layout(mesh, ["x"])
    for n in (0, 1, 3, 5, 7, 10, 11, 12):
        parts = [*torch.arange(n).chunk(4), *[torch.empty(0)] * 4][:4] if n else [torch.empty(0)] * 4
        assert [layout.local_shape([n], rank)[0] for rank in range(4)] == [len(part) for part in parts]


def test_parts_are_those_of_dtensor(seed: int) -> None:
    """Every axis on one dimension or replicated, in mesh order, as in DTensor's placements."""
    rng = random.Random(seed)
    for _ in range(300):
        sizes = [rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(1, 3))]
        shape = [rng.randint(0, 13) for _ in range(rng.randint(1, 3))]
        placements = [Shard(rng.randrange(len(shape))) if rng.random() < 0.7 else Replicate() for _ in sizes]
        names = [f"m{i}" for i in range(len(sizes))]
        dims: list[list[str]] = [[] for _ in shape]
        for name, placement in zip(names, placements, strict=True):
            if isinstance(placement, Shard):
                dims[placement.dim].append(name)
        mesh = Mesh(dict(zip(names, sizes, strict=True)))
        layout = Layout(mesh, dims)
        for rank, coordinate in enumerate(np.ndindex(*sizes)):
            expected, offset = _compute_local_shape_and_global_offset(
                tuple(shape), tuple(sizes), lambda d, c=coordinate: c[d], placements
            )
            assert layout.local_shape(shape, rank) == tuple(expected), (layout, shape)
            if 0 not in expected:
                assert layout.offsets(shape, rank) == tuple(offset), (layout, shape)


def test_the_global_shape_is_not_rounded_up() -> None:
    layout = Layout(Mesh({"x": 4}), ["x"])
    assert layout.global_shape([layout.local_shape([7], rank) for rank in range(4)]) == (7,)
    with pytest.raises(ValueError, match="expected size"):
        layout.global_shape([(1,), (2,), (2,), (2,)])
